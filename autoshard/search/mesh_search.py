"""The search over all meshes of one number of devices: drop by bounds, plan quickly, plan the best with all effort."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.errors import AutoshardError, BudgetError, PlanError, warn_caller
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.mesh_planner import MeshPlanner
from autoshard.search.pipeline_estimates import PipelineEstimates
from autoshard.search.pruning import (
    CLOSE_FACTOR,
    slow_pipeline_reason,
    slow_within_limit_reason,
    unpromising_reason,
)
from autoshard.search.request import Request
from autoshard.search.result import BEST, MeshCandidate
from autoshard.search.row import Row, UnlimitedResult, no_mesh_fits_error
from autoshard.search.shapes import shapes, straddle_reason
from autoshard.search.step_bounds import LeastWork, least_bytes
from autoshard.solver.candidate_search import CandidateSearch
from autoshard.units import format_bytes, format_seconds

_log = logging.getLogger("autoshard")

_NEAR_FACTOR = 1.1
"""A mesh whose quick plan is slower than the best by less is planned with all effort, which gains a few percent."""

_ALL_SHAPES_FACTOR = 1.5
"""The fastest of the pipelines that were planned for one number of microbatches is planned for any number if it is
slower than the best by less. What that gains decides about the others."""

_TIE_FACTOR = 1.01
"""Plans that differ by less may change places within a memory limit."""


class MeshSearch(CandidateSearch[Row]):
    """Searches for the fastest plan that fits, over all meshes of a number of devices.

    * A mesh is dropped if it can't fit, or can't win, by bounds that need no plan. By experience, it is also dropped if
      the same mesh with two axes joined, or shorter pipelines, are far slower than the best.
    * Each of the others is planned quickly (`effort="fast"`) and without a memory limit: a limit takes most of the
      time of planning, and a mesh that is slow without a limit need not be planned with one. Pipelines are planned
      within the limit at once, since their schedules depend on it, and for one number of microbatches. Before that, a
      pipeline is estimated, by a plan of the whole step on the devices of one stage; it is planned if it may win, given
      by how little the estimates of planned pipelines fell short.
    * Pipelines that are nearly as fast as the best are planned with the effort asked for, and for any number of
      microbatches.
    * Fast meshes whose plan holds too much are planned within the limit; the first of them is planned at once if no
      pipeline fits. If the limit slows the first ones down, others that hold as much are not planned.
    * Other meshes that are nearly as fast as the best are planned with the effort asked for.

    The time limit and Ctrl-C end the search with the best plan so far.

    Args:
        request: the model, the options and the limits.
        devices: the number of devices.
        deadline: `time.monotonic()` seconds at which the search ends with the best plan so far.

    Attributes:
        best: the mesh with the fastest plan that fits; None where there is none yet.
        notes: the reasons why the search ended early.
        interrupted: True if Ctrl-C ended the search.
    """

    def __init__(self, request: Request, devices: int, deadline: float) -> None:
        super().__init__()
        self.request = request
        self.devices = devices
        self.interrupted = False
        self.notes: list[str] = []
        self.mesh_planner = MeshPlanner(request, deadline)
        self._limit = request.memory_limit
        self._failures: list[AutoshardError] = []
        self._rows = self._build_rows()

    def run(self) -> None:
        """Search for the best mesh.

        Raises:
            BudgetError: no plan fits; the message names the smallest need.
            AutoshardError: no mesh could be planned at all; the error is that of the first.
            KeyboardInterrupt: Ctrl-C before there was any plan.
        """
        try:
            self.evaluate_each(self._rows, self._screening_reason, self._plan_quickly)
            self._refine(pipelines=True)
            self._plan_within_limit()
            self._refine(pipelines=False)
            self._plan_with_shares()
        except KeyboardInterrupt:
            self.interrupted = True
            if self.best is None:
                raise
            self._add_note("the search was interrupted: this is the best plan met until then.")
        if self.best is None:
            raise self._no_plan_error()

    def candidates(self) -> tuple[MeshCandidate, ...]:
        """Return all meshes, the fastest first, those without a plan last."""
        return tuple(sorted(map(self._candidate, self._rows), key=_sort_key))

    def _candidate(self, row: Row) -> MeshCandidate:
        """Return the line of a mesh in the table."""
        verdict = row.verdict
        if row is self.best:
            verdict = BEST
        elif row.plan is not None and self.best is not None:
            verdict = self.slower_text(row)
        return MeshCandidate(
            shape=row.shape,
            least_seconds=row.least_seconds,
            least_bytes=row.least_bytes,
            seconds=row.seconds if row.plan is not None else None,
            peak=row.peak if row.plan is not None else None,
            plan=row.plan if row is self.best else None,
            verdict=verdict,
        )

    # The phases of the search

    def _build_rows(self) -> list[Row]:
        """Return all meshes with their bounds."""
        request = self.request
        meshes = shapes(
            self.devices, request.target.cluster, request.pipelines, self.mesh_planner.initial_guess.has_free_memory
        )
        optimizer = request.target.settings.optimizer
        # A hint may not fit the first mesh, and bounds need none.
        planner = self.mesh_planner.new_planner(meshes[0], replace(request.target, hints=None))
        work = LeastWork(planner.rules, planner.cost)
        self.estimates = PipelineEstimates(self.mesh_planner, work.shares)
        return [
            Row(
                shape=shape,
                least_seconds=work.seconds(shape, request.microbatch_numbers),
                least_bytes=least_bytes(request.graph, shape, optimizer),
            )
            for shape in meshes
        ]

    def _screening_reason(self, row: Row) -> str | None:
        return self._drop_reason(row) or self._unpromising_reason(row)

    def _plan_quickly(self, row: Row) -> None:
        """Plan a pipeline of one shape within the limit, or another mesh without a limit."""
        with self._record_failure(row):
            if row.shape.axis is not None:
                self._record_plan(row, self.mesh_planner.pipeline_of_one_shape(row))
            else:
                plan = self.mesh_planner.without_limit(row)
                if plan.memory.peak <= self._limit:
                    self._record_plan(row, plan)
                else:
                    row.seconds, row.peak = plan.step_seconds, plan.memory.peak
                    row.unlimited = UnlimitedResult(plan.step_seconds, plan.memory.peak)
        self._ensure_plan(row)

    def _ensure_plan(self, row: Row) -> None:
        """Make a plan that fits early, for the case that the search ends, and to drop others by it.

        The first pipeline is that plan if there are pipelines: it is planned within the limit anyhow. If it does not
        fit, it is the fastest mesh without a limit.
        """
        if self.best is not None or (row.shape.axis is None and self.request.pipelines != "none"):
            return
        for fastest in sorted(self._too_large(), key=lambda large: large.step_seconds)[:1]:
            with self._record_failure(fastest):
                self._record_plan(fastest, self.mesh_planner.within_limit(fastest))

    def _too_large(self) -> list[Row]:
        """Return meshes whose plan holds too much, and that have not been planned within the limit."""
        return [row for row in self._rows if row.unlimited and row.plan is None and row.smallest_peak is None]

    def _plan_within_limit(self) -> None:
        """Plan the meshes within the limit that are fast enough without it.

        The fastest without a limit are first; of nearly equal ones, those with the fewest axes, which take the least
        time.
        """
        rows = self._too_large()
        fastest = min((row.step_seconds for row in rows), default=0.0)
        rows.sort(key=lambda row: (max(row.step_seconds, _TIE_FACTOR * fastest), row.shape.mesh.ndim))

        def drop_reason(row: Row) -> str | None:
            if self.best is None:
                return None
            return self._drop_reason(row) or slow_within_limit_reason(row, self._rows, self.best)

        def evaluate(row: Row) -> None:
            with self._record_failure(row):
                self._record_plan(row, self.mesh_planner.within_limit(row))

        self.evaluate_each(rows, drop_reason, evaluate)

    def _refine(self, *, pipelines: bool) -> None:
        """Plan the best and those near it with all effort; and pipelines of any shape."""
        fast = self.request.target.settings.effort == "fast"
        shapes_factor = _ALL_SHAPES_FACTOR
        planned = [row for row in self._rows if row.plan is not None and (row.shape.axis is not None) == pipelines]
        for row in sorted(planned, key=lambda row: row.step_seconds):
            assert self.best is not None
            near = _NEAR_FACTOR if row.covers_all_shapes else shapes_factor
            is_far = row.step_seconds > near * self.best.step_seconds
            is_final = fast and row.covers_all_shapes
            if is_far or is_final or (row is not self.best and self.cannot_win(row)):
                continue
            if self._is_late(row):
                return
            with self._record_failure(row):
                before = row.step_seconds
                thorough = (
                    self.mesh_planner.plan_thoroughly if row.shape.axis is None else self.mesh_planner.plan_pipeline
                )
                self._record_plan(row, thorough(row))
                if not row.covers_all_shapes:
                    shapes_factor = min(shapes_factor, CLOSE_FACTOR * before / row.step_seconds)

    def _plan_with_shares(self) -> None:
        """Plan the best pipeline with shares of microbatches too, if devices differ inside its stages."""
        row = self.best
        if row is None or row.shape.axis is None or self.request.target.cluster.is_uniform or self._is_late(row):
            return
        with self._record_failure(row):
            self._record_plan(row, self.mesh_planner.plan_with_shares(row))

    def _record_plan(self, row: Row, plan: ShardingPlan | PipelinePlan) -> None:
        """Record a plan that fits, and update the best."""
        row.add_plan(plan)
        if self.best is None or row.step_seconds < self.best.step_seconds:
            self.best = row
        for slow in self._rows:
            if slow.plan is not None and slow.step_seconds > _NEAR_FACTOR * self.best.step_seconds:
                slow.planner = None  # it is large, and not used any more
                slow.planned_shapes.clear()
        if self.mesh_planner.interrupted:
            raise KeyboardInterrupt

    # Verdicts and notes

    def _drop_reason(self, row: Row) -> str | None:
        """Return why a mesh is not planned, by bounds and by time; None where it is."""
        reason = straddle_reason(row.shape, self.request.target.cluster)
        if reason is not None:
            return f"refused: {reason}"
        if row.least_bytes > self.request.device_memory(row.shape):
            return f"cannot fit: a device holds at least {format_bytes(row.least_bytes)}"
        if self.cannot_win(row):
            return f"cannot win: a step takes at least {format_seconds(row.least_seconds)}"
        if self._is_late(row):
            return "not planned: the time limit was reached"
        return None

    def _unpromising_reason(self, row: Row) -> str | None:
        """Return why a mesh is not worth a plan, by the plans of others; None where it is."""
        best, pipeline = self.best, row.shape.axis is not None
        reason = None if best is None else unpromising_reason(row, self._rows, best, self.request.target.cluster)
        if reason is None and pipeline:
            row.estimate = self.estimates.seconds(row.shape, self.request.feasible_numbers(row.shape))
        if best is None or not pipeline:  # the first pipeline shows by how much estimates fall short
            return reason
        return reason or slow_pipeline_reason(row, self._rows, best)

    @contextlib.contextmanager
    def _record_failure(self, row: Row) -> Iterator[None]:
        """Make an error the verdict of its mesh, unless the mesh has a plan already."""
        start = time.monotonic()
        try:
            yield
        except BudgetError as error:
            row.smallest_peak = error.peak
            needs = "" if error.peak is None else f": the smallest peak found is {format_bytes(error.peak)}"
            row.verdict = row.verdict if row.plan else f"does not fit{needs}"
        except AutoshardError as error:
            self._failures.append(error)
            row.verdict = row.verdict if row.plan else f"refused: {error}"
        row.took = time.monotonic() - start
        if self.request.target.options.search.verbose:
            result = "no plan" if row.seconds is None else f"{format_seconds(row.seconds)} per step"
            _log.info("mesh %s: %s, after %.1f s", row.shape, result, row.took)

    def _is_late(self, row: Row) -> bool:
        """Return True if there is less time than the last plan of a mesh took."""
        took = row.next_planning_seconds(self.request.target.settings.effort)
        late = time.monotonic() + took > self.mesh_planner.deadline
        if late and not self.notes:
            self._add_note("the time limit ended the search: this is the best plan met until then.")
        return late

    def _add_note(self, note: str) -> None:
        self.notes.append(f"On {self.devices} devices {note}")
        warn_caller(self.notes[-1])

    def _no_plan_error(self) -> AutoshardError:
        """Return why no mesh has a plan."""
        shortage = no_mesh_fits_error(self._rows, self.devices, self._limit)
        if shortage is not None or self._failures:
            return shortage or self._failures[0]
        return PlanError(
            f"no mesh of {self.devices} devices was planned within the time limit: allow more time, or fewer devices."
        )


def _sort_key(candidate: MeshCandidate) -> tuple[bool, float, Sequence[int]]:
    """Return the key of the order of the table."""
    return candidate.seconds is None, candidate.seconds or candidate.least_seconds, candidate.shape.mesh.sizes
