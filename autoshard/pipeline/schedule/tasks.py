"""The task graph of a step of a pipeline (Rhino 6.1).

Simulation of a pipeline step: its seconds, its bubble, and the memory of every rank over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import Action, ActionKind, Product, Schedule, issue, product, required_products
from autoshard.pipeline.schedule.costs import StageCosts, rest_bytes
from autoshard.simulate.events import COMPUTE
from autoshard.simulate.task_events import Task, replay_tasks

LINK = "link"
"""Stream of the messages between two ranks."""
REDUCTION = "reduction"
"""Stream of a rank's reductions of gradients over data-parallel ranks."""

KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_BACKWARD: "input backward",
    ActionKind.WEIGHT_BACKWARD: "weight backward",
    ActionKind.SEND_FORWARD: "send forward",
    ActionKind.SEND_BACKWARD: "send backward",
    ActionKind.REDUCE: "reduction",
}
"""Names of the kinds of tasks, beside "application"."""


@dataclass(frozen=True, slots=True)
class StepTaskGraph:
    """The tasks of one step on all ranks.

    Attributes:
        schedule: the order of the computations.
        tasks: computations, messages, reductions and applications; each needs only earlier ones.
        rest: bytes that every rank holds during the whole step, receive buffers included.
    """

    schedule: Schedule
    tasks: tuple[Task, ...]
    rest: tuple[int, ...]


def step_task_graph(schedule: Schedule, costs: Sequence[StageCosts]) -> StepTaskGraph:
    """Build the tasks of a step: computations, messages, reductions of gradients, applications.

    Args:
        schedule: the order on every rank.
        costs: one per stage.

    Returns:
        The graph.

    Raises:
        PipelineError: the number of costs is not the number of stages, or the schedule can't be run.

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
    return StepTaskGraph(schedule, tuple(builder.tasks), rest_bytes(schedule.placement, schedule.microbatches, costs))


class _TaskBuilder:
    """One pass over the actions of a step, as they are issued."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCosts]) -> None:
        self.schedule = schedule
        self.costs = costs
        self.tasks: list[Task] = []
        self.last_compute: list[int | None] = [None] * schedule.ranks  # the last computation of every rank
        self.compute_tasks: dict[Product, int] = {}
        self.message_tasks: dict[Product, int] = {}
        self.reduction_tasks: dict[int, int] = {}

    def add(self, rank: int, action: Action) -> None:
        if action.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD):
            self._send(rank, action)
        elif action.kind == ActionKind.REDUCE:
            name, seconds = f"reduce {action.stage}", self.costs[action.stage].reduction_seconds
            needs = _indices([self.last_compute[rank]])
            task = Task(name, KIND_NAMES[action.kind], REDUCTION, (rank,), seconds, needs)
            self.reduction_tasks[action.stage] = self._append(task)
        elif action.kind not in (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD):  # part of the send's task
            needs = _indices(
                self._providing_task(rank, need)
                for part in action.computations
                for need in required_products(part, len(self.costs))
            )
            for part in action.computations:
                self._compute(rank, part, needs)

    def apply(self) -> None:
        # A stage's gradients are applied when its rank has computed everything and they are reduced.
        for stage, rank in enumerate(self.schedule.placement):
            seconds, held = self.costs[stage].application_seconds, self.costs[stage].application_bytes
            needs = _indices([self.last_compute[rank], self.reduction_tasks[stage]])
            self._append(Task(f"apply {stage}", "application", COMPUTE, (rank,), seconds, needs, held, held))

    def _compute(self, rank: int, action: Action, needs: tuple[int, ...]) -> None:
        cost = self.costs[action.stage]
        kept = cost.memory_change(action.kind)
        task = Task(
            str(action),
            KIND_NAMES[action.kind],
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
        # The receiver posts its receive in its own order: the message waits for what the receiver issued before.
        needs = _indices([self.last_compute[rank], self.last_compute[to]])
        task = Task(str(action), KIND_NAMES[action.kind], LINK, (rank, to), seconds, needs)
        self.message_tasks[carried] = self._append(task)

    def _providing_task(self, rank: int, need: Product) -> int:
        """Return the task after which a rank has a result: the computation, or the message from another rank."""
        return (self.compute_tasks if self.schedule.placement[need[0]] == rank else self.message_tasks)[need]

    def _append(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def _indices(needs: Iterable[int | None]) -> tuple[int, ...]:
    """Return the tasks that are needed, each once, in order."""
    return tuple(sorted({need for need in needs if need is not None}))


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated step.

    Attributes:
        graph: its tasks.
        starts: seconds from the beginning, one per task.
        ends: likewise.
        seconds: of the step.
        idle: for every rank the share of the step in which it does not compute.
        memory: for every rank pairs of a moment, in seconds, and the bytes that it holds from then on, in order.
    """

    graph: StepTaskGraph
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float
    idle: tuple[float, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        return sum(self.idle) / len(self.idle)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that every rank holds at once."""
        return tuple(max(held for _, held in moments) for moments in self.memory)


def simulate(graph: StepTaskGraph, contention: float = 0.0) -> Simulation:
    """Run the tasks of a step.

    Args:
        graph: the tasks.
        contention: seconds that a second of communication costs the computation beside it: `Cluster.contention`.

    Returns:
        The seconds and bytes of every rank.
    """
    times = replay_tasks(graph.tasks, contention)
    computed = [0.0] * graph.schedule.ranks
    for task, start, end in zip(graph.tasks, times.starts, times.ends, strict=True):
        if task.stream == COMPUTE:
            computed[task.ranks[0]] += end - start
    idle = tuple(1.0 - seconds / times.seconds if times.seconds else 0.0 for seconds in computed)
    return Simulation(graph, times.starts, times.ends, times.seconds, idle, _memory(graph, times.starts, times.ends))


def _memory(
    graph: StepTaskGraph, starts: Sequence[float], ends: Sequence[float]
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Return for every rank the moments at which its memory changes, with the bytes that it holds from then on."""
    moments = [[(0.0, rest)] for rest in graph.rest]
    # The computations of a rank run one after another, in the order of their indices.
    for index, task in enumerate(graph.tasks):
        for moment, more in ((starts[index], task.takes), (ends[index], -task.frees)):
            if more:
                rank_moments = moments[task.ranks[0]]
                rank_moments.append((moment, rank_moments[-1][1] + more))
    return tuple(map(tuple, moments))
