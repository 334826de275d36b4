"""The search over all meshes of a number of devices: drop by bounds, plan quickly, plan the best at full effort.

Heuristics also drop meshes, given the plans of others, and pipelines, by estimates of their step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.errors import AutoshardError, BudgetError, PlanError, warn_caller
from autoshard.pipeline.plan.pipeline_devices import (
    PipelineMesh,
    slowest_cluster,
    stage_cluster,
    stage_devices,
    stage_target,
)
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.mesh_planner import MeshPlanner, Request
from autoshard.search.result import BEST, MeshCandidate, Row, UnlimitedResult, no_mesh_fits_error
from autoshard.search.shapes import Shape, coarser_shapes, shapes, straddle_reason
from autoshard.search.step_bounds import LeastWork, least_bytes
from autoshard.solver.candidate_search import SAME, CandidateSearch
from autoshard.units import format_bytes, format_seconds

_log = logging.getLogger("autoshard")

# If a mesh is slower than the best by more than this, meshes that split one of its axes over the same links are not
# planned: usually a split gains a few percent.
_FAR_FACTOR = 1.3

# If a pipeline is slower than the best by more than this, and shorter ones are faster, longer ones are not planned.
_LONGER_FACTOR = 1.15

# A mesh is planned if its estimate is slower than the best by less than this: estimates are a few percent off.
CLOSE_FACTOR = 1.03

# A mesh whose quick plan is slower than the best by less is planned at full effort, which gains a few percent.
_NEAR_FACTOR = 1.1

# The fastest of the pipelines planned for one number of microbatches is planned for any number if it is slower than the
# best by less than this. Its gain decides about the others.
_ALL_SHAPES_FACTOR = 1.5

# Plans that differ by less than this may change order within a memory limit.
_TIE_FACTOR = 1.01

# The number of about equal parts of a microbatch's work: forward, and gradients of inputs and of parameters.
_PARTS = 3

# Steps of the bisection for the longest stage: they reduce the interval to a millionth.
_HALVINGS = 20


def unpromising_reason(row: Row, rows: Sequence[Row], best: Row, cluster: Cluster) -> str | None:
    """Return why a mesh is not worth a plan, given plans of the mesh with joined axes, or of shorter pipelines."""
    far = _FAR_FACTOR * best.step_seconds
    for coarser in coarser_shapes(row.shape, cluster):
        known = next((candidate for candidate in rows if candidate.shape == coarser), None)
        if known is not None and known.seconds is not None and known.seconds > far:
            slower = known.seconds / best.step_seconds - 1
            return f"not planned: {coarser}, which has two of its axes joined, is {slower:.0%} slower"
    shorter = [known for known in rows if known.seconds is not None and 1 < known.shape.ranks < row.shape.ranks]
    shorter.sort(key=lambda known: (known.shape.ranks, known.step_seconds))
    if len(shorter) > 1:
        longest = shorter[-1].step_seconds
        if max(shorter[-2].step_seconds * SAME, _LONGER_FACTOR * best.step_seconds) < longest:
            slower = longest / best.step_seconds - 1
            return f"not planned: the shorter pipeline {shorter[-1].shape} is {slower:.0%} slower already"
    return None


def slow_pipeline_reason(row: Row, rows: Sequence[Row], best: Row) -> str | None:
    """Return why a pipeline is not worth a plan, given its estimate and those of planned pipelines; None if it is."""
    assert row.estimate is not None
    # Plans take longer than estimates. Use the smallest factor of the planned pipelines.
    factor = min((known.step_seconds / known.estimate for known in rows if known.plan and known.estimate), default=1.0)
    if row.estimate * factor <= CLOSE_FACTOR * best.step_seconds:
        return None
    return f"not planned: it is estimated to take {format_seconds(row.estimate * factor)}"


def slow_within_limit_reason(row: Row, rows: Sequence[Row], best: Row) -> str | None:
    """Return why a mesh with too much memory is not worth a plan within the limit; None if it is."""
    assert row.unlimited is not None
    if row.unlimited.seconds >= best.step_seconds:
        return f"without a memory limit it takes {format_seconds(row.unlimited.seconds)} already"
    # The limit costs at least as much as for other meshes with no more memory without it; the smallest factor is used.
    factors = (
        known.step_seconds / known.unlimited.seconds
        for known in rows
        if known.plan and known.unlimited and known.unlimited.peak <= row.unlimited.peak
    )
    estimate = row.unlimited.seconds * min(factors, default=1.0)
    if estimate <= CLOSE_FACTOR * best.step_seconds:
        return None
    return f"not planned: within the memory limit it is estimated to take {format_seconds(estimate)}"


class PipelineEstimates:
    """Estimates the steps of pipelines from plans of the whole step on the devices of one stage.

    If one stage's devices take T seconds for all work of a step, the longest stage takes its share of T, if stages are
    contiguous ranges of the operators, as equal as possible; and the last stage waits for the forward of the first
    microbatch in all others. Such a pipeline has free messages, and gathers its parameters once per step, so a real one
    usually takes longer.

    Args:
        mesh_planner: the planner of the same search.
        shares: the share of every operator in the work, in graph order.
    """

    def __init__(self, mesh_planner: MeshPlanner, shares: Sequence[float]) -> None:
        self._mesh_planner = mesh_planner
        self._shares = shares
        self._whole: dict[tuple[tuple[int, ...], int], float] = {}

    def seconds(self, shape: Shape, numbers: Iterable[int]) -> float:
        """Return the seconds of a step with the best of some numbers of microbatches; 0 if there is no estimate."""
        cluster = self._mesh_planner.request.target.cluster
        assert shape.axis is not None
        speeds = [device.speed for device in stage_devices(cluster, PipelineMesh.of(shape.mesh, shape.axis))]
        least = min((shape.ranks - 1) / (_PARTS * number) for number in numbers)
        return self._whole_step_seconds(shape) * longest_stage(self._shares, speeds) * (1 + least)

    def _whole_step_seconds(self, shape: Shape) -> float:
        """Return the seconds of the whole step on the devices of one stage, without a memory limit."""
        assert shape.axis is not None
        mesh = PipelineMesh.of(shape.mesh, shape.axis).stage(0)
        slowest = slowest_cluster(self._mesh_planner.request.target.cluster, shape.mesh.size)
        cluster = stage_cluster(slowest, shape.mesh, shape.axis)
        key = mesh.sizes, cluster.devices_per_host
        if key not in self._whole:
            target = self._mesh_planner.target("fast", limited=False)
            # Recomputation depends on memory; without it the estimate is still below a real pipeline.
            target = replace(target, settings=replace(target.settings, recompute="none"))
            try:
                self._whole[key] = self._mesh_planner.plan_on(mesh, stage_target(target, cluster)).step_seconds
            except AutoshardError:
                # Without an estimate, no mesh is dropped.
                self._whole[key] = 0.0
        return self._whole[key]


def longest_stage(shares: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the time of the longest stage, relative to the time of all work on a device with speed 1.

    Args:
        shares: the share of every operator in the work, in graph order; stages are contiguous ranges of operators.
        speeds: the speed of the devices of every stage.
    """
    ends = np.cumsum([0.0, *shares])

    def is_enough(limit: float) -> bool:
        # Every stage takes as many operators as it can compute within the time.
        done = 0
        for speed in speeds:
            done = int(np.searchsorted(ends, ends[done] + limit * speed, side="right")) - 1
        return done == len(shares)

    # Lower end: all stages perfectly balanced. Upper end: the slowest stage has one operator more.
    low = 1 / sum(speeds)
    high = low + max(shares, default=0.0) / min(speeds)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


class MeshSearch(CandidateSearch[Row]):
    """Searches all meshes of a number of devices for the fastest plan that fits.

    * A mesh is dropped if it cannot fit or cannot win, by bounds that need no plan. Heuristically, it is also dropped
      if the same mesh with two axes joined, or shorter pipelines, are far slower than the best.
    * Each of the others is planned quickly (`effort="fast"`) and without a memory limit: a limit takes most of the
      planning time, and a mesh that is slow without a limit need not be planned with one. Pipelines are planned within
      the limit at once, since their schedules depend on it, and for one number of microbatches. Before that, a pipeline
      is estimated, by a plan of the whole step on the devices of one stage; it is planned if it may win, given the
      smallest excess of planned pipelines over their estimates.
    * Pipelines nearly as fast as the best are planned with the requested effort, and for any number of microbatches.
    * Fast meshes whose plan needs too much memory are planned within the limit; the first of them is planned at once if
      no pipeline fits. If the limit slows the first ones down, others with as much memory are not planned.
    * Other meshes nearly as fast as the best are planned with the requested effort.

    The time limit and Ctrl-C end the search with the best plan so far.

    Args:
        request: the model, the options and the limits.
        devices: the number of devices.
        deadline: `time.monotonic()` seconds at which the search ends with the best plan so far.

    Attributes:
        best: the mesh with the fastest plan that fits; None if there is none yet.
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
            AutoshardError: no mesh could be planned; the error is that of the first.
            KeyboardInterrupt: Ctrl-C before the first plan was found.
        """
        try:
            self.evaluate_each(
                self._rows, lambda row: self._drop_reason(row) or self._unpromising_reason(row), self._plan_quickly
            )
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

        def place(line: MeshCandidate) -> tuple[bool, float, Sequence[int]]:
            return line.seconds is None, line.seconds or line.least_seconds, line.shape.mesh.sizes

        return tuple(sorted(map(self._candidate, self._rows), key=place))

    def _candidate(self, row: Row) -> MeshCandidate:
        """Return the table row of a mesh."""
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
        # Without hints: bounds do not need them, and they may not fit the first mesh.
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

    def _plan_quickly(self, row: Row) -> None:
        """Plan a pipeline of one shape within the limit, or any other mesh without a limit."""
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
        """Make a plan that fits early, in case the search ends, and as a reference to drop others.

        If there are pipelines, it is the plan of the first one, which is planned within the limit anyway. If that does
        not fit, it is the plan of the mesh that is fastest without a limit.
        """
        if self.best is not None or (row.shape.axis is None and self.request.pipelines != "none"):
            return
        for fastest in sorted(self._too_large(), key=lambda large: large.step_seconds)[:1]:
            with self._record_failure(fastest):
                self._record_plan(fastest, self.mesh_planner.within_limit(fastest))

    def _too_large(self) -> list[Row]:
        """Return meshes whose plan needs too much memory, and that are not yet planned within the limit."""
        return [row for row in self._rows if row.unlimited and row.plan is None and row.smallest_peak is None]

    def _plan_within_limit(self) -> None:
        """Plan meshes within the limit that are fast enough without it.

        The fastest without a limit are first; among nearly equal ones, those with the fewest axes, which take the least
        planning time.
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
        """Plan the best mesh and close ones at full effort, pipelines of any shape included."""
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
                # A plan over all shapes shows their gain: if it is small, only closer pipelines are worth one.
                before = row.step_seconds
                thorough = (
                    self.mesh_planner.plan_thoroughly if row.shape.axis is None else self.mesh_planner.plan_pipeline
                )
                self._record_plan(row, thorough(row))
                if not row.covers_all_shapes:
                    shapes_factor = min(shapes_factor, CLOSE_FACTOR * before / row.step_seconds)

    def _plan_with_shares(self) -> None:
        """Also plan the best pipeline with shares of microbatches, if devices differ inside its stages."""
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
                # It is large and no longer used.
                slow.planner = None
                slow.planned_shapes.clear()
        if self.mesh_planner.interrupted:
            raise KeyboardInterrupt

    # Verdicts and notes

    def _drop_reason(self, row: Row) -> str | None:
        """Return why a mesh is not planned, by bounds and by time; None if it is."""
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
        """Return why a mesh is not worth a plan, given the plans of others; None if it is."""
        best, pipeline = self.best, row.shape.axis is not None
        reason = None if best is None else unpromising_reason(row, self._rows, best, self.request.target.cluster)
        if reason is None and pipeline:
            row.estimate = self.estimates.seconds(row.shape, self.request.feasible_numbers(row.shape))
        # The first pipeline shows how much longer plans take than estimates.
        if best is None or not pipeline:
            return reason
        return reason or slow_pipeline_reason(row, self._rows, best)

    @contextlib.contextmanager
    def _record_failure(self, row: Row) -> Iterator[None]:
        """Make an error the verdict of its mesh, unless the mesh already has a plan."""
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
        """Return True if less time remains than the last plan of a mesh took."""
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
