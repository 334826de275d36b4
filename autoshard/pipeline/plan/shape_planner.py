"""One size of a pipeline, so many microbatches and stages per rank: its stages assigned, cut, planned, and fitted."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard.capture.task_graphs import task_graphs_with_counts
from autoshard.errors import BudgetError, HintError
from autoshard.options.target import Target
from autoshard.pipeline.assign.marked_stages import marked_stages
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.assign.stages import Method, StageDevice, Stages, assign_layers, assign_stages
from autoshard.pipeline.graph.forward_export import ExportedModule
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.pipeline.graph.stage_modules import StageModule, cut
from autoshard.pipeline.plan.captures import PipelineCaptures
from autoshard.pipeline.plan.pipeline_devices import slowest_cluster, stage_clusters, stage_target
from autoshard.pipeline.plan.planned_stage import Links, PlannedStage, stage_costs
from autoshard.pipeline.plan.rank_shares import RankShares, memory_share, scale_to_shares
from autoshard.pipeline.plan.relaxed_fit import RelaxedFit, merge_limits, relaxations
from autoshard.pipeline.plan.stage_plans import BoundaryMode, Pins, StageBudget, StagePlanner, StageTarget
from autoshard.pipeline.plan.stage_reuse import structural_text
from autoshard.pipeline.plan.stopping import Stopping
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_bounds import least_bytes
from autoshard.pipeline.schedule.schedules import placement
from autoshard.planner import hints as hint_rules
from autoshard.planner.batch_shares import with_shares
from autoshard.specs.axes import MeshShape
from autoshard.units import format_bytes

TOLERANCES = (0.02, 0.1)
"""How unequal stages may be: where less crosses the boundaries of less equal ones, either may be faster."""

MIN_GAIN = 0.01
"""Stages are planned for less memory where that may make the step shorter by more than this share."""

_MIN_STAGE_SECONDS = 1.0
"""What begins is planned to its end: the search of one stage's plan has that much time, however late it is."""


class PipelineShape(NamedTuple):
    """Microbatches of a step, and stages per rank."""

    microbatches: int
    virtual: int


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchGraph:
    """The forward graph of one microbatch.

    Attributes:
        exported: to be cut.
        graph: to be assigned to stages, priced for the slowest device.
        speeds: of the devices of every pipeline rank, in times of that one.
    """

    exported: ExportedModule
    graph: StageGraph
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedShape:
    """The stages of one size.

    Attributes:
        size: microbatches and stages per rank.
        forward: what was cut.
        stages: how it was.
        planned: the stages with their plans.
        costs: of these.
        free_seconds: of a step of stages that are planned without a limit on memory, if they are others.
        took: seconds in which the stages were captured and planned for the first time, before any leaner ones.
    """

    shape: PipelineShape
    microbatch_graph: MicrobatchGraph
    stages: Stages
    planned: tuple[PlannedStage, ...]
    costs: tuple[StageCosts, ...]
    free_seconds: float = 0.0
    took: float = 0.0


class ShapePlanner:
    """Plans sizes of one pipeline.

    Args:
        captured: of the call that is planned.
        mesh: all axes, and what of them every pipeline rank has.
        options: as the user gave them.
        devices: of every pipeline rank: memory in bytes; and speed in times of the cluster's device, which counts where
            that has one kind.
        boundaries: how what goes from stage to stage lies (`StagePlanner`).
        seconds_of: the fastest schedule of a size with such stages, of those that fit or of all; infinite if none is.
        stopping: when the search ends before its end.
        shares: what the devices of every pipeline rank take of a microbatch; equal shares by default.
    """

    def __init__(
        self,
        captured: PipelineCaptures,
        mesh: PipelineMesh,
        target: Target,
        devices: Sequence[StageDevice],
        boundaries: BoundaryMode,
        seconds_of: Callable[[PipelineShape, Sequence[StageCosts], bool], float],
        stopping: Stopping,
        shares: Sequence[RankShares] = (),
    ) -> None:
        self.start = time.monotonic()
        self.captures = captured
        self.mesh = mesh
        self.ranks = mesh.ranks
        self.meshes = tuple(mesh.stage(rank) for rank in range(mesh.ranks))
        self.devices = tuple(devices)
        self.links = Links.of(target.cluster, mesh.whole, mesh.axis)
        self.target = target
        self.boundaries = boundaries
        self.seconds_of = seconds_of
        self.stopping = stopping
        self.cluster = slowest_cluster(target.cluster, mesh.whole.size)
        clusters = stage_clusters(target.cluster, mesh)
        self.shares = tuple(shares) or ({},) * self.ranks
        limit = target.settings.memory_limit or math.inf
        of_ranks = list(zip(self.shares, clusters, self.meshes, strict=True))
        self.memory_shares = [memory_share(given, cluster, shape, limit) for given, cluster, shape in of_ranks]
        each = [
            StageTarget(with_shares(stage_target(target, cluster), shape, given), shape)
            for given, cluster, shape in of_ranks
        ]
        self.targets = [one for place, one in enumerate(each) if one not in each[:place]]
        self.target_of = [self.targets.index(one) for one in each]
        self.seconds: dict[str, float] = {"capture": 0.0, "stages": 0.0}
        self._planner: StagePlanner | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds of the search, captures aside."""
        now = time.monotonic()
        mine = self.target.settings.time_limit + self.seconds["capture"] - (now - self.start)
        return min(mine, self.stopping.deadline - now)

    @property
    def is_over(self) -> bool:
        """Whether the search ends, be there a plan that fits or not."""
        return time.monotonic() > self.stopping.deadline

    def microbatch_graph(self, number: int) -> MicrobatchGraph:
        """The forward graph of one of so many microbatches."""
        start = time.perf_counter()
        one, graph = self.captures.export(number), self.captures.stage_graph(number, self.cluster)
        forward = MicrobatchGraph(one, graph, self._speeds(number, graph))
        self.seconds["capture"] += time.perf_counter() - start
        return forward

    def _speeds(self, number: int, graph: StageGraph) -> tuple[float, ...]:
        """As given; or, where the cluster tells kinds of device apart, by what the operators take on each.

        A rank with more devices than another is so many times as fast.
        """
        many = [shape.size / min(other.size for other in self.meshes) for shape in self.meshes]
        if self.target.cluster.is_uniform or not graph.seconds:
            return tuple(device.speed * count for device, count in zip(self.devices, many, strict=True))
        clusters = [replace(kind.target.cluster, stretches=()) for kind in self.targets]
        seconds = [self.captures.stage_graph(number, cluster).seconds for cluster in clusters]
        return tuple(graph.seconds / seconds[kind] * count for kind, count in zip(self.target_of, many, strict=True))

    def stage_marks(self, forward: MicrobatchGraph) -> dict[str, int]:
        """The stages of operators in contexts of `forward` with devices of their own, where several follow another."""
        counted_in = task_graphs_with_counts(forward.exported.graph)
        order = sorted({int(one.place) for one in counted_in.values()})
        if len(order) < 2:
            return {}
        return {name: order.index(int(one.place)) for name, one in counted_in.items()}

    def device_counts(self, forward: MicrobatchGraph) -> tuple[int, ...]:
        """How many devices the contexts of `forward` that ask for numbers of them want, in order."""
        found = {
            int(one.place): one.primitive.devices for one in task_graphs_with_counts(forward.exported.graph).values()
        }
        return tuple(devices for _, devices in sorted(found.items()) if isinstance(devices, int))

    def stage_assignments(self, size: PipelineShape, forward: MicrobatchGraph, method: Method = "auto") -> list[Stages]:
        """The stages of a size, for every tolerance; equal ones once; as they are marked, where they are.

        Args:
            size: how many stages there are, and how many microbatches are under way in them.
            forward: whose graph is assigned.
            method: of `assign_stages`.

        Raises:
            HintError: `forward` marks another number of stages, or marks contradict the way of the data.
            PlanError: the model has fewer operators than the size has stages.
            BudgetError: parameters, gradients and optimizer state alone do not fit.
        """
        start = time.perf_counter()
        at = placement(self.ranks, size.virtual)
        held = [shape.size / size.virtual for shape in self.meshes]  # of a device's memory, with nothing held twice
        devices = [
            StageDevice(self.links.bandwidth, forward.speeds[rank], self.devices[rank].memory * held[rank])
            for rank in at
        ]
        marks = self._validate_marks(self.stage_marks(forward), forward, len(at))

        def assign(tolerance: float, graph: StageGraph, flights: Sequence[int]) -> Stages:
            if marks:
                return marked_stages(graph, devices, flights, marks)
            return assign_stages(graph, devices, flights, tolerance=tolerance, method=method)

        whole = None if marks else self._assign_whole_layers(forward.graph, devices, self.in_flight(size))
        if whole is not None:
            self.seconds["stages"] += time.perf_counter() - start
            return [whole]
        found: list[Stages] = []
        try:
            for tolerance in TOLERANCES[-1:] if marks else TOLERANCES:
                if found and found[-1].tolerance > tolerance / 2:
                    continue  # there were no stages much more equal than that
                one = self._assign_with_fallback(
                    forward.graph, self.in_flight(size), functools.partial(assign, tolerance)
                )
                if all(one.stage_of != other.stage_of for other in found):
                    found.append(one)
        except BudgetError as error:
            memories = ", ".join(dict.fromkeys(format_bytes(device.memory) for device in self.devices))
            peak = None if error.peak is None else math.ceil(error.peak / max(held))
            counts = " or ".join(dict.fromkeys(str(shape.size) for shape in self.meshes))
            raise BudgetError(
                f"{len(at)} pipeline stages do not fit in {memories} per device, even if the {counts} devices of each "
                f"rank hold nothing twice; of what they hold together: {error}",
                peak,
            ) from error
        finally:
            self.seconds["stages"] += time.perf_counter() - start
        return found

    def _assign_whole_layers(
        self, graph: StageGraph, devices: Sequence[StageDevice], flights: Sequence[int]
    ) -> Stages | None:
        """Stages that part no layer, as equal as is asked for; what they save may be recomputed."""
        keeping = assign_layers(graph, devices, flights, tolerance=TOLERANCES[0])
        if keeping is not None or self.target.settings.recompute == "none":
            return keeping
        return assign_layers(graph, devices, flights, tolerance=TOLERANCES[0], keeping=False)

    def _assign_with_fallback(
        self, graph: StageGraph, flights: Sequence[int], assign: Callable[[StageGraph, Sequence[int]], Stages]
    ) -> Stages:
        try:
            return assign(graph, flights)
        except BudgetError:
            # What is saved may be recomputed, or there may be a schedule with one microbatch under way at a time.
            if self.target.settings.recompute != "none":
                graph = replace(graph, nodes=tuple(replace(node, saved_bytes=0) for node in graph.nodes))
            return assign(graph, [1] * len(flights))

    def _validate_marks(self, marks: dict[str, int], forward: MicrobatchGraph, stages: int) -> dict[str, int]:
        """The marks; `HintError` where they are not of so many stages."""
        marked = max(marks.values(), default=-1) + 1
        if marked not in (0, stages):
            primitives = dict.fromkeys(
                map(str, (one.primitive for one in task_graphs_with_counts(forward.exported.graph).values()))
            )
            per_rank = stages // self.ranks
            raise HintError(
                f"forward marks {marked} task graphs with numbers of devices ({', '.join(primitives)}), each of which "
                f"is a pipeline stage on devices of its own, and the pipeline has {stages} stages: {self.ranks} ranks "
                f"with {per_rank} each. Mark as many as there are stages, let the numbers add up to the "
                f"{sum(self.mesh.devices)} devices along the pipeline's axis, or change the mesh or virtual; of what "
                'is to be parallelised inside of stages, name mesh axes, as in autoshard.split("tp").'
            )
        return marks

    def in_flight(self, size: PipelineShape) -> list[int]:
        """Microbatches under way in every stage, as one forward and one backward in turn have it (Rhino 6.2)."""
        ranks, (number, virtual) = self.ranks, size
        if virtual == 1:
            return [min(number, ranks - rank) for rank in range(ranks)]
        counts = []
        for stage in range(ranks * virtual):
            turn, rank = divmod(stage, ranks)
            ahead = 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1  # forwards before the first backward
            rounds, left = divmod(ahead, ranks * virtual)
            counts.append(max(1, min(number, rounds * ranks + min(max(left - turn * ranks, 0), ranks))))
        return counts

    def plan(self, size: PipelineShape, stages: Stages, known: float = math.inf) -> PlannedShape:
        """Cut and plan the stages of a size; leaner where memory costs seconds, or nothing fits otherwise.

        Args:
            size: microbatches and stages per rank.
            stages: the assignment.
            known: seconds of a step of another size: where memory without end makes none shorter, no leaner stages do.

        Raises:
            BudgetError: no plan of some stage was found at all.
        """
        start = time.perf_counter()
        forward = self.microbatch_graph(size.microbatches)
        cutting = time.perf_counter()
        parts = cut(forward.exported, stages.stage_of, len(stages.seconds), stages.recomputed)
        self.seconds["stages"] += time.perf_counter() - cutting
        planner = self._stage_planner(forward.exported)
        first = "full" if self.target.settings.recompute == "full" else "none"
        at = placement(self.ranks, size.virtual)
        rooms = [StageBudget(None, first, self.target_of[rank], size.microbatches) for rank in at]
        free_of_limits = best = self._plan_stages(planner, size, forward, stages, parts, rooms)
        took = time.perf_counter() - start
        free, least = self.seconds_of(size, best.costs, False), self._merit(size, best.costs)
        memories = [device.memory for device in self.devices]
        texts = [structural_text(part) for part in parts]
        for rung in relaxations(self.target.settings.recompute):
            late = self.is_over or (self.seconds_left <= 0 and least[0] < math.inf)
            if least[0] <= free * (1 + MIN_GAIN) or free >= known or late or self.stopping.interrupted:
                break
            last = free_of_limits
            fitted = RelaxedFit(last.planned, last.costs, self.in_flight(size), size.microbatches, memories)
            leaner = merge_limits(rung(fitted, rooms), texts)
            if leaner == rooms:
                continue
            # Where a stage has no plan within its limit, the next rung may still help.
            with contextlib.suppress(BudgetError), self._keep_on_interrupt(least[0]):
                last = self._plan_stages(planner, size, forward, stages, parts, leaner)
                if self._merit(size, last.costs) < least:
                    best, least = last, self._merit(size, last.costs)
                if all(room.limit is None for room in leaner):
                    free_of_limits, rooms = last, leaner
        return replace(best, free_seconds=free, took=took)

    @contextlib.contextmanager
    def _keep_on_interrupt(self, seconds: float) -> Iterator[None]:
        """Ctrl-C ends the search with the stages that there are, if they fit: if their step takes finite seconds."""
        try:
            yield
        except KeyboardInterrupt:
            self.stopping.interrupted = True
            if seconds == math.inf:
                raise

    def _merit(self, size: PipelineShape, costs: Sequence[StageCosts]) -> tuple[float, float]:
        """Seconds of the fastest schedule that fits, and what the tightest rank needs of its memory at least."""
        needs = least_bytes(costs, placement(self.ranks, size.virtual), size.microbatches)
        tightest = max(need / device.memory for need, device in zip(needs, self.devices, strict=True))
        return self.seconds_of(size, costs, True), tightest

    def _plan_stages(
        self,
        planner: StagePlanner,
        size: PipelineShape,
        forward: MicrobatchGraph,
        stages: Stages,
        parts: Sequence[StageModule],
        rooms: Sequence[StageBudget],
    ) -> PlannedShape:
        planner.time_limit = max(self.seconds_left, _MIN_STAGE_SECONDS)
        at = placement(self.ranks, size.virtual)
        planned = tuple(planner.plan(parts, rooms, at))
        costs = tuple(
            self._costs_on_device(stage_costs(one, self.links, size.microbatches, at), rank)
            for one, rank in zip(planned, at, strict=True)
        )
        return PlannedShape(size, forward, stages, planned, costs)

    def _costs_on_device(self, costs: StageCosts, rank: int) -> StageCosts:
        """Costs at the speed of a rank's devices, where that is not in them: a cluster of equal devices knows none."""
        costs = scale_to_shares(self._scale_send_seconds(costs, rank), self.shares[rank], self.memory_shares[rank])
        if not self.target.cluster.is_uniform:
            return costs
        speed = self.devices[rank].speed
        return replace(
            costs,
            forward_seconds=costs.forward_seconds / speed,
            input_backward_seconds=costs.input_backward_seconds / speed,
            weight_backward_seconds=costs.weight_backward_seconds / speed,
        )

    def _scale_send_seconds(self, costs: StageCosts, rank: int) -> StageCosts:
        """Costs with messages to as many devices as each of a rank's has to send to on the ranks before and after."""
        before, own, behind = ([0, *self.mesh.devices, 0][rank + step] for step in range(3))
        return replace(
            costs,
            forward_send_seconds=costs.forward_send_seconds * max(math.ceil(behind / own), 1),
            backward_send_seconds=costs.backward_send_seconds * max(math.ceil(before / own), 1),
        )

    def _stage_planner(self, one: ExportedModule) -> StagePlanner:
        if self._planner is None:
            hints, captures = self.target.hints, self.captures.stage_captures
            pinned = [self._pinned_placements(one, kind.mesh) for kind in self.targets]
            self._planner = StagePlanner(self.targets, pinned, hints, self.boundaries, captures, self.links)
            self.seconds = self._planner.seconds = {**self._planner.seconds, **self.seconds}
        return self._planner

    def _pinned_placements(self, one: ExportedModule, mesh: MeshShape) -> Pins:
        """What the user's hints pin, in the model as a whole: in a single stage most would match nothing."""
        module = self.captures.call.module
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        names = [name for name, _ in module.named_modules()]
        return hint_rules.resolve(self.target.hints, shapes, one.forward.aliases, names, mesh)
