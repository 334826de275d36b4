"""`Replanner`: plans a captured step again under other hints, to tell what these would cost."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from autoshard.capture.joint import JointGraph
from autoshard.capture.marks import assign_task_graphs, defaults_of
from autoshard.capture.python.state import PythonState
from autoshard.capture.recomputation import RECOMPUTES, captured_step, graph_of_plan
from autoshard.errors import BudgetError, HintError, PlanError
from autoshard.options.placements import InfeasibleHintError
from autoshard.options.target import Target
from autoshard.patterns.decisions import Decisions
from autoshard.planner.hints import HintValue
from autoshard.planner.planner import Planner
from autoshard.planner.planning import CapturedCall, PlannerCache
from autoshard.planner.regions import with_regions
from autoshard.planner.shares import plan_shares
from autoshard.plans.alternative import Alternative
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape


@dataclass(frozen=True, slots=True)
class Replanner:
    """Finds the best plan of a captured step under other hints of a user.

    Attributes:
        graph: the captured step, most of the memory of a plan with a replanner.
        capture_seconds: the time of its capture.
        mesh: the mesh axes.
        target: the options of the plan.
        module: a weak reference to the module, whose parameters may be large.
    """

    graph: JointGraph
    capture_seconds: float
    mesh: MeshShape
    target: Target
    module: weakref.ref[nn.Module]

    @staticmethod
    def of(module: nn.Module, graph: JointGraph, capture_seconds: float, mesh: MeshShape, target: Target) -> Replanner:
        """Return the replanner of a captured step of a module."""
        # Guards of calls and an optimizer would keep the parameters alive. Planning needs neither: the settings
        # describe the optimizer.
        graph = replace(graph, state=PythonState())
        target = replace(target, options=replace(target.options, optimizer=None))
        return Replanner(graph, capture_seconds, mesh, target, weakref.ref(module))

    def remember(self, plan: ShardingPlan) -> ShardingPlan:
        """Return a plan that answers `why_not` with this replanner."""
        return replace(plan, replanner=self)

    def within(self, memory_limit: int | None) -> Replanner:
        """Return a replanner with another memory limit in bytes."""
        settings = replace(self.target.settings, memory_limit=memory_limit)
        return replace(self, target=replace(self.target, settings=settings))

    def __call__(self, plan: ShardingPlan, asked: Mapping[str, HintValue]) -> Alternative[ShardingPlan]:
        """Return the best plan under the asked hints, with the difference; as `ShardingPlan.why_not`."""
        module = existing_module(self.module)
        check_asked(asked, self.mesh)
        target = replace(self.target, hints={**(self.target.hints or {}), **asked})
        captured = captured_step(self.graph)
        # The graph may still have the task graphs of earlier questions.
        assign_task_graphs(captured.graph, defaults_of(module))
        try:
            graph = with_regions(captured, target.hints, [name for name, _ in module.named_modules()])
        except InfeasibleHintError as error:
            return Alternative.impossible(str(error))
        call = CapturedCall(graph, self.capture_seconds, self.mesh, target, PlannerCache(module, self.mesh))
        try:
            if _has_regions(graph, plan) and _has_all(call.planner_of(target), plan):
                return Alternative.same(plan)
            other = plan_shares(call)
        except InfeasibleHintError as error:
            return Alternative.impossible(str(error))
        except BudgetError as error:
            assert target.settings.memory_limit is not None, "without a limit, every plan fits"
            return Alternative.too_large(target.settings.memory_limit, error.peak)
        return Alternative.possible(plan, replace(self, graph=graph, target=target).remember(other))


def existing_module(module: weakref.ref[nn.Module]) -> nn.Module:
    """Return the module of a weak reference; raise a `PlanError` if it no longer exists."""
    found = module()
    if found is None:
        raise PlanError(
            "the model of this plan exists no more: keep it, or ask autoshard.why_not(plan, asked, model, "
            "example_args, example_kwargs)."
        )
    return found


def check_asked(asked: object, mesh: MeshShape) -> None:
    """Raise a `HintError` unless `asked` is a mapping with entries."""
    if not isinstance(asked, Mapping) or not asked:
        raise HintError(
            f"why_not({asked!r}): say what the plan should have, as hints do: "
            f"{{'layers.*.up.weight': {{{mesh.names[-1]!r}: Shard(0)}}}}."
        )


def _has_regions(graph: JointGraph, plan: ShardingPlan) -> bool:
    """Return True if a plan recomputes and moves all that a graph does, and nothing that the graph keeps."""
    again, of_plan = _again(graph), _again(graph_of_plan(graph, plan.recomputed, plan.offloaded))
    is_kept = of_plan.isdisjoint(graph.kept) and graph.kept.keys().isdisjoint(plan.offloaded)
    return again <= of_plan and is_kept and {*graph.offloaded} <= {*plan.offloaded}


def _again(graph: JointGraph) -> set[str]:
    """Return the names of the recomputed operators."""
    return {node.meta[RECOMPUTES] for node in graph.graph.nodes if RECOMPUTES in node.meta}


def _has_all(planner: Planner, plan: ShardingPlan) -> bool:
    """Return True if the planner's constraints allow the decisions of a plan."""
    builder, decisions = planner.builder, Decisions.from_data(plan.decisions)
    # Choices are indices of loops, and dims in parts for unequal shares have different loops.
    if plan.parts and builder.restrictions.operators:
        return False
    for source in planner.graph.parameters:
        pins = planner.constraints.pinned.get(source.name, (None,) * planner.mesh.ndim)
        placed = zip(pins, plan.placements[source.name], strict=True)
        if not all(pin is None or pin == placement for pin, placement in placed):
            return False
        # The parameters of a split task graph are sharded where they can be.
        is_restricted = source.name in builder.restrictions.sharded_parameters
        if is_restricted and decisions.rest[source.node.name] not in builder.boundary_specs.of_input(source):
            return False
    return all(
        decisions.choices.get(node.name) in planner.tables.options(planner.rules.rules[node], None, restriction).choices
        for node, restriction in builder.restrictions.operators.items()
    )
