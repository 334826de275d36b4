"""`plan_pipeline`: stages, their plans, and a schedule for a model on a mesh with a pipeline axis."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.errors import BudgetError, CaptureError, InputError, PlanError, warn_caller
from autoshard.options.target import Target
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.assign.placement import stage_devices
from autoshard.pipeline.assign.stages import StageDevice, Stages
from autoshard.pipeline.graph.microbatch import samples
from autoshard.pipeline.plan.captures import BatchCall, PipelineCaptures
from autoshard.pipeline.plan.pipeline_devices import check_axis, check_pipeline_options, forward_fingerprint
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.rank_shares import (
    RankShares,
    check_uneven_programs,
    has_sample_per_rank,
    proportional_shares,
)
from autoshard.pipeline.plan.shape_planner import MIN_GAIN, MicrobatchGraph, PipelineShape, PlannedShape, ShapePlanner
from autoshard.pipeline.plan.stage_estimates import StageTotals, estimate_stage_costs, totals_at
from autoshard.pipeline.plan.stage_plans import BoundaryMode
from autoshard.pipeline.plan.stopping import Stopping
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_bounds import least_seconds
from autoshard.pipeline.schedule.schedule_search import (
    CostsOf,
    ScheduleCandidate,
    ScheduleSearch,
    microbatches_to_try,
    names_to_try,
    virtual_to_try,
)
from autoshard.pipeline.schedule.schedules import SCHEDULES, placement
from autoshard.pipeline.schedule.simulation import Simulation
from autoshard.planner.gc_freeze import freeze_older_objects
from autoshard.specs.axes import MeshShape
from autoshard.version import __version__

_MAX_PLANNED_SHAPES = 3
"""How many sizes are planned at most, where there are many."""
_MICROBATCHES_PER_RANK = 4
"""Where the search starts."""
_NO_LIMIT = 2**62
"""Bytes: more than any device has."""


def plan_pipeline(
    module: nn.Module,
    mesh: MeshShape | Mapping[str, int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    axis: str,
    schedule: str | Sequence[str] = "auto",
    microbatches: int | str = "auto",
    virtual: int | str = "auto",
    begin: int | None = None,
    target: Target,
    devices: Sequence[StageDevice] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    boundaries: BoundaryMode = "planned",
    captured: PipelineCaptures | None = None,
    known: dict[PipelineShape, PlannedShape] | None = None,
    stopping: Stopping | None = None,
) -> PipelinePlan:
    """Decide how a model runs as a pipeline, and change nothing.

    For a number of microbatches and of stages per rank, a size: the forward graph of one microbatch is assigned to
    stages (Rhino 5.1), at two tolerances of their balance, of which simulation takes the better; every stage is planned
    as any module is, on the mesh of its ranks; and all schedules are simulated with what its program then costs and
    holds. A size for which nothing fits is planned again with limits of memory and with recomputation, as far as the
    options allow it. Where devices are unlike inside a stage, the best size is planned once more, with shares of every
    microbatch in proportion to their speed, and the faster plan is taken (`shares="auto"`).

    That much is exact, by the prices of the cluster, and is done for at most three sizes. The others are judged by
    estimates: totals of the planned stages on a line in the size of the microbatch, shared out as the graph is. What
    the estimates say is best is planned next, until what is best is planned. So the plan is the fastest of those sizes
    that were planned; `table` says of all others what they were estimated at.

    Args:
        module: the model, on any device.
        mesh: all axes.
        args, kwargs: a call with the whole batch; tensors may be on the meta device.
        axis: name of the axis along which the stages lie.
        schedule: `"auto"` for all, or one name or several (`pipeline.schedules.SCHEDULES`, and `"custom"`).
        microbatches: `"auto"` for all divisors of the batch up to sixteen per rank, or a number.
        virtual: stages per rank: `"auto"` for one to four, or a number.
        begin: the number of microbatches that is planned first, where there are several; by default about four per
            rank, of which all devices of a stage can have a part.
        options: as `autoshard.plan` takes them; `memory_limit` is that of a device for the whole step, `time_limit`
            that of the whole search, captures aside. When it is over, what is best of the sizes planned until then is
            the plan, and `table` says so; the first size is planned in any case.
        devices: memory in bytes and speed of the devices of every pipeline rank (their bandwidth is the mesh's); by
            default all are the cluster's, whose kinds tell speeds where it has several. Of unequal ones every rank has
            one stage, unless `virtual` is a number, and then stages lie round and round.
        batch_dims: the dim of inputs that counts samples, where it is not dim 0 (`pipeline.microbatch`).
        boundaries: `"whole"`: stages take and return whole tensors, which every device sends to its like on the next
            rank; `"planned"`: what a stage returns lies as it comes out, devices send what they have of it, and the
            next stage takes it so (Whale's bridge). `input_placements` and `output_placements` of the stages' plans
            then say how.
        captured: what was captured of this call before, for other meshes; what is captured now goes there too.
        known: sizes that were planned before, of the same call, mesh and options; those planned now go there too.
        stopping: when else the search ends before its end.

    Returns:
        The plan.

    Raises:
        BudgetError: nothing fits; the message names what needs least.
        PlanError: the model has fewer operators than stages, or an option is none that a pipeline can have.
        PipelineError: a schedule or a number is none that there can be, or the batch does not divide.
        CaptureError, InputError, HintError, MeshError: as for `autoshard.plan`.
        KeyboardInterrupt: Ctrl-C before there was any plan that fits; later, the best one until then is returned, with
            a warning.
    """
    shape = MeshShape.of(mesh)
    check_axis(shape, axis)
    check_pipeline_options(target)
    captured = captured or PipelineCaptures(BatchCall(module, args, kwargs, batch_dims), target)
    stopping = stopping or Stopping()

    def new_planner(
        layout: PipelineMesh, shares: Sequence[RankShares], sizes: dict[PipelineShape, PlannedShape]
    ) -> _PipelinePlanner:
        own = captured.with_dynamic_batch if any(shares) else captured
        return _PipelinePlanner(own, layout, target, devices, boundaries, sizes, stopping, shares)

    with freeze_older_objects():
        asked = target.shares if isinstance(target.shares, Mapping) else {}
        given: RankShares = {name: tuple(counts) for name, counts in asked.items()}
        layout = PipelineMesh.of(shape, axis)
        first = new_planner(layout, [given] * layout.ranks, {} if known is None or given else known)
        marked = first.marked_devices(schedule, microbatches, virtual, begin)
        if marked:
            layout = PipelineMesh.of(shape, axis, marked)
            first = new_planner(layout, [given] * layout.ranks, {})
        plan = first.run(schedule, microbatches, virtual, begin)
        uneven = first.shares_by_speed(plan) if target.shares == "auto" else []
        if not any(uneven):
            return plan
        try:
            other = new_planner(layout, uneven, {}).run(schedule, plan.microbatches, plan.virtual)
        except (BudgetError, CaptureError, InputError, PlanError):
            return plan  # there is no room for other shares, or an operator needs equal ones
        except KeyboardInterrupt:
            first.warn_of_interruption(plan.step_seconds)
            return plan
        if not other.fits or other.step_seconds >= plan.step_seconds:
            return plan
        table = (replace(line, verdict=f"equal shares of the batch: {line.verdict}") for line in plan.table)
        return replace(other, table=(*other.table, *table))


class _PipelinePlanner:
    """One search: what was planned, what is estimated of the rest, and what is chosen."""

    def __init__(
        self,
        captured: PipelineCaptures,
        mesh: PipelineMesh,
        target: Target,
        devices: Sequence[StageDevice] | None,
        boundaries: BoundaryMode,
        known: dict[PipelineShape, PlannedShape],
        stopping: Stopping,
        shares: Sequence[RankShares],
    ) -> None:
        self.start = time.perf_counter()
        self.stopping = stopping
        call = captured.call
        self.mesh = mesh
        self.target = target
        self.ranks = mesh.ranks
        self.batch = samples(call.module, call.args, call.kwargs, call.batch_dims)
        memory = target.settings.memory_limit or target.cluster.device.memory
        given = list(self._devices(memory) if devices is None else devices)
        if len(given) != self.ranks:
            raise PlanError(
                f"{len(given)} devices for pipeline axis {mesh.axis} of the mesh {mesh.whole}, which has {self.ranks} "
                "ranks: give one for every rank."
            )
        limit = target.settings.memory_limit or _NO_LIMIT
        self.devices = [replace(one, memory=min(one.memory, limit)) for one in given]
        self.memory_limits = tuple(int(min(one.memory, _NO_LIMIT)) for one in self.devices)
        self.has_unequal_devices = any((one.speed, one.memory) != (given[0].speed, given[0].memory) for one in given)
        self.shares = tuple(shares)
        self.shape_planner = ShapePlanner(
            captured, mesh, target, self.devices, boundaries, self._fastest_seconds, stopping, self.shares
        )
        self.schedule_names: list[str] = []
        self.planned_shapes = known
        self.errors: dict[PipelineShape, PlanError | BudgetError] = {}
        self._assignments_by_virtual: dict[int, tuple[MicrobatchGraph, int, list[Stages]] | None] = {}

    def _devices(self, memory: float) -> Sequence[StageDevice]:
        """Those of the cluster; `memory` is that of a device where all are equal."""
        if self.target.cluster.is_uniform:
            return [StageDevice(1.0, 1.0, memory)] * self.ranks
        return stage_devices(self.target.cluster, self.mesh)

    def run(
        self, schedule: str | Sequence[str], microbatches: int | str, virtual: int | str, begin: int | None = None
    ) -> PipelinePlan:
        """The plan; arguments as for `plan_pipeline`."""
        asked = self._requested_shapes(schedule, microbatches, virtual)
        every = [size for size in asked if self._is_possible(size)]
        self._check_shares(asked, every)
        first = self._first_shape(every, begin)
        estimates: tuple[ScheduleCandidate, ...] = ()
        try:
            if (
                virtual == "auto"
                and first
                and self.shape_planner.stage_marks(self.shape_planner.microbatch_graph(first.microbatches))
            ):
                every = [size for size in every if size.virtual == 1]  # a stage per rank: devices of its own
            if first is not None and first not in self.planned_shapes:
                self._plan_shape(first)
            second = None if first is None else self._second_shape(first, every, begin)
            if second is not None and second not in self.planned_shapes and not self._is_late():
                self._plan_shape(second)
            estimates = self._follow_estimates(every) if len(every) > 1 else ()
        except KeyboardInterrupt:
            self.stopping.interrupted = True
        search = self._search_schedules(self._planned_costs, list(self.planned_shapes) or asked, self.memory_limits)
        if search.best is None and self.stopping.interrupted:
            raise KeyboardInterrupt
        if search.best is None:
            raise self._no_plan_error(search)
        if self.stopping.interrupted:
            self.warn_of_interruption(search.best.seconds)
        if any(self.shares):
            check_uneven_programs(self.planned_shapes[_shape_of(search.best)].planned)
        return self._build_plan(search.best, (*search.table(), *estimates))

    def _requested_shapes(
        self, schedule: str | Sequence[str], microbatches: int | str, virtual: int | str
    ) -> list[PipelineShape]:
        """The sizes that are asked for; notes the schedules that are."""
        self.schedule_names = names_to_try(schedule)
        if self.has_unequal_devices:
            self.schedule_names = [
                name for name in self.schedule_names if name not in SCHEDULES or not SCHEDULES[name].turns
            ]
        ways = (1,) if self.has_unequal_devices and virtual == "auto" else virtual_to_try(virtual)
        return [PipelineShape(m, v) for m in microbatches_to_try(microbatches, self.batch, self.ranks) for v in ways]

    def marked_devices(
        self, schedule: str | Sequence[str], microbatches: int | str, virtual: int | str, begin: int | None
    ) -> tuple[int, ...]:
        """The numbers of devices that task graphs in `forward` ask for, where they share out the pipeline's axis so.

        Arguments are those of `run`. None, where every task graph that is marked has a place on the axis to itself, or
        their numbers are of devices inside of stages.

        Source: Whale 3.2.1: devices are taken one after another, as many as each task graph asks for.
        """
        asked = self._requested_shapes(schedule, microbatches, virtual)
        first = self._first_shape([size for size in asked if self._is_possible(size)], begin) or next(iter(asked), None)
        counts = (
            ()
            if first is None
            else self.shape_planner.device_counts(self.shape_planner.microbatch_graph(first.microbatches))
        )
        return counts if 1 < len(counts) < self.ranks == sum(counts) else ()

    def _is_late(self) -> bool:
        """Whether the search ends with what there is.

        It does where somebody wants it, where a plan fits and there is no more time for another, and at the deadline.
        """
        if self.stopping.interrupted or self.shape_planner.seconds_left > 0:
            return self.stopping.interrupted
        if self.shape_planner.is_over and (self.planned_shapes or self.errors):
            return True
        return any(self._fastest_seconds(size, one.costs, True) < math.inf for size, one in self.planned_shapes.items())

    def shares_by_speed(self, plan: PipelinePlan) -> list[RankShares]:
        """For every pipeline rank, shares of a microbatch in proportion to the speed of its devices.

        Args:
            plan: made by this, with equal shares.

        Returns:
            The shares; none where there is no more time to plan with them.
        """
        if self.stopping.interrupted or self.shape_planner.seconds_left <= 0:
            return []
        planned = self.planned_shapes[PipelineShape(plan.microbatches, plan.virtual)].planned
        found: dict[int, RankShares] = {}
        for kind, one in zip(self.shape_planner.target_of, planned, strict=False):  # the first stage of every rank
            if kind not in found:
                where = self.shape_planner.targets[kind]
                samples = self.batch // plan.microbatches
                found[kind] = proportional_shares(one, where.target.cluster, where.mesh, samples)
        return [found[kind] for kind in self.shape_planner.target_of]

    def warn_of_interruption(self, seconds: float) -> None:
        warn_caller(
            f"the search for a pipeline was interrupted after {time.perf_counter() - self.start:.1f} s: this is the "
            f"best plan met until then, {seconds:.6g} s per step. Plan again for a better one."
        )

    def _is_possible(self, size: PipelineShape) -> bool:
        """Whether some schedule that is asked for has such a size, and every device something of a microbatch."""
        if any(not has_sample_per_rank(given, self.batch // size.microbatches) for given in self.shares):
            return False
        families = [SCHEDULES.get(name) for name in self.schedule_names]
        return any(one is None or one.refusal(self.ranks, size.virtual, size.microbatches) is None for one in families)

    def _check_shares(self, asked: Sequence[PipelineShape], possible: Sequence[PipelineShape]) -> None:
        """`PlanError` where a microbatch of any size that is asked for is too small for the shares."""
        if any(self.shares) and asked and not possible:
            number = min(size.microbatches for size in asked)
            raise PlanError(
                f"microbatches of {self.batch // number} samples, {number} of a batch of {self.batch}, can't be taken "
                f"in shares {dict(self.shares[0])}: every rank takes one sample at least. Ask for fewer microbatches, "
                "or pass a larger batch."
            )

    def _first_shape(self, every: Sequence[PipelineShape], begin: int | None) -> PipelineShape | None:
        """What to plan first; if not told, such that all devices of a stage have a part of a microbatch."""
        return self._nearest_shape(self._fully_used_shapes(every, begin), begin or _MICROBATCHES_PER_RANK * self.ranks)

    def _second_shape(
        self, first: PipelineShape, every: Sequence[PipelineShape], begin: int | None
    ) -> PipelineShape | None:
        """What to plan next: half as many microbatches, or twice as many where those of the first hold too much."""
        planned = self.planned_shapes.get(first)
        roomy = (
            planned is not None
            and self._fastest_seconds(first, planned.costs, True) <= (1 + MIN_GAIN) * planned.free_seconds
        )
        shared, mine = self._fully_used_shapes(every, begin), [size for size in every if size.virtual == first.virtual]
        others = [size for size in (shared if len(shared) > 1 else mine) if size != first]
        smaller = [size for size in others if (size.microbatches < first.microbatches) == roomy]
        return self._nearest_shape(smaller or others, first.microbatches / 2 if roomy else first.microbatches * 2)

    def _fully_used_shapes(self, every: Sequence[PipelineShape], begin: int | None) -> list[PipelineShape]:
        """Sizes with the fewest stages whose microbatches all devices of a stage have a part of, if not told."""
        way = min((size.virtual for size in every), default=1)
        most = max(shape.size for shape in self.shape_planner.meshes)
        mine = [size for size in every if size.virtual == way]
        return [size for size in mine if begin or self.batch // size.microbatches >= most] or mine

    def _nearest_shape(self, sizes: Sequence[PipelineShape], wanted: float) -> PipelineShape | None:
        """The size whose number of microbatches is nearest to one, of equally near ones the smaller."""
        return min(sizes, key=lambda size: (abs(math.log(size.microbatches / wanted)), size), default=None)

    def _follow_estimates(self, every: Sequence[PipelineShape]) -> tuple[ScheduleCandidate, ...]:
        """Plan what is best by what is known, until that is planned; what is said of sizes that are not planned."""
        ways = sorted({size.virtual for size in every})
        known = 2  # of these: more stages per rank are looked at where it is good to have as many as were looked at
        while True:
            mine = [size for size in every if size.virtual in ways[:known]]
            search = self._search_schedules(self._known_costs, mine, self.memory_limits)
            if search.best is None:  # what does not fit as it is estimated may fit where it is planned for less memory
                search = self._search_schedules(self._known_costs, mine, (_NO_LIMIT,) * self.ranks)
            best = None if search.best is None else _shape_of(search.best)
            if best is not None and best.virtual in ways[known - 1 : -1]:
                known += 1
                continue
            if (
                best is None
                or best in self.planned_shapes
                or len(self.planned_shapes) + len(self.errors) >= _MAX_PLANNED_SHAPES
            ):
                said = "estimated, not planned"
                break
            if self._is_late():
                said = "estimated, not planned in the time limit"
                break
            self._plan_shape(best)
        lines = [
            line for line in search.table() if PipelineShape(line.microbatches, line.virtual) not in self.planned_shapes
        ]
        return tuple(replace(line, verdict=f"{said}: {line.verdict}") for line in lines)

    def _plan_shape(self, size: PipelineShape) -> None:
        """Plan a size, with the better of its assignments to stages."""
        try:
            forward = self.shape_planner.microbatch_graph(size.microbatches)
            found = self.shape_planner.stage_assignments(size, forward)
            totals = self._totals(self.batch // size.microbatches, forward)
            each = [estimate_stage_costs(one, forward.graph, totals, 1.0, self.shape_planner.links) for one in found]
            steps = [self._fastest_seconds(size, costs, False) for costs in each] if len(found) > 1 else [0.0]
            stages = found[steps.index(min(steps))]
            known = min(
                (self._fastest_seconds(one, made.costs, True) for one, made in self.planned_shapes.items()),
                default=math.inf,
            )
            self.planned_shapes[size] = self.shape_planner.plan(size, stages, known)
        except BudgetError as error:
            self.errors[size] = error
        except PlanError as error:
            if size.virtual == 1:
                raise
            self.errors[size] = error

    def _fastest_seconds(self, size: PipelineShape, costs: Sequence[StageCosts], fitting: bool) -> float:
        """Of the fastest schedule of one size, of those that fit or of all; infinite if there is none."""
        rooms = self.memory_limits if fitting else (_NO_LIMIT,) * self.ranks
        best = self._search_schedules(lambda *_: costs, [size], rooms).best
        return math.inf if best is None else best.seconds

    def _search_schedules(
        self, costs_of: CostsOf, every: Sequence[PipelineShape], rooms: tuple[int, ...]
    ) -> ScheduleSearch:
        """All schedules that are asked for, of some sizes, simulated."""
        search = ScheduleSearch(costs_of, self.ranks, rooms, self.target.cluster.contention)
        for name in self.schedule_names:
            for size in every:
                search.add(name, *size)
        search.run()
        return search

    def _planned_costs(self, microbatches: int, virtual: int) -> Sequence[StageCosts] | None:
        known = self.planned_shapes.get(PipelineShape(microbatches, virtual))
        return None if known is None else known.costs

    def _known_costs(self, microbatches: int, virtual: int) -> Sequence[StageCosts] | None:
        """Of planned stages, or else estimates; None where there are no such stages."""
        size = PipelineShape(microbatches, virtual)
        if size in self.planned_shapes:
            return self.planned_shapes[size].costs
        if size in self.errors:
            return None
        if virtual not in self._assignments_by_virtual:
            self._assignments_by_virtual[virtual] = self._assignments(size)
        base = self._assignments_by_virtual[virtual]
        if base is None:
            return None
        forward, number, found = base
        totals = self._totals(self.batch // microbatches, forward)
        grown = number / microbatches
        each = [estimate_stage_costs(one, forward.graph, totals, grown, self.shape_planner.links) for one in found]
        at = placement(self.ranks, virtual)
        return min(each, key=lambda costs: least_seconds(costs, at, microbatches, halves=False))

    def _assignments(self, size: PipelineShape) -> tuple[MicrobatchGraph, int, list[Stages]] | None:
        """Stages of a size on a graph that is there, which was exported with so many microbatches."""
        number = self.shape_planner.captures.nearest_number(size.microbatches)
        forward = self.shape_planner.microbatch_graph(number)
        try:
            return (
                forward,
                number,
                self.shape_planner.stage_assignments(PipelineShape(number, size.virtual), forward, "order"),
            )
        except (PlanError, BudgetError):
            return None

    def _totals(self, count: int, forward: MicrobatchGraph) -> StageTotals:
        """Of a microbatch of so many samples, by the sizes that were planned; before, by the graph alone."""
        known = {}
        speeds = [forward.speeds[rank] for rank in placement(self.ranks, 1)]
        for size, planned in self.planned_shapes.items():
            if size.virtual == min(one.virtual for one in self.planned_shapes):
                crossing = sum(planned.stages.forward_bytes)
                known[self.batch // size.microbatches] = StageTotals.of(planned.costs, speeds * size.virtual, crossing)
        return (
            totals_at(count, known)
            if known
            else StageTotals.without_communication(forward.graph, self.mesh.whole.size // self.ranks)
        )

    def _no_plan_error(self, search: ScheduleSearch) -> Exception:
        """Why there is no plan: what needs least of what was planned, or why nothing could be."""
        if not self.planned_shapes and self.errors:
            return min(self.errors.values(), key=lambda error: getattr(error, "peak", None) or _NO_LIMIT)
        return search.no_schedule_error()

    def _build_plan(self, best: Simulation, table: tuple[ScheduleCandidate, ...]) -> PipelinePlan:
        chosen, schedule = self.planned_shapes[_shape_of(best)], best.graph.schedule
        return PipelinePlan(
            mesh=self.mesh.whole,
            axis=self.mesh.axis,
            devices=self.mesh.devices if max(self.mesh.devices) > 1 else (),
            stage_of=dict(chosen.stages.stage_of),
            recomputed=dict(chosen.stages.recomputed),
            schedule=schedule,
            stages=tuple(one.plan for one in chosen.planned),
            reduced=tuple(one.planner.settings.reduced for one in chosen.planned),
            modules=tuple(one.modules for one in chosen.planned),
            costs=chosen.costs,
            step_seconds=best.seconds,
            bubble=best.bubble,
            peaks=best.peaks,
            capacities=self.memory_limits,
            table=table,
            cluster=self.target.cluster.name,
            contention=self.target.cluster.contention,
            fingerprint=forward_fingerprint(chosen.microbatch_graph.exported),
            timings={**self.shape_planner.seconds, "all": time.perf_counter() - self.start},
            versions={"autoshard": __version__, "torch": torch.__version__},
        )


def _shape_of(simulation: Simulation) -> PipelineShape:
    schedule = simulation.graph.schedule
    return PipelineShape(schedule.microbatches, schedule.virtual)
