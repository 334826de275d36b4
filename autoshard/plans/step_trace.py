"""The predicted step as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import PlanError
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.step_replay import CollectiveSpan, ComputeSpan
from autoshard.simulate.events import COMPUTE, Task
from autoshard.units import format_bytes

Memory = Sequence[Sequence[tuple[float, int]]]
"""For every rank, the bytes held from a time on: pairs of seconds and bytes, in order."""


def trace(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float], memory: Memory = ()) -> str:
    """Return a simulated step in Chrome's trace format.

    A rank is a process and its streams are threads; a message is on threads of both its ranks. Tasks that take no time
    are omitted.

    Args:
        tasks: the tasks of all ranks.
        starts: seconds from the beginning, one per task.
        ends: likewise, the ends.
        memory: the memory of every rank, drawn as a counter.

    Returns:
        The text of a `.json` file: `traceEvents` with times in microseconds.
    """
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}
    for task, start, end in zip(tasks, starts, ends, strict=True):
        # Both ranks of a message are busy with it, and viewers show one process each.
        for rank in task.ranks if end > start else ():
            peers = [f"rank {peer}" for peer in task.ranks if peer != rank]
            key = rank, f"{task.stream} with {' and '.join(peers)}" if peers else task.stream
            if key not in threads:
                # Thread numbers start at 0 in each rank.
                threads[key] = sum(numbered == rank for numbered, _ in threads)
            # The format uses microseconds.
            span = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append({"name": task.name, "cat": task.kind, "ph": "X", "pid": rank, "tid": threads[key], **span})
    for rank, moments in enumerate(memory):
        for moment, bytes_held in moments:
            events.append({"name": "memory", "ph": "C", "pid": rank, "ts": moment * 1e6, "args": {"bytes": bytes_held}})
    names = [_name("process", rank, f"rank {rank}") for rank in sorted({rank for rank, _ in threads})]
    names += [_name("thread", rank, stream) | {"tid": thread} for (rank, stream), thread in threads.items()]
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def _name(level: str, rank: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"name": f"{level}_name", "ph": "M", "pid": rank, "args": {"name": name}}


@dataclass(frozen=True, slots=True)
class StepTasks:
    """The calls of a step on one rank, which represents all.

    Attributes:
        tasks: compute of operators, named by module and operator, with the half of the step as its kind; and
            collectives, on one stream per mesh axis.
        starts, ends: seconds from the beginning of the step, one per task.
        memory: bytes that the rank holds from a time on: pairs of seconds and bytes, in order.
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
    """Return the bytes of all kinds whenever they change, at the start times of operators, in seconds."""
    moments = len(plan.choices)
    starts: dict[int, float] = {}
    for span in plan.step_replay.compute:
        starts.setdefault(span.moment, span.start)
    held = [sum(amounts) for amounts in zip(*plan.step_replay.bytes_by_kind(moments).values(), strict=True)]
    changes: list[tuple[float, int]] = []
    seconds = 0.0
    for moment, amount in enumerate(held):
        # Operators that take no time, such as views, start with the previous one. Reordered calls may start before
        # operators that precede them in the plan.
        seconds = max(seconds, starts.get(moment, seconds))
        if not changes or changes[-1][1] != amount:
            changes.append((seconds, amount))
    return tuple(changes)
