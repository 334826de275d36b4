"""The search over all meshes of one number of devices: dropped by bounds, planned quickly, the best planned well."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.errors import AutoshardError, BudgetError, PlanError, warn_caller
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.mesh_candidate import MeshCandidate
from autoshard.search.mesh_planner import MeshPlanner
from autoshard.search.pipeline_estimates import PipelineEstimates
from autoshard.search.pruning import (
    CLOSE_FACTOR,
    slow_pipeline_reason,
    slow_within_limit_reason,
    unpromising_reason,
)
from autoshard.search.request import Request
from autoshard.search.row import Row, UnlimitedResult, no_mesh_fits_error
from autoshard.search.shapes import shapes, straddle_reason
from autoshard.search.step_bounds import LeastWork, least_bytes
from autoshard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoshard.pipeline.plan.pipeline_plan import PipelinePlan

_log = logging.getLogger("autoshard")

_NEAR_FACTOR = 1.1
"""A plan made quickly is worth being made well where it is slower than the best by less: effort gains a few percent."""

_ALL_SHAPES_FACTOR = 1.5
"""The fastest of the pipelines that were planned for one number of microbatches is planned for any number where it is
slower than the best by less; what that gains says which others are."""

_TIE_FACTOR = 1.01
"""Plans that differ by less may change places within a memory limit."""

_SAME = 1 + 1e-9
"""Times that differ by less are equal: the same sums, rounded in another order."""


class MeshSearch:
    """Looks for the fastest plan that fits, over all meshes of a number of devices.

    * A mesh is dropped where it can't fit, or can't win, by bounds that need no plan; and, as a matter of experience,
      where the same mesh with two axes joined, or shorter pipelines, are far slower than the best.
    * Each of the others is planned quickly (`effort="fast"`), without a limit on memory: that is where most of the time
      goes that a limit takes, and a mesh that is slow without one need not be planned with one. Pipelines are planned
      within the limit at once, since their schedules depend on it, and for one number of microbatches.
      They are estimated first, by a plan of the whole step on the devices of one stage, and planned if those planned
      before fell short of their estimates by so little that they may win.
    * Pipelines that are as fast as the best, or nearly, are planned with the effort asked for, and for any number.
    * Those that hold too much and are fast are planned within the limit, the first of them at once where no pipeline
      fits either; where the limit slows the first ones down, others that hold as much are not.
    * Other meshes that are as fast as the best, or nearly, are planned with the effort asked for.

    The time limit and Ctrl-C end it with the best plan met.

    Args:
        request: what is searched for.
        devices: how many there are.
        deadline: `time.monotonic()` seconds at which the search ends with the best plan met.

    Attributes:
        best: the mesh with the fastest plan that fits; None where there is none yet.
        notes: what cut the search short.
        interrupted: whether Ctrl-C did.
    """

    def __init__(self, request: Request, devices: int, deadline: float) -> None:
        self.request = request
        self.devices = devices
        self.interrupted = False
        self.notes: list[str] = []
        self.best: Row | None = None
        self.mesh_planner = MeshPlanner(request, deadline)
        self._limit = request.memory_limit
        self._failures: list[AutoshardError] = []
        self._rows = self._build_rows()

    def run(self) -> None:
        """Look for the best.

        Raises:
            BudgetError: nothing that was planned fits; the message names the smallest need.
            AutoshardError: no mesh could be planned at all; the reason is that of the first.
            KeyboardInterrupt: Ctrl-C before there was any plan.
        """
        try:
            self._screen()
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
        """All meshes, the fastest first, those without a plan last."""
        return tuple(sorted((row.candidate(self.best) for row in self._rows), key=_sort_key))

    # The way of every mesh

    def _build_rows(self) -> list[Row]:
        """All meshes with their bounds."""
        request = self.request
        found = shapes(
            self.devices, request.target.cluster, request.pipelines, self.mesh_planner.initial_guess.has_free_memory
        )
        optimizer = request.target.settings.optimizer
        free = self.mesh_planner.new_planner(
            found[0], replace(request.target, hints=None)
        )  # a hint may not fit this mesh
        work = LeastWork(free.rules, free.cost)
        self.estimates = PipelineEstimates(self.mesh_planner, work.shares)
        return [
            Row(shape, work.seconds(shape, request.microbatch_numbers), least_bytes(request.graph, shape, optimizer))
            for shape in found
        ]

    def _screen(self) -> None:
        """Plan all meshes quickly that are not dropped."""
        for row in self._rows:
            row.verdict = self._drop_reason(row) or self._unpromising_reason(row) or ""
            if row.verdict:
                continue
            with self._record_failure(row):
                if row.shape.axis is not None:
                    self._record_plan(row, self.mesh_planner.pipeline_of_one_size(row))
                    continue
                plan = self.mesh_planner.without_limit(row)
                if plan.memory.peak <= self._limit:
                    self._record_plan(row, plan)
                    continue
                row.seconds, row.peak = plan.step_seconds, plan.memory.peak
                row.unlimited = UnlimitedResult(plan.step_seconds, plan.memory.peak)
            self._ensure_plan(row)

    def _ensure_plan(self, row: Row) -> None:
        """See to it that there is one, whatever ends the search, so that others can be dropped.

        The first pipeline is it where there are some: it is planned within the limit anyhow. Where that does not fit,
        it is the mesh that is the fastest without a limit.
        """
        if self.best is not None or (row.shape.axis is None and self.request.pipelines != "none"):
            return
        for one in sorted(self._too_large(), key=lambda one: one.step_seconds)[:1]:
            with self._record_failure(one):
                self._record_plan(one, self.mesh_planner.within_limit(one))

    def _too_large(self) -> list[Row]:
        """Meshes with a plan that does not fit, and none that does, as far as anybody tried."""
        return [row for row in self._rows if row.planner and row.plan is None and row.smallest_peak is None]

    def _plan_within_limit(self) -> None:
        """Plan those within the limit that are fast enough without it.

        The fastest without it are first; of those that are as good as equal, the one with the fewest axes, which takes
        the least time.
        """
        rows = self._too_large()
        fastest = min((row.step_seconds for row in rows), default=0.0)
        rows.sort(key=lambda row: (max(row.step_seconds, _TIE_FACTOR * fastest), row.shape.mesh.ndim))
        for row in rows:
            if self.best is not None:
                row.verdict = self._drop_reason(row) or slow_within_limit_reason(row, self._rows, self.best) or ""
            if not row.verdict:
                with self._record_failure(row):
                    self._record_plan(row, self.mesh_planner.within_limit(row))

    def _refine(self, *, pipelines: bool) -> None:
        """Plan with all effort what is the best, or near it; and pipelines of any size, not of one alone."""
        fast = self.request.target.settings.effort == "fast"
        sizes = _ALL_SHAPES_FACTOR
        planned = [row for row in self._rows if row.plan is not None and (row.shape.axis is not None) == pipelines]
        for row in sorted(planned, key=lambda row: row.step_seconds):
            assert self.best is not None
            near = _NEAR_FACTOR if row.covers_all_shapes else sizes
            cannot = row is not self.best and row.least_seconds * _SAME >= self.best.step_seconds
            if cannot or row.step_seconds > near * self.best.step_seconds or (fast and row.covers_all_shapes):
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
                    sizes = min(sizes, CLOSE_FACTOR * before / row.step_seconds)

    def _plan_with_shares(self) -> None:
        """Where devices are unlike inside the stages of the best pipeline, plan it with shares of microbatches too."""
        row = self.best
        if row is None or row.shape.axis is None or self.request.target.cluster.is_uniform or self._is_late(row):
            return
        with self._record_failure(row):
            self._record_plan(row, self.mesh_planner.plan_with_shares(row))

    def _record_plan(self, row: Row, plan: ShardingPlan | PipelinePlan) -> None:
        """Note a plan that fits, and the best."""
        row.add_plan(plan)
        if self.best is None or row.step_seconds < self.best.step_seconds:
            self.best = row
        for other in self._rows:
            if other.plan is not None and other.step_seconds > _NEAR_FACTOR * self.best.step_seconds:
                other.planner = None  # it is large, and of no use any more
                other.planned_shapes.clear()
        if self.mesh_planner.interrupted:
            raise KeyboardInterrupt

    # What is said

    def _drop_reason(self, row: Row) -> str | None:
        """Why a mesh is not planned; None where it is."""
        reason = straddle_reason(row.shape, self.request.target.cluster)
        if reason is not None:
            return f"refused: {reason}"
        if row.least_bytes > self.request.device_memory(row.shape):
            return f"cannot fit: a device holds at least {format_bytes(row.least_bytes)}"
        if self.best is not None and row.least_seconds * _SAME >= self.best.step_seconds:
            return f"cannot win: a step takes at least {format_seconds(row.least_seconds)}"
        if self._is_late(row):
            return "not planned: the time limit was reached"
        return None

    def _unpromising_reason(self, row: Row) -> str | None:
        """Why a mesh is not worth a plan, by what is known of others; None where it is."""
        best, pipeline = self.best, row.shape.axis is not None
        reason = None if best is None else unpromising_reason(row, self._rows, best, self.request.target.cluster)
        if reason is None and pipeline:
            row.estimate = self.estimates.seconds(row.shape, self.request.feasible_numbers(row.shape))
        if best is None or not pipeline:  # the first pipeline tells how far off estimates are
            return reason
        return reason or slow_pipeline_reason(row, self._rows, best)

    @contextlib.contextmanager
    def _record_failure(self, row: Row) -> Iterator[None]:
        """What went wrong with one mesh is its verdict, unless it has a plan already."""
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
            told = "no plan" if row.seconds is None else f"{format_seconds(row.seconds)} per step"
            _log.info("mesh %s: %s, after %.1f s", row.shape, told, row.took)

    def _is_late(self, row: Row) -> bool:
        """Whether there is too little time for another plan of a mesh: less than its last one took."""
        late = (
            time.monotonic() + row.next_planning_seconds(self.request.target.settings.effort)
            > self.mesh_planner.deadline
        )
        if late and not self.notes:
            self._add_note("the time limit ended the search: this is the best plan met until then.")
        return late

    def _add_note(self, note: str) -> None:
        self.notes.append(f"On {self.devices} devices {note}")
        warn_caller(self.notes[-1])

    def _no_plan_error(self) -> AutoshardError:
        """Why no mesh has a plan."""
        shortage = no_mesh_fits_error(self._rows, self.devices, self._limit)
        if shortage is not None or self._failures:
            return shortage or self._failures[0]
        return PlanError(
            f"no mesh of {self.devices} devices was planned within the time limit: allow more time, or fewer devices."
        )


def _sort_key(candidate: MeshCandidate) -> tuple[bool, float, Sequence[int]]:
    """The order of the table."""
    return candidate.seconds is None, candidate.seconds or candidate.least_seconds, candidate.shape.mesh.sizes
