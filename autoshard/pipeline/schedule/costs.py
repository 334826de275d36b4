"""Costs of pipeline stages and of their steps: lower bounds, and a simulation (Rhino 6.1).

Bounds and simulation are independent of the model: they only use the seconds and bytes of its stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import Action, ActionKind, Product, Schedule, issue, product, required_products
from autoshard.simulate.events import COMPUTE, Task, replay_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of one stage on its devices; times are per microbatch, bytes per device.

    Attributes:
        forward_seconds: seconds of the forward pass.
        input_backward_seconds: seconds of the backward half that computes gradients of the stage's inputs.
        weight_backward_seconds: seconds of the half that computes gradients of its parameters and adds them to those of
            earlier microbatches. A whole backward takes both.
        forward_bytes, forward_send_seconds: the message to the next stage.
        backward_bytes, backward_send_seconds: the gradients sent to the previous stage.
        rest_bytes: held throughout the step: parameters, gradients and optimizer state.
        saved_bytes: kept per microbatch from its forward to its backward, without the received tensors.
        weight_saved_bytes: bytes that the backward half for weights needs, including those added by the half for
            inputs. They are kept until the half for weights has run.
        working_bytes: held in addition while a computation runs.
        reduction_seconds: seconds to reduce the stage's gradients over data-parallel ranks, once per step, without the
            part hidden by its last backward.
        tied_bytes, tied_seconds: gradients of tied parameters, which are summed over the stages that hold them once per
            step; their seconds are included in those of the reduction.
        application_seconds: seconds of the optimizer's update, once per step.
        application_bytes: held in addition to `rest_bytes` during that update.
    """

    forward_seconds: float
    input_backward_seconds: float
    weight_backward_seconds: float
    forward_bytes: int = 0
    forward_send_seconds: float = 0.0
    backward_bytes: int = 0
    backward_send_seconds: float = 0.0
    rest_bytes: int = 0
    saved_bytes: int = 0
    weight_saved_bytes: int = 0
    working_bytes: int = 0
    reduction_seconds: float = 0.0
    tied_bytes: int = 0
    tied_seconds: float = 0.0
    application_seconds: float = 0.0
    application_bytes: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            amount = getattr(self, field.name)
            if not 0 <= amount < float("inf"):
                raise PipelineError(f"{field.name} of a stage is {amount}: it has to be a number from 0 up.")

    @property
    def backward_seconds(self) -> float:
        """Seconds of a whole backward."""
        return self.input_backward_seconds + self.weight_backward_seconds

    def seconds(self, kind: ActionKind) -> float:
        """Return the seconds of a computation of this kind."""
        if kind == ActionKind.FORWARD:
            return self.forward_seconds
        if kind == ActionKind.INPUT_BACKWARD:
            return self.input_backward_seconds
        return self.weight_backward_seconds if kind == ActionKind.WEIGHT_BACKWARD else self.backward_seconds

    def memory_change(self, kind: ActionKind) -> int:
        """Return the bytes that a computation of this kind adds to the kept memory; negative if it frees memory."""
        if kind == ActionKind.FORWARD:
            return self.saved_bytes
        if kind == ActionKind.INPUT_BACKWARD:
            return self.weight_saved_bytes - self.saved_bytes
        return -self.weight_saved_bytes if kind == ActionKind.WEIGHT_BACKWARD else -self.saved_bytes


def rest_bytes(costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Return the bytes that every rank holds throughout the step: those of its stages and its receive buffers.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: the number per step.
    """
    rest = [0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        # Torch allocates buffers before the first step: one per microbatch for forward inputs, and one for received
        # gradients.
        received = costs[stage - 1].forward_bytes if stage > 0 else 0
        received += costs[stage + 1].backward_bytes if stage < len(placement) - 1 else 0
        rest[rank] += costs[stage].rest_bytes + microbatches * received
    return tuple(rest)


def least_seconds(costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, halves: bool) -> float:
    """Return a lower bound of the seconds of a step.

    Args:
        costs, placement, microbatches: as for `rest_bytes`.
        halves: True if backward may run in halves.
    """
    sends = [0.0 if here == there else 1.0 for here, there in pairwise(placement)]
    backward = [cost.input_backward_seconds if halves else cost.backward_seconds for cost in costs]
    # Seconds until a microbatch reaches a stage, and from a stage until its gradients reach the first one.
    head, tail = [0.0], [0.0]
    for stage, send in enumerate(sends):
        head.append(head[-1] + costs[stage].forward_seconds + send * costs[stage].forward_send_seconds)
        tail.append(tail[-1] + backward[stage] + send * costs[stage + 1].backward_send_seconds)
    work, applied = [0.0] * (max(placement) + 1), [0.0] * (max(placement) + 1)
    for cost, rank in zip(costs, placement, strict=True):
        work[rank] += microbatches * (cost.forward_seconds + cost.backward_seconds)
        applied[rank] += cost.application_seconds
    busiest = 0.0
    for rank, seconds in enumerate(work):
        # A rank idles until the first microbatch reaches its first stage. If backward is never halved, its last
        # computation is a backward of that stage, whose gradients then travel to the first stage and are reduced.
        first = placement.index(rank)
        reduced = 0.0 if halves else costs[first].reduction_seconds
        left = max(reduced + applied[rank], 0.0 if halves else tail[first])
        busiest = max(busiest, head[first] + seconds + left)
    # A step is at least as long as the path of one microbatch to the last stage and back.
    way = head[-1] + costs[-1].forward_seconds + backward[-1] + tail[-1]
    way += costs[0].weight_backward_seconds if halves else 0.0
    return max(busiest, way + costs[0].reduction_seconds + applied[placement[0]])


def least_bytes(costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Return a lower bound of the bytes of every rank; arguments as for `rest_bytes`."""
    rest = rest_bytes(costs, placement, microbatches)
    least = list(rest)
    # A microbatch passes all stages of a rank forward before it returns: when the rank's last stage computes, all of
    # them hold saved tensors.
    last = {rank: stage for stage, rank in enumerate(placement)}
    for stage, rank in enumerate(placement):
        least[rank] += costs[stage].saved_bytes + (costs[stage].working_bytes if last[rank] == stage else 0)
    # No microbatch is in flight during the optimizer's update.
    for stage, rank in enumerate(placement):
        least[rank] = max(least[rank], rest[rank] + costs[stage].application_bytes)
    return tuple(least)


# Streams besides `COMPUTE`: of the messages between two ranks, and of a rank's gradient reductions.
LINK = "link"
REDUCTION = "reduction"


def step_tasks(schedule: Schedule, costs: Sequence[StageCosts]) -> tuple[Task, ...]:
    """Return the tasks of a step: computations, messages, gradient reductions, optimizer updates.

    Args:
        schedule: the order on every rank.
        costs: one per stage.

    Returns:
        The tasks; each needs only earlier ones.

    Raises:
        PipelineError: the number of costs is not the number of stages, or the schedule cannot be run.

    Source: Rhino 6.1.
    """
    if len(costs) != schedule.stages:
        raise PipelineError(
            f"schedule {schedule.name} has {schedule.stages} stages, and there are costs of {len(costs)}: one each is "
            f"needed."
        )
    builder = _TaskBuilder(schedule, costs)
    for rank, action in issue(schedule):
        builder.add(rank, action)
    builder.apply()
    return tuple(builder.tasks)


class _TaskBuilder:
    """One pass over the actions of a step, in the order of issue."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCosts]) -> None:
        self.schedule = schedule
        self.costs = costs
        self.tasks: list[Task] = []
        # By rank, product or stage: the index of the last computation, the computation or message, the reduction.
        self.last_compute: list[int | None] = [None] * schedule.ranks
        self.compute_tasks: dict[Product, int] = {}
        self.message_tasks: dict[Product, int] = {}
        self.reduction_tasks: dict[int, int] = {}

    def add(self, rank: int, action: Action) -> None:
        if action.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD):
            self._send(rank, action)
        elif action.kind == ActionKind.REDUCTION:
            name, seconds = f"reduce {action.stage}", self.costs[action.stage].reduction_seconds
            needs = _indices([self.last_compute[rank]])
            task = Task(name, _kind_name(action), REDUCTION, (rank,), seconds, needs)
            self.reduction_tasks[action.stage] = self._append(task)
        # A receive is part of the send's task.
        elif action.kind not in (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD):
            products = [need for part in action.computations for need in required_products(part, len(self.costs))]
            placement = self.schedule.placement
            # A result is available after its computation, or after the message from another rank.
            needs = _indices(
                (self.compute_tasks if placement[need[0]] == rank else self.message_tasks)[need] for need in products
            )
            for part in action.computations:
                self._compute(rank, part, needs)

    def apply(self) -> None:
        # A stage's gradients are applied once its rank has computed everything and they are reduced.
        for stage, rank in enumerate(self.schedule.placement):
            seconds, held = self.costs[stage].application_seconds, self.costs[stage].application_bytes
            needs = _indices([self.last_compute[rank], self.reduction_tasks[stage]])
            self._append(Task(f"apply {stage}", "application", COMPUTE, (rank,), seconds, needs, held, held))

    def _compute(self, rank: int, action: Action, needs: tuple[int, ...]) -> None:
        cost = self.costs[action.stage]
        kept = cost.memory_change(action.kind)
        task = Task(
            str(action),
            _kind_name(action),
            COMPUTE,
            (rank,),
            cost.seconds(action.kind),
            needs,
            cost.working_bytes + max(0, kept),
            cost.working_bytes + max(0, -kept),
            str(action.microbatch),
        )
        self.last_compute[rank] = self.compute_tasks[product(action)] = self._append(task)

    def _send(self, rank: int, action: Action) -> None:
        cost = self.costs[action.stage]
        forward = action.kind == ActionKind.SEND_FORWARD
        carried = action.stage, ActionKind.FORWARD if forward else ActionKind.BACKWARD, action.microbatch
        to = self.schedule.placement[action.stage + 1 if forward else action.stage - 1]
        seconds = cost.forward_send_seconds if forward else cost.backward_send_seconds
        # The receiver posts receives in its own order, so the message waits for what the receiver issued before.
        needs = _indices([self.last_compute[rank], self.last_compute[to]])
        task = Task(str(action), _kind_name(action), LINK, (rank, to), seconds, needs)
        self.message_tasks[carried] = self._append(task)

    def _append(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def _kind_name(action: Action) -> str:
    """Return the kind of an action as text, such as `"input backward"`."""
    return action.kind.name.lower().replace("_", " ")


def _indices(needs: Iterable[int | None]) -> tuple[int, ...]:
    """Return the indices of the required tasks, each once, in order."""
    return tuple(sorted({need for need in needs if need is not None}))


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated step.

    Attributes:
        schedule: the order of the computations.
        tasks: the tasks of the step.
        starts, ends: seconds from the beginning, one per task.
        seconds: the length of the step.
        idle: for every rank, the fraction of the step in which it does not compute.
        memory: for every rank, pairs of a time in seconds and the bytes that it holds from then on, in order.
    """

    schedule: Schedule
    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float
    idle: tuple[float, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they do not compute."""
        return sum(self.idle) / len(self.idle)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that every rank holds at once."""
        return tuple(max(held for _, held in moments) for moments in self.memory)


def simulate(schedule: Schedule, costs: Sequence[StageCosts], contention: float = 0.0) -> Simulation:
    """Run the tasks of a step.

    Args:
        schedule: the order on every rank.
        costs: one per stage.
        contention: seconds by which one second of communication slows down concurrent compute: `Cluster.contention`.

    Raises:
        PipelineError: as for `step_tasks`.
    """
    tasks = step_tasks(schedule, costs)
    times = replay_tasks(tasks, contention)
    computed = [0.0] * schedule.ranks
    # The times at which every rank's memory changes, with the bytes from then on. The computations of a rank run one
    # after another, in index order, so its times are sorted.
    rest = rest_bytes(costs, schedule.placement, schedule.microbatches)
    memory = [[(0.0, held)] for held in rest]
    for task, start, end in zip(tasks, times.starts, times.ends, strict=True):
        if task.stream == COMPUTE:
            computed[task.ranks[0]] += end - start
        for moment, more in ((start, task.takes), (end, -task.frees)):
            if more:
                moments = memory[task.ranks[0]]
                moments.append((moment, moments[-1][1] + more))
    idle = tuple(1.0 - seconds / times.seconds if times.seconds else 0.0 for seconds in computed)
    return Simulation(schedule, tasks, times.starts, times.ends, times.seconds, idle, memory=tuple(map(tuple, memory)))
