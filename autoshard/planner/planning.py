"""Planners of captured steps, and the plans that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.capture.joint import JointGraph
from autoshard.options.target import Target
from autoshard.planner import hints as hint_rules
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.gc_freeze import freeze_older_objects
from autoshard.planner.planner import Planner
from autoshard.planner.progress_line import show_progress
from autoshard.planner.recompute_search import plan_with_recompute
from autoshard.planner.target_constraints import PlacementsByName, constraints_for
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape


@freeze_older_objects()
def planner_for(
    module: nn.Module, graph: JointGraph, mesh: MeshShape, target: Target, like: Planner | None = None
) -> Planner:
    """Return a planner for the first call of a module; arguments as for `constraints_for` and `Planner`."""
    constraints = constraints_for(module, graph, mesh, target)
    return Planner(graph, mesh, target.cluster, constraints, target.settings, like=like)


class PlannerCache:
    """Planners of the calls of one module on one mesh, which share their tables of operators and tensors.

    Args:
        module: the module.
        mesh: the mesh axes.
    """

    def __init__(self, module: nn.Module, mesh: MeshShape) -> None:
        self.module = module
        self.mesh = mesh
        self._first_planners: list[Planner] = []  # the first planner at every set of prices

    @freeze_older_objects()
    def of(
        self,
        graph: JointGraph,
        target: Target,
        placed: PlacementsByName | None = None,
        placed_inputs: PlacementsByName | None = None,
    ) -> Planner:
        """Return a new planner for a graph; arguments as for `constraints_for`."""
        constraints = constraints_for(self.module, graph, self.mesh, target, placed, placed_inputs)
        prices = constraints.shared, target.cluster, target.settings
        alike = (
            planner
            for planner in self._first_planners
            if (planner.constraints.shared, planner.cluster, planner.settings) == prices
        )
        like = next(alike, None)
        planner = Planner(graph, self.mesh, target.cluster, constraints, target.settings, like=like)
        if like is None:
            self._first_planners.append(planner)
        return planner

    def forget(self) -> None:
        """Drop the results of searches, which hold much memory; keep the tables that serve other planners."""
        for planner in self._first_planners:
            planner.forget()


@freeze_older_objects()
def run_planner(
    planner: Planner,
    capture_seconds: float,
    target: Target,
    unlimited: CandidatePlan | None = None,
    *,
    explained: bool = True,
) -> ShardingPlan:
    """Return the plan of a planner, with a line about the search on a terminal.

    Args:
        planner, unlimited, explained: as for `plan_with_recompute`.
        capture_seconds: the time of the graph's capture.
        target: the target of the planner.
    """
    with show_progress(target.options.search.verbose) as planner.progress:
        plan = plan_with_recompute(planner, unlimited, explained=explained)
    return with_provenance(plan, planner, capture_seconds, target)


def with_provenance(plan: ShardingPlan, planner: Planner, capture_seconds: float, target: Target) -> ShardingPlan:
    """Return a plan with the record of the capture, the hints and the options that it was made with."""
    task_graphs = {
        str(primitive): " x ".join(planner.mesh.names[axis] for axis in axes) or "one device"
        for primitive, axes in planner.constraints.task_graphs.items()
    }
    options: dict[str, Any] = {
        "inputs": target.inputs,
        "memory_limit": target.settings.memory_limit,
        "method": target.settings.method,
    }
    if isinstance(target.shares, Mapping):
        options["shares"] = {axis: list(counts) for axis, counts in target.shares.items()}
    return replace(
        plan,
        timings={"capture": capture_seconds, **plan.timings},
        hints={**hint_rules.describe(target.hints), **task_graphs},
        options=options,
    )
