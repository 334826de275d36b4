"""The request of a search, and plans of one mesh for it: without a memory limit, within it, and at full effort."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx, nn

from autoshard.capture.joint import JointGraph
from autoshard.capture.nodes import is_view
from autoshard.errors import BudgetError, PipelineError
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.options import Pipeline
from autoshard.options.options import ALWAYS_RECOMPUTE
from autoshard.options.target import Target
from autoshard.patterns.graph_rules import value_of
from autoshard.pipeline.plan.pipeline_devices import PipelineMesh, stage_devices
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.shape_planner import Stopping
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planner import Planner
from autoshard.planner.planning import planner_for, run_planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.result import Row
from autoshard.search.shapes import PipelineAxis, Shape
from autoshard.search.step_bounds import resident_bytes, tighten_bound
from autoshard.specs.axes import MeshShape

# The fraction of memory that must remain after parameters, gradients and optimizer state, for activations.
_FREE_FRACTION = 0.5

# For the first plan of a pipeline, with one number of microbatches: it is idle for less than a quarter of its work.
_MICROBATCHES_PER_RANK = 4

# Relative gap below which a quickly solved problem is not solved again.
_PROVED = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of a search, for any number of devices.

    Attributes:
        module: the model.
        graph: the captured step.
        capture_seconds: seconds of the capture.
        target: the target of planning; its memory limit is what every device may hold, in bytes.
        pipelines: the position of the pipeline axis.
        batch: samples of the example call, which are split into microbatches.
        plan_pipeline: `plan_pipeline` with the captures of the example call.
        own_memory: True if the memory limit is only the memory of the smallest device. Larger devices of a pipeline may
            then use all their memory.
    """

    module: nn.Module
    graph: JointGraph
    capture_seconds: float
    target: Target
    pipelines: PipelineAxis
    batch: int
    plan_pipeline: Callable[..., PipelinePlan]
    own_memory: bool = False

    @property
    def pipeline(self) -> Pipeline:
        """The options of pipelines."""
        return self.target.options.pipeline

    @property
    def memory_limit(self) -> int:
        """Bytes that every device may hold."""
        limit = self.target.settings.memory_limit
        assert limit is not None, "a search has a limit: at least what a device has"
        return limit

    def device_memory(self, shape: Shape) -> float:
        """Return the bytes that a device of a mesh may hold; for a pipeline, the mean over its ranks."""
        if shape.axis is None or not self.own_memory:
            return self.memory_limit
        devices = stage_devices(self.target.cluster, PipelineMesh.of(shape.mesh, shape.axis))
        return sum(device.memory for device in devices) / len(devices)

    @property
    def microbatch_numbers(self) -> list[int]:
        """The possible numbers of microbatches of a pipeline."""
        divisors = [number for number in range(1, self.batch + 1) if self.batch % number == 0]
        return [number for number in divisors if self.pipeline.microbatches in ("auto", number)] or divisors

    def feasible_numbers(self, shape: Shape) -> list[int]:
        """Return the numbers with a sample per microbatch for each device of a stage; all numbers if none has.

        If a stage has several hosts, the devices of a host may share a sample.
        """
        host = self.target.cluster.devices_per_host
        least = shape.devices_per_rank // host if shape.devices_per_rank > host else shape.devices_per_rank
        large = [number for number in self.microbatch_numbers if self.batch // number >= least]
        return large or self.microbatch_numbers


class InitialGuess:
    """Quick guesses of a step's memory: they order the search, but exclude nothing.

    Args:
        request: the model, the options and the limits.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._saved = saved_bytes(request.graph)

    def has_free_memory(self, shape: Shape) -> bool:
        """Return True if parameters, gradients and optimizer state leave much of the memory free."""
        return self._resident_bytes(shape) <= (1 - _FREE_FRACTION) * self._request.device_memory(shape)

    def microbatches(self, shape: Shape) -> int:
        """Return the number of microbatches for the first plan of a pipeline: about four per rank, or more."""
        # By `log`, so that half and twice the number are equally far; of these the smaller, with fewer launches.
        numbers = self._request.feasible_numbers(shape)
        wanted = _MICROBATCHES_PER_RANK * shape.ranks
        free = self._request.device_memory(shape) - self._resident_bytes(shape)
        nearest = min(numbers, key=lambda number: (abs(math.log(number / wanted)), number))
        # The first stage saves its part of the model for one microbatch per rank: since all ranks' parts are the whole
        # model, as much as one microbatch of the whole model. More microbatches are smaller, and save less.
        fitting = (
            number for number in numbers if number >= nearest and self._saved / number / shape.devices_per_rank <= free
        )
        return min(fitting, default=max(numbers))

    def _resident_bytes(self, shape: Shape) -> int:
        target = self._request.target
        per_host = target.cluster.devices_per_host
        return typical_bytes(self._request.graph, shape, target.settings.optimizer, per_host)


def typical_bytes(graph: JointGraph, shape: Shape, optimizer: OptimizerMemory, per_host: int) -> int:
    """Return the bytes that a device holds throughout a step in the usual layout of models; this is not a bound.

    Parameters, gradients and optimizer state are divided among the stages, and within a stage among the devices of a
    host, whose links are fast; every host of a stage holds all of them.

    Args:
        graph: the captured step.
        shape: the mesh.
        optimizer: the memory of the optimizer.
        per_host: devices per host.
    """
    parts = shape.ranks * min(per_host, shape.devices_per_rank)
    return sum(resident_bytes(graph, parts, optimizer, parameters_only=True))


def saved_bytes(graph: JointGraph) -> int:
    """Return the total bytes of forward results that the backward half needs, as whole tensors."""
    forward = [node for node in graph.graph.nodes if node.op == "call_function" and graph.phase(node) == "forward"]
    saved = {
        value_of(node).name: value_of(node).meta.bytes
        for node in forward
        if not is_view(node) and any(graph.phase(user) == "backward" for user in _readers(node))
    }
    return sum(saved.values())


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a node and of its views."""
    for user in node.users:
        yield user
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)


class MeshPlanner:
    """Makes plans until a deadline.

    Args:
        request: the model, the options and the limits.
        deadline: `time.monotonic()` seconds.

    Attributes:
        initial_guess: decides what to plan first.
        interrupted: True if Ctrl-C ended the search for a plan, which is then the best known one.
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
        """Return a plan of the whole step on the devices of a mesh."""
        return self._plan_mesh(planner_for(self.request.module, self.request.graph, mesh, target), target)

    def without_limit(self, row: Row) -> ShardingPlan:
        """Plan a mesh quickly without a memory limit; the proved lower bound tightens the mesh's bound."""
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
        # A search within the limit begins with the solved problem without a limit.
        unlimited = None if row.planner is None else row.planner.unlimited
        return self._plan_mesh(self.new_planner(row.shape, target, like=row.planner), target, unlimited)

    def plan_thoroughly(self, row: Row) -> ShardingPlan:
        """Plan a mesh with the requested effort."""
        target = self.target()
        quick = None if row.planner is None else row.planner.unlimited
        if quick is not None and quick.cost - quick.lower_bound > _PROVED * quick.cost:
            quick = None
        return self._plan_mesh(self.new_planner(row.shape, target, like=row.planner), target, quick)

    def pipeline_of_one_shape(self, row: Row) -> PipelinePlan:
        """Plan a pipeline of one shape, or of all shapes if that one has no plan."""
        request, shape = self.request, row.shape
        number = self.initial_guess.microbatches(shape)
        virtual = 1 if request.pipeline.virtual == "auto" else request.pipeline.virtual
        row.covers_all_shapes = (number, virtual) == (request.pipeline.microbatches, request.pipeline.virtual)
        try:
            return self._plan_pipeline(row, number, virtual, self.target("fast"))
        except (BudgetError, PipelineError):
            # The guessed shape may need too much memory, or have no schedule; another one may work.
            if row.covers_all_shapes or time.monotonic() > self.deadline:
                raise
        row.covers_all_shapes = True
        return self.plan_pipeline(row, "fast")

    def plan_pipeline(self, row: Row, effort: str | None = None) -> PipelinePlan:
        """Plan a pipeline over all requested shapes."""
        pipeline = self.request.pipeline
        return self._plan_pipeline(row, pipeline.microbatches, pipeline.virtual, self.target(effort))

    def plan_with_shares(self, row: Row) -> PipelinePlan:
        """Plan a pipeline with its present shape, and with shares in proportion to speed if that is faster."""
        assert row.plan is not None
        assert not isinstance(row.plan, ShardingPlan)
        number, virtual = row.plan.microbatches, row.plan.virtual
        # The last effort with which this shape was planned, so that shares do not lose what the effort gained.
        efforts = [effort for effort, shapes in row.planned_shapes.items() if (number, virtual) in shapes]
        target = replace(self.target(efforts[-1] if efforts else "fast"), shares="auto")
        return self._plan_pipeline(row, number, virtual, target)

    def _plan_pipeline(
        self, row: Row, microbatches: int | Literal["auto"], virtual: int | Literal["auto"], target: Target
    ) -> PipelinePlan:
        request, shape, stopping = self.request, row.shape, Stopping(self.deadline)
        # Without a user's limit, every pipeline rank may use its devices' whole memory.
        if request.own_memory:
            target = replace(target, settings=replace(target.settings, memory_limit=None))
        target = target.in_pipeline
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
        """Return the target of the request with another effort, and at most half of the remaining time."""
        settings = self.request.target.settings
        # Half, so that one mesh does not take all time from the others.
        left = max(self.deadline - time.monotonic(), 1e-3)
        changed = replace(
            settings,
            effort=effort or settings.effort,
            memory_limit=settings.memory_limit if limited else None,
            time_limit=min(settings.time_limit, left / 2),
        )
        return replace(self.request.target, settings=changed, shares=None)

    def _plan_mesh(self, planner: Planner, target: Target, unlimited: CandidatePlan | None = None) -> ShardingPlan:
        # The given planner is for the step without recomputation.
        if target.settings.recompute in ALWAYS_RECOMPUTE:
            unlimited = None
        plan = run_planner(planner, self.request.capture_seconds, target, unlimited, explained=False)
        self.interrupted = self.interrupted or planner.interrupted
        return plan
