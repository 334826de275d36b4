"""One size of a pipeline, so many microbatches and stages per rank: its stages assigned, cut, planned, and fitted."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autoshard import hints as hint_rules
from autoshard.cluster.cost import CostModel
from autoshard.errors import BudgetError
from autoshard.memory.budget import format_bytes
from autoshard.options import Options
from autoshard.pipeline.bounds import least_bytes
from autoshard.pipeline.costs import StageCosts
from autoshard.pipeline.cut import StageModule, cut
from autoshard.pipeline.exported import ExportedModule, exported
from autoshard.pipeline.microbatch import microbatches
from autoshard.pipeline.schedules import placement
from autoshard.pipeline.stage_graph import StageGraph
from autoshard.pipeline.stages import Method, StageDevice, Stages, assign_stages
from autoshard.pipelined.costs import Links, PlannedStage, stage_costs
from autoshard.pipelined.fitting import Fitted, rungs
from autoshard.pipelined.places import stage_cluster, stage_mesh, stage_options
from autoshard.pipelined.stage_plans import Boundaries, Pins, Room, StagePlanner
from autoshard.specs.axes import MeshShape

TOLERANCES = (0.02, 0.1)
"""How unequal stages may be: where less crosses the boundaries of less equal ones, either may be faster."""

_WORTH = 0.01
"""Stages are planned for less memory where that may make the step shorter by more than this share."""


class Size(NamedTuple):
    """Microbatches of a step, and stages per rank."""

    microbatches: int
    virtual: int


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The forward graph of one microbatch: to be cut, and to be assigned to stages."""

    exported: ExportedModule
    graph: StageGraph


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSize:
    """The stages of one size.

    Attributes:
        size: microbatches and stages per rank.
        forward: what was cut.
        stages: how it was.
        planned: the stages with their plans.
        costs: of these.
    """

    size: Size
    forward: Forward
    stages: Stages
    planned: tuple[PlannedStage, ...]
    costs: tuple[StageCosts, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """What is called, and how: a module, a call with the whole batch, and the dim that counts samples of each input."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_dims: Mapping[str, int | None] | None


class SizePlanner:
    """Plans sizes of one pipeline.

    Args:
        call: what is planned.
        mesh: all axes.
        axis: name of the pipeline's.
        options: as the user gave them.
        devices: of every pipeline rank: memory in bytes, and speed in times of the cluster's device.
        boundaries: how what goes from stage to stage lies (`StagePlanner`).
        seconds_of: the fastest schedule of a size with such stages, of those that fit or of all; infinite if none is.
    """

    def __init__(
        self,
        call: Call,
        mesh: MeshShape,
        axis: str,
        options: Options,
        devices: Sequence[StageDevice],
        boundaries: Boundaries,
        seconds_of: Callable[[Size, Sequence[StageCosts], bool], float],
    ) -> None:
        self.call = call
        self.mesh = stage_mesh(mesh, axis)
        self.ranks = mesh.sizes[mesh.index(axis)]
        self.devices = tuple(devices)
        self.links = Links.of(options.cluster, mesh, axis)
        self.options = options
        self.boundaries = boundaries
        self.seconds_of = seconds_of
        self.cluster = stage_cluster(options.cluster, mesh, axis)
        self.seconds: dict[str, float] = {"capture": 0.0, "stages": 0.0}
        self._forward: dict[int, Forward] = {}
        self._planner: StagePlanner | None = None

    def forward(self, number: int) -> Forward:
        """The forward graph of one of so many microbatches."""
        if number not in self._forward:
            start = time.perf_counter()
            call = self.call
            args, kwargs = microbatches(call.module, call.args, call.kwargs, number, call.batch_dims)[0]
            one = exported(call.module, args, kwargs, grad=torch.is_grad_enabled())
            cost = CostModel(self.cluster, MeshShape.of({"device": 1}))
            graph = StageGraph.of(one, cost, optimizer=self.options.settings.optimizer)
            self._forward[number] = Forward(one, graph)
            self.seconds["capture"] += time.perf_counter() - start
        return self._forward[number]

    def nearest(self, number: int) -> int:
        """Of the numbers of microbatches whose graph is there, the one nearest to some number."""
        return min(self._forward, key=lambda known: (abs(math.log(known / number)), known))

    def assigned(self, size: Size, graph: StageGraph, method: Method = "auto") -> list[Stages]:
        """The stages of a size, for every tolerance; equal ones once.

        Args:
            size: how many stages there are, and how many microbatches are under way in them.
            graph: what is assigned.
            method: of `assign_stages`.

        Raises:
            PlanError: the model has fewer operators than the size has stages.
            BudgetError: parameters, gradients and optimizer state alone do not fit.
        """
        start = time.perf_counter()
        at = placement(self.ranks, size.virtual)
        share = self.mesh.size / size.virtual  # of a rank's memory, with nothing held twice
        devices = [
            StageDevice(self.links.bandwidth, self.devices[rank].speed, self.devices[rank].memory * share)
            for rank in at
        ]
        found: list[Stages] = []
        try:
            for tolerance in TOLERANCES:
                if found and found[-1].tolerance > tolerance:
                    continue  # there are no stages as equal as that
                one = self._assign(graph, devices, self.in_flight(size), tolerance, method)
                if all(one.stage_of != other.stage_of for other in found):
                    found.append(one)
        except BudgetError as error:
            memories = ", ".join(dict.fromkeys(format_bytes(device.memory) for device in self.devices))
            peak = None if error.peak is None else math.ceil(error.peak / share)
            raise BudgetError(
                f"{len(at)} pipeline stages do not fit in {memories} per device, even if the {self.mesh.size} devices "
                f"of each rank hold nothing twice; of what they hold together: {error}",
                peak,
            ) from error
        finally:
            self.seconds["stages"] += time.perf_counter() - start
        return found

    def _assign(
        self,
        graph: StageGraph,
        devices: Sequence[StageDevice],
        flights: Sequence[int],
        tolerance: float,
        method: Method,
    ) -> Stages:
        try:
            return assign_stages(graph, devices, flights, tolerance=tolerance, method=method)
        except BudgetError:
            # What is saved may be recomputed, or there may be a schedule with one microbatch under way at a time.
            if self.options.settings.recompute != "none":
                graph = replace(graph, nodes=tuple(replace(node, saved_bytes=0) for node in graph.nodes))
            return assign_stages(graph, devices, [1] * len(devices), tolerance=tolerance, method=method)

    def in_flight(self, size: Size) -> list[int]:
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

    def plan(self, size: Size, stages: Stages) -> PlannedSize:
        """Cut and plan the stages of a size; leaner where memory costs seconds, or nothing fits otherwise.

        Raises:
            BudgetError: no plan of some stage was found at all.
        """
        forward = self.forward(size.microbatches)
        start = time.perf_counter()
        parts = cut(forward.exported, stages.stage_of, len(stages.seconds), stages.recomputed)
        self.seconds["stages"] += time.perf_counter() - start
        planner = self._stage_planner(forward.exported)
        first = "full" if self.options.settings.recompute == "full" else "none"
        rooms: Sequence[Room] = [Room(None, first)] * len(parts)
        last = best = self._planned(planner, size, forward, stages, parts, rooms)
        free, least = self.seconds_of(size, best.costs, False), self._merit(size, best.costs)
        memories = [device.memory for device in self.devices]
        for rung in rungs(self.options.settings.recompute):
            if least[0] <= free * (1 + _WORTH):
                break
            leaner = rung(Fitted(last.planned, last.costs, self.in_flight(size), size.microbatches, memories), rooms)
            if leaner == rooms:
                continue
            # Where a stage has no plan within its limit, the next rung may still help.
            with contextlib.suppress(BudgetError):
                last, rooms = self._planned(planner, size, forward, stages, parts, leaner), leaner
                if self._merit(size, last.costs) < least:
                    best, least = last, self._merit(size, last.costs)
        return best

    def _merit(self, size: Size, costs: Sequence[StageCosts]) -> tuple[float, float]:
        """Seconds of the fastest schedule that fits, and what the tightest rank needs of its memory at least."""
        needs = least_bytes(costs, placement(self.ranks, size.virtual), size.microbatches)
        tightest = max(need / device.memory for need, device in zip(needs, self.devices, strict=True))
        return self.seconds_of(size, costs, True), tightest

    def _planned(
        self,
        planner: StagePlanner,
        size: Size,
        forward: Forward,
        stages: Stages,
        parts: Sequence[StageModule],
        rooms: Sequence[Room],
    ) -> PlannedSize:
        planned = tuple(planner.plan(parts, rooms))
        at = placement(self.ranks, size.virtual)
        costs = tuple(
            self._on_device(stage_costs(one, self.links, size.microbatches, at), self.devices[rank].speed)
            for one, rank in zip(planned, at, strict=True)
        )
        return PlannedSize(size, forward, stages, planned, costs)

    @staticmethod
    def _on_device(costs: StageCosts, speed: float) -> StageCosts:
        return replace(
            costs,
            forward_seconds=costs.forward_seconds / speed,
            input_backward_seconds=costs.input_backward_seconds / speed,
            weight_backward_seconds=costs.weight_backward_seconds / speed,
        )

    def _stage_planner(self, one: ExportedModule) -> StagePlanner:
        if self._planner is None:
            options = stage_options(self.options, self.cluster)
            self._planner = StagePlanner(self.mesh, options, self._pinned(one), self.options.hints, self.boundaries)
            self.seconds = self._planner.seconds = {**self._planner.seconds, **self.seconds}
        return self._planner

    def _pinned(self, one: ExportedModule) -> Pins:
        """What the user's hints pin, in the model as a whole: in a single stage most would match nothing."""
        module = self.call.module
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        names = [name for name, _ in module.named_modules()]
        return hint_rules.resolve(self.options.hints, shapes, one.forward.aliases, names, self.mesh)
