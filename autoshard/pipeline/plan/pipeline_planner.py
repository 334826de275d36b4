"""`plan_pipeline`: stages, their plans, and a schedule for a model on a mesh with a pipeline axis."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autoshard.errors import BudgetError, CaptureError, InputError, PlanError, warn_caller
from autoshard.options import Pipeline
from autoshard.options.target import Target
from autoshard.pipeline.graph.stage_problem import StageDevice
from autoshard.pipeline.plan.pipeline_devices import (
    PipelineMesh,
    RankShares,
    check_axis,
    check_pipeline_options,
    check_uneven_programs,
    forward_fingerprint,
    has_sample_per_rank,
    proportional_shares,
    stage_devices,
)
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.shape_planner import MIN_GAIN, PipelineShape, PlannedShape, ShapePlanner, Stopping
from autoshard.pipeline.plan.stage_estimates import ShapeEstimates
from autoshard.pipeline.plan.stage_reuse import PipelineCaptures
from autoshard.pipeline.schedule.actions import SCHEDULES
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_search import (
    ESTIMATED,
    CostsOf,
    ScheduleCandidate,
    ScheduleOption,
    ScheduleSearch,
    microbatches_to_try,
    names_to_try,
    virtual_to_try,
)
from autoshard.planner.planning import freeze_older_objects
from autoshard.specs.axes import MeshShape
from autoshard.version import __version__

# The maximum number of shapes to plan if many are possible: estimates from two planned ones select the third.
_MAX_PLANNED_SHAPES = 3
_FASTEST = "the fastest of the estimates"  # another one of the planned shapes was chosen
# For the shape planned first: it is idle for less than a quarter of its work.
_MICROBATCHES_PER_RANK = 4


def plan_pipeline(
    captures: PipelineCaptures,
    mesh: MeshShape | Mapping[str, int],
    pipeline: Pipeline,
    target: Target,
    *,
    begin: int | None = None,
    known: dict[PipelineShape, PlannedShape] | None = None,
    stopping: Stopping | None = None,
) -> PipelinePlan:
    """Plan a model as a pipeline, without changing anything.

    For each shape, a number of microbatches and of stages per rank, the forward graph of one microbatch is assigned to
    stages (Rhino 5.1) with two tolerances of their balance, and the assignment with the shorter simulated step is kept.
    Each stage is planned like any module, on the mesh of its ranks, and all schedules are simulated with the seconds
    and bytes of its program. A shape for which nothing fits is planned again with memory limits and with recomputation,
    as far as the options allow. If devices differ inside a stage, the best shape is planned once more, with shares of
    every microbatch in proportion to their speed, and the faster plan is used (`shares="auto"`).

    These plans are exact by the cluster's prices, but at most three shapes are planned. The others are estimated:
    totals of the planned stages are linear in the size of the microbatch, and each stage has its share of the graph.
    The best shape by the estimates is planned next, until the best shape is a planned one. The result is the fastest
    planned shape; `table` contains the estimates of all others.

    Args:
        captures: the captures of a call with the whole batch; its tensors may be on the meta device. New captures are
            added.
        mesh: all axes.
        pipeline: the axis along which stages are placed, which must be named. Its schedule is `"auto"` for all, or one
            of `pipeline.schedules.SCHEDULES`, or `"custom"`. Its microbatches are `"auto"` for all divisors of the
            batch up to sixteen per rank, or a number. Its stages per rank are `"auto"` for one to four, or a number;
            pipeline ranks with different devices have one stage each unless a number is given.
        target: as for `autoshard.plan`; `memory_limit` is that of a device for the whole step, `time_limit` that of the
            whole search without captures. Afterwards the best shape planned so far is the plan, and `table` notes that;
            the first shape is planned in any case.
        begin: the number of microbatches to plan first; by default about four per rank, such that each device of a
            stage has a part of a microbatch.
        known: shapes planned earlier, with the same captures, mesh and options; shapes planned now are added.
        stopping: further limits of the search.

    Returns:
        The plan.

    Raises:
        BudgetError: nothing fits; the message names the smallest need.
        PlanError: the model has fewer operators than stages, or an option is not valid for a pipeline.
        PipelineError: a schedule or a number is not valid, or the batch is not divisible.
        CaptureError, InputError, HintError, MeshError: as for `autoshard.plan`.
        KeyboardInterrupt: Ctrl-C before any plan fits; later, the best plan so far is returned, with a warning.
    """
    shape = MeshShape.of(mesh)
    assert pipeline.axis is not None, "the axis of a pipeline has to be named"
    check_axis(shape, pipeline.axis)
    check_pipeline_options(target)
    stopping = stopping or Stopping()

    def new_planner(
        layout: PipelineMesh,
        shares: Sequence[RankShares],
        known: dict[PipelineShape, PlannedShape],
        pipeline: Pipeline = pipeline,
    ) -> _PipelinePlanner:
        source = captures.with_dynamic_batch if any(shares) else captures
        return _PipelinePlanner(source, layout, pipeline, target, known, stopping, shares)

    with freeze_older_objects():
        requested = target.shares if isinstance(target.shares, Mapping) else {}
        given: RankShares = {name: tuple(counts) for name, counts in requested.items()}
        layout = PipelineMesh.of(shape, pipeline.axis)
        planner = new_planner(layout, [given] * layout.ranks, {} if known is None or given else known)
        marked = planner.marked_devices(begin)
        if marked:
            layout = PipelineMesh.of(shape, pipeline.axis, marked)
            # Shapes planned for equal ranks cannot be used here.
            planner = new_planner(layout, [given] * layout.ranks, {})
        plan = planner.run(begin)
        uneven = planner.shares_by_speed(plan) if target.shares == "auto" else []
        if not any(uneven):
            return plan
        same_shape = replace(pipeline, microbatches=plan.microbatches, virtual=plan.virtual)
        try:
            uneven_plan = new_planner(layout, uneven, {}, same_shape).run()
        except (BudgetError, CaptureError, InputError, PlanError):
            # Unequal shares do not fit, or an operator needs equal ones.
            return plan
        except KeyboardInterrupt:
            planner.warn_of_interruption(plan.step_seconds)
            return plan
        # Use shares only if they gain: equal ones need no dynamic sizes.
        if not uneven_plan.fits or uneven_plan.step_seconds >= plan.step_seconds:
            return plan
        table = (replace(line, verdict=f"equal shares of the batch: {line.verdict}") for line in plan.table)
        return replace(uneven_plan, table=(*uneven_plan.table, *table))


class _PipelinePlanner:
    """Searches the shapes of one pipeline: plans some, estimates the others, and chooses the best.

    The arguments are those of `plan_pipeline`, with the mesh of every pipeline rank and its devices' shares of a
    microbatch.
    """

    def __init__(
        self,
        captures: PipelineCaptures,
        mesh: PipelineMesh,
        pipeline: Pipeline,
        target: Target,
        known: dict[PipelineShape, PlannedShape],
        stopping: Stopping,
        shares: Sequence[RankShares],
    ) -> None:
        self.start = time.perf_counter()
        self.stopping = stopping
        self.mesh = mesh
        self.pipeline = pipeline
        self.target = target
        self.ranks = mesh.ranks
        self.shares = tuple(shares)
        self.batch = captures.call.samples
        devices = self._devices()
        limit = target.settings.memory_limit or math.inf
        self.memory_limits = tuple(int(min(device.memory, limit)) for device in devices)
        self.has_unequal_devices = any(
            (device.speed, device.memory) != (devices[0].speed, devices[0].memory) for device in devices
        )
        self.schedule_names = names_to_try(pipeline.schedule)
        # Stages are assigned to ranks round-robin; in a V they would be on other devices.
        if self.has_unequal_devices:
            self.schedule_names = [
                name for name in self.schedule_names if name not in SCHEDULES or not SCHEDULES[name].turns
            ]
        one_stage = self.has_unequal_devices and pipeline.virtual == "auto"
        ways = (1,) if one_stage else virtual_to_try(pipeline.virtual)
        numbers = microbatches_to_try(pipeline.microbatches, self.batch, self.ranks)
        self.requested = [PipelineShape(number, virtual) for number in numbers for virtual in ways]
        self.possible = [shape for shape in self.requested if self._is_possible(shape)]
        self.planned_shapes = known
        self.errors: dict[PipelineShape, PlanError | BudgetError] = {}
        self.shape_planner = ShapePlanner(
            captures,
            mesh,
            target,
            [replace(device, memory=min(device.memory, limit)) for device in devices],
            self._fastest_seconds,
            stopping,
            self.shares,
        )
        self.estimates = ShapeEstimates(self.shape_planner, self.batch, self.planned_shapes, self.errors)

    def _devices(self) -> Sequence[StageDevice]:
        """Return the speed and memory of the devices of every pipeline rank."""
        cluster = self.target.cluster
        if cluster.is_uniform:
            memory = self.target.settings.memory_limit or cluster.device.memory
            return [StageDevice(1.0, 1.0, memory)] * self.ranks
        return stage_devices(cluster, self.mesh)

    def run(self, begin: int | None = None) -> PipelinePlan:
        """Return the plan; `begin` is as for `plan_pipeline`."""
        self._check_shares()
        first = self._first_shape(begin)
        estimates: tuple[ScheduleCandidate, ...] = ()
        try:
            if self.pipeline.virtual == "auto" and first is not None:
                graph = self.shape_planner.microbatch_graph(first.microbatches)
                # Marked stages have their own devices, so there is one per rank.
                if self.shape_planner.stage_marks(graph):
                    self.possible = [shape for shape in self.possible if shape.virtual == 1]
            if first is not None and first not in self.planned_shapes:
                self._plan_shape(first)
            second = None if first is None else self._second_shape(first, begin)
            if second is not None and second not in self.planned_shapes and not self._is_late():
                self._plan_shape(second)
            estimates = self._follow_estimates() if len(self.possible) > 1 else ()
        except KeyboardInterrupt:
            self.stopping.interrupted = True
        # If no shape is planned, the search below refuses all requested ones, with reasons for the error.
        shapes = list(self.planned_shapes) or self.requested
        search = self._search_schedules(self._planned_costs, shapes, self.memory_limits)
        if search.best is None and self.stopping.interrupted:
            raise KeyboardInterrupt
        if search.best is None:
            raise self._no_plan_error(search)
        if self.stopping.interrupted:
            self.warn_of_interruption(search.best.step_seconds)
        if any(self.shares):
            check_uneven_programs(self.planned_shapes[PipelineShape(*search.best.size)].planned)
        return self._build_plan(search.best, (*search.table(), *estimates))

    def marked_devices(self, begin: int | None) -> tuple[int, ...]:
        """Return the numbers of devices that task graphs in `forward` request along the pipeline axis.

        Empty if every marked task graph has one position on the axis, or the numbers are of devices inside stages.

        Source: Whale 3.2.1: devices are taken in order, as many as each task graph requests.
        """
        first = self._first_shape(begin) or next(iter(self.requested), None)
        if first is None:
            return ()
        counts = self.shape_planner.device_counts(self.shape_planner.microbatch_graph(first.microbatches))
        return counts if 1 < len(counts) < self.ranks == sum(counts) else ()

    def _is_late(self) -> bool:
        """Return True if the search must end with the existing plans.

        It ends after Ctrl-C, after the time limit if a plan fits, and at the deadline.
        """
        if self.stopping.interrupted or self.shape_planner.seconds_left > 0:
            return self.stopping.interrupted
        if self.shape_planner.is_over and (self.planned_shapes or self.errors):
            return True
        return self._best_seconds() < math.inf

    def shares_by_speed(self, plan: PipelinePlan) -> list[RankShares]:
        """Return, for every pipeline rank, the shares of a microbatch in proportion to the speed of its devices.

        Args:
            plan: this planner's plan, with equal shares.

        Returns:
            The shares; empty if no time is left to plan with them.
        """
        if self.stopping.interrupted or self.shape_planner.seconds_left <= 0:
            return []
        planned = self.planned_shapes[PipelineShape(plan.microbatches, plan.virtual)].planned
        shares: dict[int, RankShares] = {}
        # The first stage of every rank: further stages of a rank are after the end of `target_of`.
        for index, stage in zip(self.shape_planner.target_of, planned, strict=False):
            if index not in shares:
                where = self.shape_planner.targets[index]
                shares[index] = proportional_shares(
                    stage, where.target.cluster, where.mesh, self.batch // plan.microbatches
                )
        return [shares[index] for index in self.shape_planner.target_of]

    def warn_of_interruption(self, seconds: float) -> None:
        """Warn that the plan, with a step of `seconds`, is the best one found before Ctrl-C."""
        warn_caller(
            f"the search for a pipeline was interrupted after {time.perf_counter() - self.start:.1f} s: this is the "
            f"best plan met until then, {seconds:.6g} s per step. Plan again for a better one."
        )

    def _is_possible(self, shape: PipelineShape) -> bool:
        """Return True if a requested schedule has such a shape, and every device gets a part of a microbatch."""
        if any(not has_sample_per_rank(given, self.batch // shape.microbatches) for given in self.shares):
            return False
        families = [SCHEDULES.get(name) for name in self.schedule_names]
        return any(
            family is None or family.refusal(self.ranks, shape.virtual, shape.microbatches) is None
            for family in families
        )

    def _check_shares(self) -> None:
        """Raise `PlanError` if the microbatches of every requested shape are too small for the shares."""
        if any(self.shares) and self.requested and not self.possible:
            number = min(shape.microbatches for shape in self.requested)
            raise PlanError(
                f"microbatches of {self.batch // number} samples, {number} of a batch of {self.batch}, can't be taken "
                f"in shares {dict(self.shares[0])}: every rank takes one sample at least. Ask for fewer microbatches, "
                "or pass a larger batch."
            )

    def _first_shape(self, begin: int | None) -> PipelineShape | None:
        """Return the shape to plan first."""
        return _nearest_shape(self._fully_used_shapes(begin), begin or _MICROBATCHES_PER_RANK * self.ranks)

    def _second_shape(self, first: PipelineShape, begin: int | None) -> PipelineShape | None:
        """Return the shape to plan second.

        It has half as many microbatches as the first, or twice as many if those of the first need too much memory.
        """
        # Fewer, larger microbatches take less time and more memory: they pay if memory did not slow the first shape
        # down.
        planned = self.planned_shapes.get(first)
        roomy = (
            planned is not None
            and self._fastest_seconds(first, planned.costs, True) <= (1 + MIN_GAIN) * planned.free_seconds
        )
        shapes = self._fully_used_shapes(begin)
        if len(shapes) < 2:
            shapes = [shape for shape in self.possible if shape.virtual == first.virtual]
        others = [shape for shape in shapes if shape != first]
        wanted = [shape for shape in others if (shape.microbatches < first.microbatches) == roomy]
        return _nearest_shape(wanted or others, first.microbatches / 2 if roomy else first.microbatches * 2)

    def _fully_used_shapes(self, begin: int | None) -> list[PipelineShape]:
        """Return shapes with the fewest stages and, unless `begin` is given, a sample for each device of a stage."""
        fewest = min((shape.virtual for shape in self.possible), default=1)
        shapes = [shape for shape in self.possible if shape.virtual == fewest]
        most_devices = max(mesh.size for mesh in self.shape_planner.meshes)
        return [shape for shape in shapes if begin or self.batch // shape.microbatches >= most_devices] or shapes

    def _follow_estimates(self) -> tuple[ScheduleCandidate, ...]:
        """Plan the best shape by current estimates until it is a planned one; return the table rows of the others."""
        ways = sorted({shape.virtual for shape in self.possible})
        # A larger number of stages per rank is considered only once the largest considered one is the best.
        considered = 2
        while True:
            shapes = [shape for shape in self.possible if shape.virtual in ways[:considered]]
            search = self._search_schedules(self.estimates.costs, shapes, self.memory_limits)
            # A shape whose estimate does not fit may fit when planned with less memory.
            if search.best is None:
                search = self._search_schedules(self.estimates.costs, shapes, (math.inf,) * self.ranks)
            best = None if search.best is None else PipelineShape(*search.best.size)
            if best is not None and best.virtual in ways[considered - 1 : -1]:
                considered += 1
                continue
            is_full = len(self.planned_shapes) + len(self.errors) >= _MAX_PLANNED_SHAPES
            if best is None or best in self.planned_shapes or is_full:
                verdict = ESTIMATED
                break
            if self._is_late():
                verdict = f"{ESTIMATED} in the time limit"
                break
            self._plan_shape(best)
        return tuple(
            replace(line, verdict=f"{verdict}: {_FASTEST if line.verdict == 'chosen' else line.verdict}")
            for line in search.table()
            if PipelineShape(line.microbatches, line.virtual) not in self.planned_shapes
        )

    def _plan_shape(self, shape: PipelineShape) -> None:
        """Plan a shape with the better of its assignments to stages."""
        try:
            graph = self.shape_planner.microbatch_graph(shape.microbatches)
            assignments = self.shape_planner.stage_assignments(shape, graph)
            costs = self.estimates.assignment_costs(assignments, graph, shape.microbatches)
            # A single assignment needs no comparison, which would search all schedules.
            steps = [self._fastest_seconds(shape, each, False) for each in costs] if len(costs) > 1 else [0.0]
            stages = assignments[steps.index(min(steps))]
            self.planned_shapes[shape] = self.shape_planner.plan(shape, stages, self._best_seconds())
        except BudgetError as error:
            self.errors[shape] = error
        except PlanError as error:
            # With more stages per rank the model may have too few operators; if one is too many, no shape will do.
            if shape.virtual == 1:
                raise
            self.errors[shape] = error

    def _best_seconds(self) -> float:
        """Return the seconds of the fastest planned step that fits; infinity if none fits."""
        planned = self.planned_shapes.items()
        return min((self._fastest_seconds(shape, known.costs, True) for shape, known in planned), default=math.inf)

    def _fastest_seconds(self, shape: PipelineShape, costs: Sequence[StageCosts], fitting: bool) -> float:
        """Return the seconds of the fastest schedule of a shape, among those that fit or all; infinity if none."""
        limits = self.memory_limits if fitting else (math.inf,) * self.ranks
        best = self._search_schedules(lambda *_: costs, [shape], limits).best
        return math.inf if best is None else best.step_seconds

    def _search_schedules(
        self, costs_of: CostsOf, shapes: Sequence[PipelineShape], memory_limits: tuple[float, ...]
    ) -> ScheduleSearch:
        """Run the search over all requested schedules of some shapes."""
        search = ScheduleSearch(costs_of, self.ranks, memory_limits, self.target.cluster.contention)
        for name in self.schedule_names:
            for shape in shapes:
                search.add(name, *shape)
        search.run()
        return search

    def _planned_costs(self, microbatches: int, virtual: int) -> Sequence[StageCosts] | None:
        planned = self.planned_shapes.get(PipelineShape(microbatches, virtual))
        return None if planned is None else planned.costs

    def _no_plan_error(self, search: ScheduleSearch) -> Exception:
        """Return the error that names the smallest need of what was planned, or why nothing could be planned."""
        if not self.planned_shapes and self.errors:
            return min(self.errors.values(), key=lambda error: getattr(error, "peak", None) or math.inf)
        return search.no_schedule_error()

    def _build_plan(self, best: ScheduleOption, table: tuple[ScheduleCandidate, ...]) -> PipelinePlan:
        chosen, step = self.planned_shapes[PipelineShape(*best.size)], best.simulation
        assert step is not None, "the best schedule was simulated"
        return PipelinePlan(
            mesh=self.mesh.whole,
            axis=self.mesh.axis,
            devices=self.mesh.devices if max(self.mesh.devices) > 1 else (),
            stage_of=dict(chosen.stages.stage_of),
            recomputed=dict(chosen.stages.recomputed),
            schedule=step.schedule,
            stages=tuple(stage.plan for stage in chosen.planned),
            reduced=tuple(stage.planner.settings.reduced for stage in chosen.planned),
            modules=tuple(stage.modules for stage in chosen.planned),
            costs=chosen.costs,
            step_seconds=step.seconds,
            bubble=step.bubble,
            peaks=step.peaks,
            capacities=self.memory_limits,
            table=table,
            cluster=self.target.cluster.name,
            contention=self.target.cluster.contention,
            fingerprint=forward_fingerprint(chosen.microbatch_graph.step),
            timings={**self.shape_planner.seconds, "all": time.perf_counter() - self.start},
            versions={"autoshard": __version__, "torch": torch.__version__},
        )


def _nearest_shape(shapes: Sequence[PipelineShape], wanted: float) -> PipelineShape | None:
    """Return the shape whose number of microbatches is nearest to `wanted`; of equally near ones the smaller."""
    return min(shapes, key=lambda shape: (abs(math.log(shape.microbatches / wanted)), shape), default=None)
