"""The plans of one mesh: made quickly, within the memory limit, and with all effort."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.errors import BudgetError, PipelineError
from autoshard.mesh_search.beginning import Beginning
from autoshard.mesh_search.bounds import tightened
from autoshard.mesh_search.request import Request
from autoshard.mesh_search.row import Row
from autoshard.mesh_search.shapes import Shape
from autoshard.options import Options
from autoshard.pipelined.stopping import Stopping
from autoshard.plan import ShardingPlan
from autoshard.planner.found import Found
from autoshard.planner.planner import Planner
from autoshard.planning import planned_with, planner_for
from autoshard.specs.axes import MeshShape

if TYPE_CHECKING:
    from autoshard.pipelined.plan import PipelinePlan

_PROVED = 1e-4
"""Relative gap at which a problem that was solved quickly is not solved again."""


class Plans:
    """Makes plans until a deadline.

    Args:
        request: what is searched for.
        deadline: `time.monotonic()` seconds.

    Attributes:
        beginning: what to plan first.
        interrupted: whether Ctrl-C cut a plan short, which is then the best one met until then.
    """

    def __init__(self, request: Request, deadline: float) -> None:
        self.request = request
        self.deadline = deadline
        self.beginning = Beginning(request)
        self.interrupted = False

    def planner(self, shape: Shape, options: Options, like: Planner | None = None) -> Planner:
        """A planner for the axes of a mesh."""
        return planner_for(self.request.module, self.request.graph, shape.mesh, options, like=like)

    def on(self, mesh: MeshShape, options: Options) -> ShardingPlan:
        """A plan of the whole step on some devices."""
        return self._sharded(planner_for(self.request.module, self.request.graph, mesh, options), options)

    def without_limit(self, row: Row) -> ShardingPlan:
        """A plan made quickly without a limit on memory; what is proved of it goes into the bound of the mesh."""
        options = self.options("fast", limited=False)
        row.planner = planner = self.planner(row.shape, options)
        plan = self._sharded(planner, options)
        if planner.unlimited is not None:
            links = {planner.cost.spans_hosts(axis) for axis in range(row.shape.mesh.ndim)}
            contention = planner.cluster.contention
            row.least_seconds = tightened(row.least_seconds, planner.unlimited, len(links), contention)
        return plan

    def within_limit(self, row: Row) -> ShardingPlan:
        """A plan made quickly within the limit."""
        options = self.options("fast")
        unlimited = None if row.planner is None else row.planner.unlimited
        return self._sharded(self.planner(row.shape, options, like=row.planner), options, unlimited)

    def thorough(self, row: Row) -> ShardingPlan:
        """The plan with the effort asked for."""
        options = self.options()
        quick = None if row.planner is None else row.planner.unlimited
        if quick is not None and quick.cost - quick.lower_bound > _PROVED * quick.cost:
            quick = None
        return self._sharded(self.planner(row.shape, options, like=row.planner), options, quick)

    def pipeline_of_one_size(self, row: Row) -> PipelinePlan:
        """The plan of a pipeline of one size; of all sizes where that has none."""
        request, shape = self.request, row.shape
        number = self.beginning.microbatches(shape)
        virtual = 1 if request.virtual == "auto" else request.virtual
        row.settled = (number, virtual) == (request.microbatches, request.virtual)
        try:
            return self._pipeline(row, number, virtual, self.options("fast"))
        except (BudgetError, PipelineError):
            if row.settled or time.monotonic() > self.deadline:
                raise
        row.settled = True
        return self.pipeline(row, "fast")

    def pipeline(self, row: Row, effort: str | None = None) -> PipelinePlan:
        """The plan of a pipeline of any size that is asked for."""
        return self._pipeline(row, self.request.microbatches, self.request.virtual, self.options(effort))

    def in_shares(self, row: Row) -> PipelinePlan:
        """The plan of a pipeline, or a faster one of the same size in which unlike devices take shares of their own."""
        assert row.plan is not None
        assert not isinstance(row.plan, ShardingPlan)
        number, virtual = row.plan.microbatches, row.plan.virtual
        known = [effort for effort, sizes in row.sizes.items() if (number, virtual) in sizes]
        options = replace(self.options(known[-1] if known else "fast"), shares="auto")
        return self._pipeline(row, number, virtual, options)

    def _pipeline(self, row: Row, microbatches: int | str, virtual: int | str, options: Options) -> PipelinePlan:
        request, shape, stopping = self.request, row.shape, Stopping(self.deadline)
        if request.own_memory:
            options = replace(options, settings=replace(options.settings, memory_limit=None))
        plan = request.plan_pipeline(
            request.module,
            shape.mesh,
            request.args,
            request.kwargs,
            axis=shape.axis,
            schedule=request.schedule,
            microbatches=microbatches,
            virtual=virtual,
            begin=self.beginning.microbatches(shape),
            options=options,
            known=row.sizes.setdefault(options.settings.effort, {}),
            stopping=stopping,
        )
        self.interrupted = self.interrupted or stopping.interrupted
        return plan

    def options(self, effort: str | None = None, *, limited: bool = True) -> Options:
        """The options with some of them changed, and half of the time that is left."""
        settings = self.request.options.settings
        left = max(self.deadline - time.monotonic(), 1e-3)
        changed = replace(
            settings,
            effort=effort or settings.effort,
            memory_limit=settings.memory_limit if limited else None,
            time_limit=min(settings.time_limit, left / 2),
        )
        return replace(self.request.options, settings=changed, shares=None)

    def _sharded(self, planner: Planner, options: Options, unlimited: Found | None = None) -> ShardingPlan:
        if unlimited is not None and options.settings.recompute == "full":
            unlimited = None  # it is of the step in which all layers are run again
        plan = planned_with(planner, self.request.capture_seconds, options, unlimited, explained=False)
        self.interrupted = self.interrupted or planner.interrupted
        return plan
