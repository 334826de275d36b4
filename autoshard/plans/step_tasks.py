"""The predicted step of a plan as the tasks of one rank, for traces."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.errors import PlanError
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.step_replay import CollectiveSpan, ComputeSpan
from autoshard.simulate.events import COMPUTE, Task
from autoshard.units import format_bytes


@dataclass(frozen=True, slots=True)
class StepTasks:
    """The calls of a step on one rank, which stands for all.

    Attributes:
        tasks: compute of operators, named by module and operator, its kind the half of the step; and collectives, on a
            stream for each mesh axis.
        starts, ends: seconds from the beginning of the step, one per task.
        memory: bytes that the rank holds from a moment on: pairs of seconds and bytes, in order.
    """

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    memory: tuple[tuple[float, int], ...]

    @staticmethod
    def of(plan: PlanContents) -> StepTasks:
        """Return the tasks of a plan's step.

        Raises:
            PlanError: the plan is from a file of an older version, which does not have the calls of the step.
        """
        replay = plan.step_replay
        if not replay.compute and plan.choices:
            raise PlanError(
                "this plan does not have the calls of its step, as files of older versions do not: make it again with "
                "autoshard.plan."
            )
        tasks = []
        for span in replay.compute:
            choice = plan.choices[span.moment]
            name = f"{choice.module}: {choice.operator}" if choice.module else choice.operator
            tasks.append(Task(name, choice.phase, COMPUTE, (0,), span.end - span.start))
        for sent in replay.collectives:
            module = plan.choices[sent.moment].module
            name = f"{sent.kind} of {format_bytes(sent.bytes)}{f' for {module}' if module else ''}"
            tasks.append(Task(name, sent.kind, f"communication on {sent.axis}", (0,), sent.end - sent.start))
        spans: list[ComputeSpan | CollectiveSpan] = [*replay.compute, *replay.collectives]
        return StepTasks(
            tuple(tasks), tuple(span.start for span in spans), tuple(span.end for span in spans), _memory(plan)
        )


def _memory(plan: PlanContents) -> tuple[tuple[float, int], ...]:
    """Return the bytes of all kinds whenever they change, at the seconds at which the operators start."""
    moments = len(plan.choices)
    starts: dict[int, float] = {}
    for span in plan.step_replay.compute:
        starts.setdefault(span.moment, span.start)
    held = [sum(amounts) for amounts in zip(*plan.step_replay.bytes_by_kind(moments).values(), strict=True)]
    changes: list[tuple[float, int]] = []
    seconds = 0.0
    for moment, amount in enumerate(held):
        # Operators that take no time, such as views, are where the one before them starts. Calls that are moved may
        # start before operators that stand before them in the plan.
        seconds = max(seconds, starts.get(moment, seconds))
        if not changes or changes[-1][1] != amount:
            changes.append((seconds, amount))
    return tuple(changes)
