"""From what a user asked of a captured step to its plan."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import sympy
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.capture.call_layout import without_omitted_arguments
from autoshard.capture.joint import JointGraph, capture
from autoshard.capture.recomputation import recompute_layers
from autoshard.capture.task_graphs import assign_task_graphs, defaults_of
from autoshard.errors import HintError, PlanError
from autoshard.options import Placements
from autoshard.options.target import Target
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.graph_rules import GraphRules
from autoshard.planner import hints as hint_rules
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.gc_freeze import freeze_older_objects
from autoshard.planner.plan_checks import check_decisions, check_placements
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.progress_line import show_progress
from autoshard.planner.recompute_search import plan_with_recompute
from autoshard.planner.search_progress import Progress
from autoshard.planner.task_graph_restrictions import axes_of, whole_parameters
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, dim_of, padded_segments_of
from autoshard.specs.shared_axis import SharedAxis
from autoshard.specs.spec import Spec, is_shard


def capture_with_progress(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Target,
    *,
    grad: bool,
    tangents: Literal["loss", "all"] = "loss",
    dynamic: bool = True,
    quiet: bool = False,
) -> tuple[JointGraph, float]:
    """The graph of a call, and the seconds that its capture took, with a line about it where somebody watches.

    Args:
        module, args, kwargs, grad, tangents: as for `capture`.
        options: what was asked for.
        dynamic: whether the sizes that may be dynamic are to be.
        quiet: nobody watches: somebody else captures the same.
    """
    start = time.perf_counter()
    sizes = target.dynamic if dynamic else None
    verbose, title = target.options.search.verbose, f"capture of {type(module).__name__}"
    watching = contextlib.nullcontext() if quiet else show_progress(verbose, title)
    with watching as report:

        def begin(part: str) -> None:
            if report is not None:
                report(Progress(part, math.inf, -math.inf, time.perf_counter() - start))

        graph = capture(
            module,
            args,
            kwargs,
            grad=grad,
            tangents=tangents,
            dynamic=sizes,
            mp_policy=target.options.mp_policy,
            progress=begin,
        )
    return graph, time.perf_counter() - start


@freeze_older_objects()
def run_planner(
    planner: Planner,
    capture_seconds: float,
    target: Target,
    unlimited: CandidatePlan | None = None,
    *,
    explained: bool = True,
) -> ShardingPlan:
    """What a planner decides, with a line about the search where somebody watches.

    Args:
        planner, unlimited, explained: as for `planner.recompute.planned`.
        capture_seconds: that the capture of the graph took.
        options: what was asked for.
    """
    with show_progress(target.options.search.verbose) as planner.progress:
        return with_provenance(
            plan_with_recompute(planner, unlimited, explained=explained), planner, capture_seconds, target
        )


def with_provenance(result: ShardingPlan, planner: Planner, capture_seconds: float, target: Target) -> ShardingPlan:
    """A plan with what the planner does not know of it."""
    task_graphs = {
        str(primitive): " x ".join(planner.mesh.names[axis] for axis in axes) or "one device"
        for primitive, axes in planner.constraints.task_graphs.items()
    }
    shares = target.shares
    return replace(
        result,
        timings={"capture": capture_seconds, **result.timings},
        hints={**hint_rules.describe(target.hints), **task_graphs},
        options={
            "inputs": target.inputs,
            "memory_limit": target.settings.memory_limit,
            "method": target.settings.method,
            **(
                {"shares": {axis: list(taken) for axis, taken in shares.items()}} if isinstance(shares, Mapping) else {}
            ),
        },
    )


@freeze_older_objects()
def planner_for(
    module: nn.Module,
    graph: JointGraph,
    mesh: MeshShape,
    target: Target,
    placed: Mapping[str, tuple[Placement, ...]] | None = None,
    placed_inputs: Mapping[str, tuple[Placement, ...]] | None = None,
    like: Planner | None = None,
) -> Planner:
    """A planner for one graph.

    Args:
        module, graph, mesh, options: what is planned, and how.
        placed: placements of parameters that are not to move; those of buffers follow from their calls.
        placed_inputs: placements in which local inputs were asked for before, and arrive.
        like: a planner on the same mesh and cluster, whose tables are of use.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    modules = [name for name, _ in module.named_modules()]
    by_hints = hint_rules.task_graphs(target.hints, modules)
    if by_hints:
        assign_task_graphs(graph.graph, {**defaults_of(module), **by_hints})
    task_graphs = axes_of(graph, mesh)
    pinned: dict[str, tuple[Placement | None, ...]] = {}
    if placed is None:
        pinned.update(whole_parameters(graph, task_graphs, mesh))
        for name, pins in hint_rules.resolve(target.hints, shapes, graph.aliases, modules, mesh).items():
            less = pinned.get(name, (None,) * mesh.ndim)  # a hint on the parameter itself counts more
            pinned[name] = tuple(one if one is not None else other for one, other in zip(pins, less, strict=True))
    else:
        parameters = [source.name for source in graph.inputs if source.kind == "parameter"]
        pinned.update({name: placed[name] for name in parameters if name in placed})
    shared = shared_axis(graph, mesh, target)
    if shared is not None:
        pinned = {name: _replicate_if_shared(graph, name, pins, shared) for name, pins in pinned.items()}
    pinned.update(_input_pins(module, graph, mesh, target, placed_inputs or {}, shared))
    planned = target.output_placements == "planned"
    wishes = Constraints(
        pinned=pinned,
        planned_outputs=planned,
        outputs={} if planned else _output_specs(graph, mesh, target.output_placements),
        local_inputs=target.inputs == "local",
        shared=shared,
        task_graphs=task_graphs,
    )
    return Planner(graph, mesh, target.cluster, wishes, target.settings, like=like)


class PlannerCache:
    """Planners of the calls of one module on one mesh: what one works out of operators and tensors serves the others.

    Args:
        module, mesh: as for `planner_for`.
    """

    def __init__(self, module: nn.Module, mesh: MeshShape) -> None:
        self.module = module
        self.mesh = mesh
        self._first: list[Planner] = []  # of those that share prices

    def of(
        self,
        graph: JointGraph,
        target: Target,
        placed: Mapping[str, tuple[Placement, ...]] | None = None,
        placed_inputs: Mapping[str, tuple[Placement, ...]] | None = None,
    ) -> Planner:
        """A planner for one graph; arguments as for `planner_for`."""
        shared = shared_axis(graph, self.mesh, target)
        alike = (
            one
            for one in self._first
            if (one.constraints.shared, one.cluster, one.settings) == (shared, target.cluster, target.settings)
        )
        like = next(alike, None)
        planner = planner_for(self.module, graph, self.mesh, target, placed, placed_inputs, like=like)
        if like is None:
            self._first.append(planner)
        return planner

    def forget(self) -> None:
        """Keep what serves other planners alone: what was found holds much."""
        for one in self._first:
            one.forget()


def _replicate_if_shared(
    graph: JointGraph, name: str, pins: tuple[Placement | None, ...], shared: SharedAxis
) -> tuple[Placement | None, ...]:
    """What a parameter is pinned to, but whole where ranks would hold shares of it: no `DTensor` lies in such."""
    shapes = (source.node.meta.get("sizes", ((),))[0] for source in graph.inputs if source.name == name)
    shape, pin = next(shapes, ()), pins[shared.axis]
    if pin is None or not is_shard(pin) or not shape or not shared.is_of_whole(shape[dim_of(pin, len(shape))]):
        return pins
    return tuple(Replicate() if axis == shared.axis else one for axis, one in enumerate(pins))


def flow_of(planner: Planner, plan: ShardingPlan) -> Flow:
    """The decisions of a plan on the graph that they are of: the planner's, or that in which layers are run again."""
    rules = planner.rules
    if plan.recomputed:
        rules = GraphRules(recompute_layers(planner.graph, plan.recomputed), planner.mesh)
    return Flow(rules, Decisions.from_data(plan.decisions), planner.mesh)


def checked_flow(planner: Planner, plan: ShardingPlan) -> Flow:
    """As `flow_of`, of decisions that are made sure to fit the graph.

    Raises:
        PlanError: they do not, or the placements that the plan tells are not what they say.
    """
    flow = flow_of(planner, plan)
    check_decisions(flow, planner.resharder, planner.constraints)
    check_placements(flow, plan.placements, plan.input_placements, plan.output_placements)
    return flow


def _input_pins(
    module: nn.Module,
    graph: JointGraph,
    mesh: MeshShape,
    target: Target,
    before: Mapping[str, tuple[Placement, ...]],
    shared: SharedAxis | None,
) -> dict[str, tuple[Placement | None, ...]]:
    shapes = {s.name: tuple(s.node.meta["val"].shape) for s in graph.inputs if s.kind == "input"}
    if target.input_placements and target.inputs == "global":
        raise PlanError('input_placements is for inputs="local": global inputs are sliced by the program, for free.')
    asked: dict[str, tuple[Placement | None, ...]] = {
        name: _spec_of(f"input_placements[{name!r}]", value, shapes[name], mesh).placements
        for name, value in without_omitted_arguments(module, target.input_placements, shapes).items()
        if _check_name(name, shapes, "input")
    }
    shares: dict[str, tuple[Placement | None, ...]] = {}
    if shared is not None and target.inputs == "local":
        assert graph.dynamic is not None
        shares = {
            name: tuple(Shard(dim) if axis == shared.axis else None for axis in range(mesh.ndim))
            for name, dims in graph.dynamic.dims.items()
            for dim, size in dims.items()
            if size == shared.whole
        }
    return {**shares, **{name: placements for name, placements in before.items() if name in shapes}, **asked}


def shared_axis(graph: JointGraph, mesh: MeshShape, target: Target) -> SharedAxis | None:
    """The mesh axis that the options share unevenly, and the size that it shares: that of dim 0 of dynamic inputs, or
    what the dims of a static graph are multiples of.

    None where no shares were asked for, or the graph is of one size only.

    Raises:
        MeshError: the mesh has no such axis.
        PlanError: dynamic inputs begin with different sizes, or none.
    """
    if not isinstance(target.shares, Mapping) or graph.dynamic is None:
        return None
    (name,) = target.shares
    axis = mesh.index(name)
    batch = graph.dynamic.unit or batch_of(graph)
    if batch is None:
        sizes = {str(dims[0]) for dims in graph.dynamic.dims.values() if 0 in dims}
        raise PlanError(
            f"shares are of the batch, the dynamic size of dim 0 of the inputs, and dynamic says "
            f"{', '.join(sorted(sizes)) or 'none'} of it: give that dim of all inputs one name."
        )
    return SharedAxis(axis, mesh.sizes[axis], batch)


def batch_of(graph: JointGraph) -> sympy.Symbol | None:
    """The dynamic size that dim 0 of the dynamic inputs has; None where that is not one size."""
    sizes = set() if graph.dynamic is None else {dims[0] for dims in graph.dynamic.dims.values() if 0 in dims}
    return sizes.pop() if len(sizes) == 1 and next(iter(sizes)).is_Symbol else None


def _output_specs(graph: JointGraph, mesh: MeshShape, wanted: Placements) -> dict[str, Spec]:
    shapes = {
        o.name: tuple(o.node.meta["val"].shape) for o in graph.outputs if o.kind == "output" and o.node is not None
    }
    if wanted is None or isinstance(wanted, str):
        return {}
    return {
        name: _spec_of(f"output_placements[{name!r}]", value, shapes[name], mesh)
        for name, value in wanted.items()
        if _check_name(name, shapes, "output")
    }


def _check_name(name: str, shapes: Mapping[str, Any], kind: str) -> bool:
    if name not in shapes:
        raise HintError(f"there is no {kind} {name!r}; the {kind}s are {', '.join(shapes) or 'none'}.")
    return True


def _spec_of(what: str, value: Any, shape: tuple[int, ...], mesh: MeshShape) -> Spec:
    placements = (value,) if isinstance(value, Placement) else tuple(value)
    if len(placements) > mesh.ndim:
        raise HintError(f"{what} has {len(placements)} placements, the mesh has the axes {mesh}.")
    try:
        spec = canonical(shape, Spec.of(*placements, *[Replicate()] * (mesh.ndim - len(placements))), mesh)
        padded_segments_of(shape, spec, mesh)
    except ValueError as error:
        raise HintError(f"{what} does not fit a tensor of shape {list(shape)}: {error}") from error
    return spec
