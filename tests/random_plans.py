"""Plans chosen at random: any assignment without an infinite edge must compute what one device computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.capture.joint import JointGraph
from autoshard.capture.offloading import movable_values, offload_values
from autoshard.capture.recomputation import recomputable, recompute_layers, rerunnable
from autoshard.cluster.cluster import Cluster
from autoshard.options.target import Settings
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.graph_rules import Value
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.solver import Problem
from autoshard.specs.axes import MeshShape

Neighbours = list[list[tuple[int, np.ndarray]]]
"""For every variable: the other end of each of its edges, and which pairs of options are finite."""


def random_plan(
    graph: JointGraph,
    mesh: MeshShape,
    seed: int,
    *,
    forced: float = 0.0,
    uneven: float = 0.0,
    recompute: float = 0.0,
    rerun: float = 0.0,
    offload: float = 0.0,
    planned_outputs: bool = False,
) -> ShardingPlan:
    """A plan with a random feasible strategy for every operator.

    Args:
        graph: the captured step.
        mesh: the mesh axes.
        seed: of the choices.
        forced: share of the parameters that may not be replicated.
        uneven: share of the parameters that are cut along random dims, whether the axes divide these or not.
        recompute: share of the layers that the backward half runs again.
        rerun: share of the single operators of layers that it runs again.
        offload: share of the values that are moved to the host in between.
        planned_outputs: outputs may stay sharded.
    """
    generator = np.random.default_rng(seed)
    layers = recomputable(graph) if recompute else ()
    names = [layer.name for layer in layers if generator.random() < recompute]
    if rerun:
        names += [name for name in rerunnable(graph) if generator.random() < rerun]
    moved = [name for name in movable_values(graph) if generator.random() < offload] if offload else []
    graph = recompute_layers(offload_values(graph, moved), names)
    shapes = {source.name: Value(source.node).meta.shape for source in graph.inputs if source.kind == "parameter"}
    constraints = Constraints(
        pinned={name: _cut(shape, mesh, generator) for name, shape in shapes.items() if generator.random() < uneven},
        forced=frozenset(name for name in shapes if generator.random() < forced),
        planned_outputs=planned_outputs,
    )
    planner = Planner(graph, mesh, Cluster.preset("cpu"), constraints, Settings())
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    decisions: Decisions | None = None
    for block in [axes[:2], *([axis] for axis in axes[2:])]:
        built = builder.build(
            frozenset(block), decisions, reuse="all" if forced or recompute or rerun or offload else "none"
        )
        decisions = built.decode(random_assignment(built.problem, generator))
    assert decisions is not None
    return plan_of(graph, mesh, decisions)


def _cut(shape: tuple[int, ...], mesh: MeshShape, generator: np.random.Generator) -> tuple[Placement, ...]:
    """A dim of its own for every mesh axis, as long as there are some that are long enough."""
    free = [int(dim) for dim in generator.permutation(len(shape))]
    placements: list[Placement] = []
    for size in mesh.sizes:
        dim = next((dim for dim in free if shape[dim] >= size > 1), None)
        if dim is not None:
            free.remove(dim)
        placements.append(Replicate() if dim is None else Shard(dim))
    return tuple(placements)


def plan_of(graph: JointGraph, mesh: MeshShape, decisions: Decisions) -> ShardingPlan:
    """The part of a plan that the runtime needs."""
    held = [source for source in graph.inputs if source.kind in ("parameter", "buffer")]
    names = {name: source for source in held for name in graph.aliases[source.name]}
    return ShardingPlan(
        mesh=mesh,
        placements={name: decisions.rest[source.node.name].placements for name, source in names.items()},
        output_placements={name: spec.placements for name, spec in decisions.outputs.items()},
        shapes={name: Value(source.node).meta.shape for name, source in names.items()},
        fingerprint=graph.fingerprint,
        decisions=decisions.to_data(),
        method="random",
        recomputed=graph.recomputed,
        offloaded=graph.offloaded,
    )


def random_assignment(
    problem: Problem, generator: np.random.Generator, near: Sequence[int] = (), kept: float = 0.0
) -> list[int]:
    """An assignment of finite cost: options drawn one variable after another, the others' options kept consistent.

    A dead end, which consistency along edges does not exclude, starts the drawing again.

    Args:
        problem: of which.
        generator: draws.
        near: an assignment of finite cost.
        kept: share of the variables that have the option of `near`, where that is consistent with others.
    """
    neighbours: Neighbours = [[] for _ in problem.costs]
    for edge in problem.edges:
        finite = np.isfinite(edge.costs)
        neighbours[edge.source].append((edge.target, finite))
        neighbours[edge.target].append((edge.source, finite.T))
    for _ in range(100):
        domains = [np.isfinite(costs) for costs in problem.costs]
        wanted = [int(option) if generator.random() < kept else -1 for option in near]
        if _draw(domains, neighbours, generator, wanted):
            return [int(np.flatnonzero(domain)[0]) for domain in domains]
    raise AssertionError("no feasible assignment was drawn in 100 attempts")


def _draw(
    domains: list[np.ndarray], neighbours: Neighbours, generator: np.random.Generator, wanted: Sequence[int]
) -> bool:
    """Reduce every domain to one option, the one wanted if that may be, or else at random; whether that succeeded."""
    if not _propagate(domains, neighbours, list(range(len(domains)))):
        return False
    for variable in generator.permutation(len(domains)):
        options = np.flatnonzero(domains[variable])
        option = wanted[variable] if wanted and wanted[variable] in options else generator.choice(options)
        domains[variable] = np.zeros_like(domains[variable])
        domains[variable][option] = True
        if not _propagate(domains, neighbours, [variable]):
            return False
    return True


def _propagate(domains: list[np.ndarray], neighbours: Neighbours, pending: list[int]) -> bool:
    """Take options without a partner out of the domains of neighbours, until nothing changes."""
    while pending:
        variable = pending.pop()
        for other, finite in neighbours[variable]:
            kept = domains[other] & finite[domains[variable]].any(axis=0)
            if not kept.any():
                return False
            if kept.sum() < domains[other].sum():
                domains[other] = kept
                pending.append(other)
    return True
