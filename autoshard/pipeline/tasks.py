"""The task graph of a step of a pipeline (Rhino 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.errors import PipelineError
from autoshard.pipeline.actions import Action, Kind, Schedule
from autoshard.pipeline.costs import StageCosts, rest_bytes
from autoshard.pipeline.messages import Made, issue, made, needed
from autoshard.simulate.events import COMPUTE
from autoshard.simulate.task_events import Task

LINK = "link"
"""The stream of what two ranks send each other."""
REDUCTION = "reduction"
"""The stream of a rank's reductions of gradients over data-parallel ranks."""

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_BACKWARD: "input backward",
    Kind.WEIGHT_BACKWARD: "weight backward",
    Kind.SEND_FORWARD: "send forward",
    Kind.SEND_BACKWARD: "send backward",
    Kind.REDUCE: "reduction",
}
"""The kinds of tasks, beside "application"."""


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The tasks of one step on all ranks.

    Attributes:
        schedule: that they follow.
        tasks: computations, messages, reductions and applications; each needs only earlier ones.
        rest: bytes that every rank holds all the time, received messages included.
    """

    schedule: Schedule
    tasks: tuple[Task, ...]
    rest: tuple[int, ...]


def task_graph(schedule: Schedule, costs: Sequence[StageCosts]) -> TaskGraph:
    """The tasks of a step (Rhino 6.1): computations, messages, reductions of gradients, applications.

    Every rank computes in its schedule's order. What two ranks send each other goes over one link, in one order, as
    messages of one communicator do; a message leaves when what it carries is computed, what its receiver had to compute
    before it asked for it is through, and the link is free. Gradients of a stage are reduced once its last microbatch
    is through, and all are applied when the rank has computed everything and the stage's are reduced.

    Args:
        schedule: the order on every rank.
        costs: one per stage.

    Returns:
        The graph.

    Raises:
        PipelineError: there are not as many costs as stages, or the schedule can't be run.
    """
    if len(costs) != schedule.stages:
        raise PipelineError(
            f"schedule {schedule.name} has {schedule.stages} stages, and there are costs of {len(costs)}: one each is "
            f"needed."
        )
    builder = _Builder(schedule, costs)
    for rank, action in issue(schedule):
        builder.add(rank, action)
    builder.apply()
    return TaskGraph(schedule, tuple(builder.tasks), rest_bytes(schedule.placement, schedule.microbatches, costs))


class _Builder:
    """One pass over the actions of a step, as they are issued."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCosts]) -> None:
        self.schedule = schedule
        self.costs = costs
        self.tasks: list[Task] = []
        self.computed: list[int | None] = [None] * schedule.ranks  # the last computation of every rank
        self.made: dict[Made, int] = {}  # what a computation makes -> its task
        self.sent: dict[Made, int] = {}  # likewise -> the message with it
        self.reduced: dict[int, int] = {}

    def add(self, rank: int, action: Action) -> None:
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            self._send(rank, action)
        elif action.kind == Kind.REDUCE:
            seconds = self.costs[action.stage].reduction_seconds
            self.reduced[action.stage] = self._add(
                f"reduce {action.stage}", NAMES[action.kind], REDUCTION, (rank,), seconds, [self.computed[rank]]
            )
        elif action.kind not in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):  # a message is the task of its send
            needs = [
                self._provider(rank, need) for part in action.computations for need in needed(part, len(self.costs))
            ]
            for part in action.computations:
                self._compute(rank, part, needs)

    def apply(self) -> None:
        for stage, rank in enumerate(self.schedule.placement):
            seconds, held = self.costs[stage].application_seconds, self.costs[stage].application_bytes
            needs = [self.computed[rank], self.reduced[stage]]
            self._add(f"apply {stage}", "application", COMPUTE, (rank,), seconds, needs, held, held)

    def _compute(self, rank: int, action: Action, needs: Sequence[int | None]) -> None:
        cost = self.costs[action.stage]
        kept = cost.kept(action.kind)
        index = self._add(
            str(action),
            NAMES[action.kind],
            COMPUTE,
            (rank,),
            cost.seconds(action.kind),
            needs,
            cost.working_bytes + max(0, kept),
            cost.working_bytes + max(0, -kept),
            str(action.microbatch),
        )
        self.computed[rank] = self.made[made(action)] = index

    def _send(self, rank: int, action: Action) -> None:
        cost = self.costs[action.stage]
        forward = action.kind == Kind.SEND_FORWARD
        carried = action.stage, Kind.FORWARD if forward else Kind.BACKWARD, action.microbatch
        to = self.schedule.placement[action.stage + 1 if forward else action.stage - 1]
        seconds = cost.forward_send_seconds if forward else cost.backward_send_seconds
        needs = [self.computed[rank], self.computed[to]]
        self.sent[carried] = self._add(str(action), NAMES[action.kind], LINK, (rank, to), seconds, needs)

    def _provider(self, rank: int, need: Made) -> int:
        """The task after which a rank has what it needs: the computation, or the message from another rank."""
        return (self.made if self.schedule.placement[need[0]] == rank else self.sent)[need]

    def _add(
        self,
        name: str,
        kind: str,
        stream: str,
        ranks: tuple[int, ...],
        seconds: float,
        needs: Sequence[int | None],
        takes: int = 0,
        frees: int = 0,
        label: str = "",
    ) -> int:
        known = tuple(sorted({need for need in needs if need is not None}))
        self.tasks.append(Task(name, kind, stream, ranks, seconds, known, takes, frees, label))
        return len(self.tasks) - 1
