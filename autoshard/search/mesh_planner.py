"""The plans of one mesh: without a memory limit, within it, and with all effort."""

from __future__ import annotations

import time
from dataclasses import replace

from autoshard.errors import BudgetError, PipelineError
from autoshard.options.target import Target
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.shape_planner import Stopping
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planner import Planner
from autoshard.planner.planning import planner_for, run_planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.initial_guess import InitialGuess
from autoshard.search.request import Request
from autoshard.search.row import Row
from autoshard.search.shapes import Shape
from autoshard.search.step_bounds import tighten_bound
from autoshard.specs.axes import MeshShape

_PROVED = 1e-4
"""Relative gap at which a problem that was solved quickly is not solved again."""


class MeshPlanner:
    """Makes plans until a deadline.

    Args:
        request: the model, the options and the limits.
        deadline: `time.monotonic()` seconds.

    Attributes:
        initial_guess: what to plan first.
        interrupted: True if Ctrl-C ended the search for a plan, which is then the best one until then.
    """

    def __init__(self, request: Request, deadline: float) -> None:
        self.request = request
        self.deadline = deadline
        self.initial_guess = InitialGuess(request)
        self.interrupted = False

    def new_planner(self, shape: Shape, target: Target, like: Planner | None = None) -> Planner:
        """Return a planner for the axes of a mesh."""
        return planner_for(self.request.module, self.request.graph, shape.mesh, target, like=like)

    def plan_on(self, mesh: MeshShape, target: Target) -> ShardingPlan:
        """Return a plan of the whole step on some devices."""
        return self._plan_mesh(planner_for(self.request.module, self.request.graph, mesh, target), target)

    def without_limit(self, row: Row) -> ShardingPlan:
        """Plan a mesh quickly without a memory limit; its proved lower bound tightens the bound of the mesh."""
        target = self.target("fast", limited=False)
        row.planner = planner = self.new_planner(row.shape, target)
        plan = self._plan_mesh(planner, target)
        if planner.unlimited is not None:
            links = {planner.cost.spans_hosts(axis) for axis in range(row.shape.mesh.ndim)}
            contention = planner.cluster.contention
            row.least_seconds = tighten_bound(row.least_seconds, planner.unlimited, len(links), contention)
        return plan

    def within_limit(self, row: Row) -> ShardingPlan:
        """Plan a mesh quickly within the limit."""
        target = self.target("fast")
        unlimited = None if row.planner is None else row.planner.unlimited
        return self._plan_mesh(self.new_planner(row.shape, target, like=row.planner), target, unlimited)

    def plan_thoroughly(self, row: Row) -> ShardingPlan:
        """Plan a mesh with the effort asked for."""
        target = self.target()
        quick = None if row.planner is None else row.planner.unlimited
        if quick is not None and quick.cost - quick.lower_bound > _PROVED * quick.cost:
            quick = None
        return self._plan_mesh(self.new_planner(row.shape, target, like=row.planner), target, quick)

    def pipeline_of_one_shape(self, row: Row) -> PipelinePlan:
        """Plan a pipeline of one shape, or of all shapes if that has no plan."""
        request, shape = self.request, row.shape
        number = self.initial_guess.microbatches(shape)
        virtual = 1 if request.pipeline.virtual == "auto" else request.pipeline.virtual
        row.covers_all_shapes = (number, virtual) == (request.pipeline.microbatches, request.pipeline.virtual)
        try:
            return self._plan_pipeline(row, number, virtual, self.target("fast"))
        except (BudgetError, PipelineError):
            if row.covers_all_shapes or time.monotonic() > self.deadline:
                raise
        row.covers_all_shapes = True
        return self.plan_pipeline(row, "fast")

    def plan_pipeline(self, row: Row, effort: str | None = None) -> PipelinePlan:
        """Plan a pipeline of any shape that is asked for."""
        pipeline = self.request.pipeline
        return self._plan_pipeline(row, pipeline.microbatches, pipeline.virtual, self.target(effort))

    def plan_with_shares(self, row: Row) -> PipelinePlan:
        """Plan a pipeline of the shape that it has, with shares in proportion to speed where that is faster."""
        assert row.plan is not None
        assert not isinstance(row.plan, ShardingPlan)
        number, virtual = row.plan.microbatches, row.plan.virtual
        efforts = [effort for effort, shapes in row.planned_shapes.items() if (number, virtual) in shapes]
        target = replace(self.target(efforts[-1] if efforts else "fast"), shares="auto")
        return self._plan_pipeline(row, number, virtual, target)

    def _plan_pipeline(self, row: Row, microbatches: int | str, virtual: int | str, target: Target) -> PipelinePlan:
        request, shape, stopping = self.request, row.shape, Stopping(self.deadline)
        if request.own_memory:
            target = replace(target, settings=replace(target.settings, memory_limit=None))
        plan = request.plan_pipeline(
            shape.mesh,
            replace(request.pipeline, axis=shape.axis, microbatches=microbatches, virtual=virtual),
            target,
            begin=self.initial_guess.microbatches(shape),
            known=row.planned_shapes.setdefault(target.settings.effort, {}),
            stopping=stopping,
        )
        self.interrupted = self.interrupted or stopping.interrupted
        return plan

    def target(self, effort: str | None = None, *, limited: bool = True) -> Target:
        """Return the target of the request with another effort, and at most half of the time that is left."""
        settings = self.request.target.settings
        left = max(self.deadline - time.monotonic(), 1e-3)
        changed = replace(
            settings,
            effort=effort or settings.effort,
            memory_limit=settings.memory_limit if limited else None,
            time_limit=min(settings.time_limit, left / 2),
        )
        return replace(self.request.target, settings=changed, shares=None)

    def _plan_mesh(self, planner: Planner, target: Target, unlimited: CandidatePlan | None = None) -> ShardingPlan:
        if unlimited is not None and target.settings.recompute == "full":
            unlimited = None  # it is of the step without recomputation
        plan = run_planner(planner, self.request.capture_seconds, target, unlimited, explained=False)
        self.interrupted = self.interrupted or planner.interrupted
        return plan
