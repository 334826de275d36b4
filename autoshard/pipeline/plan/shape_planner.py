"""Plan one shape of a pipeline, with given numbers of microbatches and stages: assign, cut, plan and fit its stages."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard.capture.marks import task_graphs_with_counts
from autoshard.errors import BudgetError, HintError
from autoshard.options.options import ALWAYS_RECOMPUTE
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.pipeline.graph.stage_problem import StageDevice
from autoshard.pipeline.graph.stage_slices import cut
from autoshard.pipeline.graph.stages import Stages, assign_layers, assign_stages, marked_stages
from autoshard.pipeline.plan.pipeline_devices import (
    PipelineMesh,
    RankShares,
    memory_share,
    scale_to_shares,
    slowest_cluster,
    stage_clusters,
    stage_target,
)
from autoshard.pipeline.plan.planned_stage import Links, PlannedStage, stage_costs
from autoshard.pipeline.plan.stage_plans import (
    RelaxedFit,
    StageBudget,
    StagePlanner,
    StageTarget,
    merge_limits,
    relaxations,
)
from autoshard.pipeline.plan.stage_reuse import PipelineCaptures, structural_fingerprint
from autoshard.pipeline.schedule.actions import placement
from autoshard.pipeline.schedule.costs import StageCosts, least_bytes
from autoshard.planner import hints as hint_rules
from autoshard.planner.shares import with_shares
from autoshard.units import format_bytes

# The tolerances of balance to try: less equal stages may exchange fewer bytes, so either may be faster.
TOLERANCES = (0.02, 0.1)

# Stages are planned with less memory if that may make the step shorter by more than this fraction.
MIN_GAIN = 0.01

# The minimum time limit of one stage's plan, however late it is: a shape is always planned to its end.
_MIN_STAGE_SECONDS = 1.0


@dataclass(slots=True)
class Stopping:
    """Limits of a search for a pipeline, and whether Ctrl-C ended it.

    Attributes:
        deadline: `time.monotonic()` seconds at which the search ends, even without a plan.
        interrupted: True if Ctrl-C ended the search; the plan is then the best one found before.
    """

    deadline: float = math.inf
    interrupted: bool = False


class PipelineShape(NamedTuple):
    """The numbers of microbatches per step, and of stages per rank."""

    microbatches: int
    virtual: int


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchGraph:
    """The forward graph of one microbatch.

    Attributes:
        microbatches: the number of microbatches of the batch.
        step: the step that is cut.
        graph: the graph for assignment to stages, with prices of the slowest device.
        speeds: the speed of every pipeline rank's devices, relative to the slowest device.
    """

    microbatches: int
    step: MicrobatchStep
    graph: StageGraph
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedShape:
    """The planned stages of one shape.

    Attributes:
        shape: microbatches and stages per rank.
        microbatch_graph: the graph that was cut.
        stages: the assignment used for cutting.
        planned: the stages with their plans.
        costs: the costs of the planned stages.
        free_seconds: seconds of a step without a memory limit.
        took: seconds of capturing and planning the stages for the first time, before any leaner plans.
    """

    shape: PipelineShape
    microbatch_graph: MicrobatchGraph
    stages: Stages
    planned: tuple[PlannedStage, ...]
    costs: tuple[StageCosts, ...]
    free_seconds: float = 0.0
    took: float = 0.0


class ShapePlanner:
    """Plans shapes of one pipeline.

    Args:
        captured: the captures of the call.
        mesh: all axes, and the part of every pipeline rank.
        target: the target given by the user.
        devices: the speed and the memory in bytes of every pipeline rank's devices.
        seconds_of: returns the seconds of the fastest schedule of a shape with stages of given costs, among the
            schedules that fit or all; infinity if there is none.
        stopping: further limits of the search.
        shares: the shares of a microbatch for the devices of every pipeline rank; empty for equal shares.
    """

    def __init__(
        self,
        captured: PipelineCaptures,
        mesh: PipelineMesh,
        target: Target,
        devices: Sequence[StageDevice],
        seconds_of: Callable[[PipelineShape, Sequence[StageCosts], bool], float],
        stopping: Stopping,
        shares: Sequence[RankShares],
    ) -> None:
        self.start = time.monotonic()
        self.captures = captured
        self.mesh = mesh
        self.ranks = mesh.ranks
        self.meshes = tuple(mesh.stage(rank) for rank in range(mesh.ranks))
        self.devices = tuple(devices)
        self.links = Links.of(target.cluster, mesh.whole, mesh.axis)
        self.target = target
        self.seconds_of = seconds_of
        self.stopping = stopping
        self.cluster = slowest_cluster(target.cluster, mesh.whole.size)
        clusters = stage_clusters(target.cluster, mesh)
        self.shares = tuple(shares)
        limit = target.settings.memory_limit or math.inf
        rank_data = list(zip(self.shares, clusters, self.meshes, strict=True))
        self.memory_shares = [memory_share(given, cluster, shape, limit) for given, cluster, shape in rank_data]
        targets = [
            StageTarget(with_shares(stage_target(target, cluster), shape, given), shape)
            for given, cluster, shape in rank_data
        ]
        self.targets = [stage for place, stage in enumerate(targets) if stage not in targets[:place]]
        self.target_of = [self.targets.index(stage) for stage in targets]
        self.seconds: dict[str, float] = {"capture": 0.0, "stages": 0.0}
        self._planner: StagePlanner | None = None

    @property
    def seconds_left(self) -> float:
        """The remaining seconds of the search; captures do not count."""
        now = time.monotonic()
        left = self.target.settings.time_limit + self.seconds["capture"] - (now - self.start)
        return min(left, self.stopping.deadline - now)

    @property
    def is_over(self) -> bool:
        """True if the search ends even if no plan fits."""
        return time.monotonic() > self.stopping.deadline

    def microbatch_graph(self, number: int) -> MicrobatchGraph:
        """Return the forward graph of one of `number` microbatches."""
        start = time.perf_counter()
        step, graph = self.captures.step(number), self.captures.stage_graph(number, self.cluster)
        forward = MicrobatchGraph(number, step, graph, self._speeds(number, graph))
        self.seconds["capture"] += time.perf_counter() - start
        return forward

    def _speeds(self, number: int, graph: StageGraph) -> tuple[float, ...]:
        """Return the speed of every pipeline rank, from the operators' seconds on its kind of device.

        A rank with twice as many devices as another is twice as fast.
        """
        fewest = min(shape.size for shape in self.meshes)
        counts = [shape.size / fewest for shape in self.meshes]
        # If devices are equal, or nothing takes time, there is nothing to compare.
        if self.target.cluster.is_uniform or not graph.seconds:
            return tuple(device.speed * count for device, count in zip(self.devices, counts, strict=True))
        clusters = [replace(stage.target.cluster, stretches=()) for stage in self.targets]
        seconds = [self.captures.stage_graph(number, cluster).seconds for cluster in clusters]
        return tuple(
            graph.seconds / seconds[index] * count for index, count in zip(self.target_of, counts, strict=True)
        )

    def stage_marks(self, forward: MicrobatchGraph) -> dict[str, int]:
        """Return the stage of every operator in a marked context with a number of devices; empty for one context."""
        counted_in = task_graphs_with_counts(forward.step.exported.graph)
        order = sorted({int(task_graph.place) for task_graph in counted_in.values()})
        if len(order) < 2:
            return {}
        return {name: order.index(int(task_graph.place)) for name, task_graph in counted_in.items()}

    def device_counts(self, forward: MicrobatchGraph) -> tuple[int, ...]:
        """Return the numbers of devices that marked contexts in `forward` request, in order."""
        task_graphs = task_graphs_with_counts(forward.step.exported.graph).values()
        counts = {int(task_graph.place): task_graph.primitives[0].devices for task_graph in task_graphs}
        return tuple(devices for _, devices in sorted(counts.items()) if isinstance(devices, int))

    def stage_assignments(self, shape: PipelineShape, forward: MicrobatchGraph, in_order: bool = False) -> list[Stages]:
        """Return the different assignments to stages for all tolerances of balance, or the marked stages.

        Args:
            shape: the numbers of stages, and of microbatches in flight in them.
            forward: the graph to assign.
            in_order: as for `assign_stages`.

        Raises:
            HintError: `forward` marks another number of stages, or marks contradict the order of the data.
            PlanError: the model has fewer operators than the shape has stages.
            BudgetError: parameters, gradients and optimizer state alone do not fit.
        """
        start = time.perf_counter()
        ranks = placement(self.ranks, shape.virtual)
        # The memory of a rank's devices per stage, in total: what stages hold if devices hold no duplicates.
        device_counts = [mesh.size / shape.virtual for mesh in self.meshes]
        devices = [
            StageDevice(self.links.bandwidth, forward.speeds[rank], self.devices[rank].memory * device_counts[rank])
            for rank in ranks
        ]
        marks = self._validate_marks(self.stage_marks(forward), forward, len(ranks))

        def assign(tolerance: float, graph: StageGraph, flights: Sequence[int]) -> Stages:
            if marks:
                return marked_stages(graph, devices, flights, marks)
            return assign_stages(graph, devices, flights, tolerance=tolerance, in_order=in_order)

        whole = None if marks else self._assign_whole_layers(forward.graph, devices, self.in_flight(shape))
        if whole is not None:
            self.seconds["stages"] += time.perf_counter() - start
            return [whole]
        assignments: list[Stages] = []
        try:
            for tolerance in TOLERANCES[-1:] if marks else TOLERANCES:
                # There were no stages much more balanced than that.
                if assignments and assignments[-1].tolerance > tolerance / 2:
                    continue
                stages = self._assign_with_fallback(
                    forward.graph, self.in_flight(shape), functools.partial(assign, tolerance)
                )
                if all(stages.stage_of != known.stage_of for known in assignments):
                    assignments.append(stages)
        except BudgetError as error:
            memories = ", ".join(dict.fromkeys(format_bytes(device.memory) for device in self.devices))
            peak = None if error.peak is None else math.ceil(error.peak / max(device_counts))
            counts = " or ".join(dict.fromkeys(str(mesh.size) for mesh in self.meshes))
            raise BudgetError(
                f"{len(ranks)} pipeline stages do not fit in {memories} per device, even if the {counts} devices of "
                f"each rank hold nothing twice; of what they hold together: {error}",
                peak,
            ) from error
        finally:
            self.seconds["stages"] += time.perf_counter() - start
        return assignments

    def _assign_whole_layers(
        self, graph: StageGraph, devices: Sequence[StageDevice], flights: Sequence[int]
    ) -> Stages | None:
        """Return stages of whole layers within the smallest tolerance whose saved tensors may be recomputed."""
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
            # Saved tensors may be recomputed, or a schedule may have one microbatch in flight at a time.
            if self.target.settings.recompute != "none":
                graph = replace(graph, nodes=tuple(replace(node, saved_bytes=0) for node in graph.nodes))
            return assign(graph, [1] * len(flights))

    def _validate_marks(self, marks: dict[str, int], forward: MicrobatchGraph, stages: int) -> dict[str, int]:
        """Return the marks; raise `HintError` if they are for another number of stages."""
        marked = max(marks.values(), default=-1) + 1
        if marked not in (0, stages):
            task_graphs = task_graphs_with_counts(forward.step.exported.graph).values()
            primitives = dict.fromkeys(str(task_graph.primitives[0]) for task_graph in task_graphs)
            per_rank = stages // self.ranks
            raise HintError(
                f"forward marks {marked} task graphs with numbers of devices ({', '.join(primitives)}), each of which "
                f"is a pipeline stage on devices of its own, and the pipeline has {stages} stages: {self.ranks} ranks "
                f"with {per_rank} each. Mark as many as there are stages, let the numbers add up to the "
                f"{sum(self.mesh.devices)} devices along the pipeline's axis, or change the mesh or virtual; of what "
                'is to be parallelised inside of stages, name mesh axes, as in autoshard.split("tp").'
            )
        return marks

    def in_flight(self, shape: PipelineShape) -> list[int]:
        """Return the microbatches in flight in every stage of a 1F1B schedule (Rhino 6.2)."""
        ranks, (number, virtual) = self.ranks, shape
        if virtual == 1:
            return [min(number, ranks - rank) for rank in range(ranks)]
        counts = []
        for stage in range(ranks * virtual):
            turn, rank = divmod(stage, ranks)
            # Forwards before the first backward, round-robin over the rank's stages, as many for each as ranks.
            ahead = 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
            rounds, left = divmod(ahead, ranks * virtual)
            counts.append(max(1, min(number, rounds * ranks + min(max(left - turn * ranks, 0), ranks))))
        return counts

    def plan(self, shape: PipelineShape, stages: Stages, known: float = math.inf) -> PlannedShape:
        """Cut and plan the stages of a shape; with less memory if memory costs seconds, or nothing fits otherwise.

        Args:
            shape: microbatches and stages per rank.
            stages: the assignment.
            known: seconds of another shape's step. No leaner stages are planned if this shape is no faster even without
                a memory limit.

        Raises:
            BudgetError: some stage has no plan at all.
        """
        start = time.perf_counter()
        forward = self.microbatch_graph(shape.microbatches)
        cutting = time.perf_counter()
        parts = cut(forward.step, stages.stage_of, len(stages.totals.seconds), stages.recomputed)
        self.seconds["stages"] += time.perf_counter() - cutting
        planner = self._stage_planner(forward.step)
        recompute = self.target.settings.recompute if self.target.settings.recompute in ALWAYS_RECOMPUTE else "none"
        ranks = placement(self.ranks, shape.virtual)
        budgets = [StageBudget(None, recompute, self.target_of[rank], shape.microbatches) for rank in ranks]

        def plan_stages(budgets: Sequence[StageBudget]) -> PlannedShape:
            planner.time_limit = max(self.seconds_left, _MIN_STAGE_SECONDS)
            planned = tuple(planner.plan(parts, budgets, ranks))
            costs = tuple(
                self._costs_on_rank(stage_costs(stage, self.links, shape.microbatches, ranks), rank)
                for stage, rank in zip(planned, ranks, strict=True)
            )
            return PlannedShape(shape, forward, stages, planned, costs)

        unlimited = best = plan_stages(budgets)
        took = time.perf_counter() - start
        free, least = self.seconds_of(shape, best.costs, False), self._merit(shape, best.costs)
        memories = [device.memory for device in self.devices]
        texts = [structural_fingerprint(part.step) for part in parts]
        for relax in relaxations(self.target.settings.recompute):
            # Once something fits, the time limit ends the search; before, only the deadline does.
            late = self.is_over or (self.seconds_left <= 0 and least[0] < math.inf)
            if least[0] <= free * (1 + MIN_GAIN) or free >= known or late or self.stopping.interrupted:
                break
            fit = RelaxedFit(unlimited.planned, unlimited.costs, self.in_flight(shape), shape.microbatches, memories)
            leaner = merge_limits(relax(fit, budgets), texts)
            if leaner == budgets:
                continue
            # If a stage has no plan within its limit, the next relaxation may still help.
            with contextlib.suppress(BudgetError), self._keep_on_interrupt(least[0]):
                candidate = plan_stages(leaner)
                if self._merit(shape, candidate.costs) < least:
                    best, least = candidate, self._merit(shape, candidate.costs)
                if all(budget.limit is None for budget in leaner):
                    unlimited, budgets = candidate, leaner
        return replace(best, free_seconds=free, took=took)

    @contextlib.contextmanager
    def _keep_on_interrupt(self, seconds: float) -> Iterator[None]:
        """Let Ctrl-C end the search with the present stages if they fit: if their step takes finite seconds."""
        try:
            yield
        except KeyboardInterrupt:
            self.stopping.interrupted = True
            if seconds == math.inf:
                raise

    def _merit(self, shape: PipelineShape, costs: Sequence[StageCosts]) -> tuple[float, float]:
        """Return the seconds of the fastest schedule that fits, and the memory fraction used on the tightest rank."""
        needs = least_bytes(costs, placement(self.ranks, shape.virtual), shape.microbatches)
        tightest = max(need / device.memory for need, device in zip(needs, self.devices, strict=True))
        return self.seconds_of(shape, costs, True), tightest

    def _costs_on_rank(self, costs: StageCosts, rank: int) -> StageCosts:
        """Return a stage's costs with its rank's shares, and with a message to each device that a device sends to."""
        # A rank at an end has no neighbour there, and sends nothing.
        before, here, behind = ([0, *self.mesh.devices, 0][rank + step] for step in range(3))
        costs = replace(
            costs,
            forward_send_seconds=costs.forward_send_seconds * max(math.ceil(behind / here), 1),
            backward_send_seconds=costs.backward_send_seconds * max(math.ceil(before / here), 1),
        )
        return scale_to_shares(costs, self.shares[rank], self.memory_shares[rank])

    def _stage_planner(self, step: MicrobatchStep) -> StagePlanner:
        if self._planner is None:
            # One for all shapes, because it reuses the plans of equal stages.
            hints, module = self.target.hints, self.captures.call.module
            shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
            names = [name for name, _ in module.named_modules()]
            # Hints are resolved in the whole model: in a single stage most of them would match nothing.
            pinned = [
                hint_rules.resolve(hints, shapes, step.joint.aliases, names, stage.mesh) for stage in self.targets
            ]
            self._planner = StagePlanner(self.targets, pinned, hints, self.links)
            self.seconds = self._planner.seconds = {**self._planner.seconds, **self.seconds}
        return self._planner
