"""Captured steps, planned without devices, and the programs that ranks would run."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from autoshard.capture.joint import JointGraph, capture
from autoshard.cluster.cluster import Cluster, Link
from autoshard.options.target import Settings
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.planner.account import StepAccount
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.explorer import Explorer
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints, OverlapDiscount
from autoshard.planner.rerun_context import RerunContext
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program._torch import split_joint
from autoshard.program.localize import LocalStep, localize
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from autoshard.specs.spec import Spec
from tests import models
from tests.training import fast_links

PLENTY = 300.0
"""Seconds that a search may take, so that no plan depends on how busy the machine is."""

KINDS = {
    collectives.all_reduce.default: "all_reduce",
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_to_all_single.default: "all_to_all",
}


@functools.cache
def joint_graph(name: str, grad: bool = True, **options: Any) -> JointGraph:
    """Return the joint graph of a model of `tests.models`."""
    module, inputs = models.ALL[name](**options)
    return capture(module, (), inputs, grad=grad)


class PlainPlanner(Planner):
    """A planner with plans in which nothing else runs again than in its graph."""

    def plan(self) -> ShardingPlan:
        """Return the fastest plan that keeps the limit of the settings."""
        return Explorer(self, may_rerun=False).plan()


def planner_of(
    graph: JointGraph,
    mesh: Mapping[str, int],
    constraints: Constraints | None = None,
    cluster: Cluster | None = None,
    **settings: Any,
) -> PlainPlanner:
    """Return a planner with enough time; without a cluster, links are so fast that tiny models are sharded."""
    asked = Settings(**{"time_limit": PLENTY} | settings)
    return PlainPlanner(graph, MeshShape.of(mesh), cluster or fast_links(), constraints or Constraints(), asked)


class MemoizingContext(RerunContext):
    """A context that solves no problem twice: searches at several limits meet many of the same."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.solved: dict[object, CandidatePlan] = {}

    def solve(self, constraints: Constraints, **options: Any) -> CandidatePlan:
        prices: np.ndarray | None = options.get("prices")
        discount: OverlapDiscount | None = options.get("discount")
        key = (
            constraints.forced,
            None if prices is None else prices.tobytes(),
            None if discount is None else discount.price,
        )
        if key not in self.solved:
            self.solved[key] = super().solve(constraints, **options)
        return self.solved[key]


def plan_of(graph: JointGraph, mesh: Mapping[str, int], *args: Any, **settings: Any) -> ShardingPlan:
    """Return the plan of such a planner."""
    return planner_of(graph, mesh, *args, **settings).plan()


def regather_all(planner: Planner, plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with every copy that both halves gather made again in the backward half."""
    decisions = Decisions.from_data(plan.decisions)
    hubs: dict[str, Spec] = {}
    for key, spec in decisions.hubs.items():
        keys = [key] if "@" in key else [f"{key}@forward", f"{key}@backward"]
        hubs |= dict.fromkeys(keys, spec)
    return plan_of_decisions(planner, dataclasses.replace(decisions, hubs=hubs))


def plan_of_decisions(planner: Planner, decisions: Decisions) -> ShardingPlan:
    """Return the plan of some decisions, without a search."""
    return planner.describe(planner.evaluate(decisions, 0.0, 0.0, "given"))


def flow_of(planner: Planner, plan: ShardingPlan) -> Flow:
    """Return the decisions of a plan on the planner's graph."""
    return Flow(planner.rules, Decisions.from_data(plan.decisions), planner.mesh)


def account_of(planner: Planner, plan: ShardingPlan) -> StepAccount:
    """Return the account of a plan."""
    return StepAccount(flow_of(planner, plan), planner.tables, planner.resharder)


def program_of(planner: Planner, plan: ShardingPlan) -> LocalStep:
    """Return the program of a plan; its process groups have the names of the mesh axes."""
    return localize(flow_of(planner, plan), planner.resharder, planner.mesh.names)


def halves_of(step: LocalStep) -> tuple[fx.GraphModule, ...]:
    """Forward and backward before their collectives are scheduled, without what nothing uses."""
    halves: tuple[fx.GraphModule, ...] = (step.graph_module,)
    if any(border.kind == "gradient" for border in step.outputs):
        halves = split_joint(step.graph_module, len(step.forward_outputs))
    for half in halves:
        half.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return halves


def collectives_of(*graphs: fx.GraphModule) -> Counter[tuple[str, str, int]]:
    """Return the number of collectives in programs, by kind, axis and bytes before."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for graph in graphs:
        for node in graph.graph.nodes:
            if node.target in KINDS:
                counts[KINDS[node.target], str(node.args[-1]), bytes_of(node.args[0])] += 1
    return counts


def bytes_of(node: Any) -> int:
    """Bytes of the tensor that a node makes."""
    val: torch.Tensor = node.meta["val"]
    return val.numel() * val.element_size()


def planned_collectives(plan: ShardingPlan) -> Counter[tuple[str, str, int]]:
    """Return the number of collectives in a plan's records, by kind, axis and bytes before."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for record in plan.collectives:
        counts[record.kind, record.axis, record.bytes] += record.count
    return counts


def bytes_sent(counts: Counter[tuple[str, str, int]], mesh: MeshShape) -> float:
    """Bytes that one rank sends in all these collectives, by ring algorithms."""
    total = 0.0
    for (kind, axis, held), count in counts.items():
        size = mesh.sizes[mesh.names.index(axis)]
        blocks = {"all_gather": size - 1, "all_reduce": 2 * (size - 1) / size}.get(kind, (size - 1) / size)
        total += count * held * blocks
    return total


def every_parameter(graph: JointGraph) -> frozenset[str]:
    """Names of all parameters."""
    return frozenset(source.name for source in graph.inputs if source.kind == "parameter")


def links(bandwidth: float, latency: float, **changed: Any) -> Cluster:
    """CPUs without launch overhead behind links of so many bytes per second and seconds; other fields as `changed`."""
    cluster = fast_links()
    link = Link(bandwidth=bandwidth, latency=latency)
    return dataclasses.replace(cluster, inside=link, between=link, **changed)
