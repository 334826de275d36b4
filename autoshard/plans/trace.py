"""What the ranks of a pipeline do in a step, as a trace that Perfetto and chrome://tracing load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.simulate.task_events import Task

Memory = Sequence[Sequence[tuple[float, int]]]
"""For every rank, bytes from a moment on: pairs of seconds and bytes, in order."""


def trace(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float], memory: Memory = ()) -> str:
    """A simulated step in Chrome's trace format.

    A rank is a process and a stream of it a thread; a message is on the threads of both of its ranks. Tasks that take
    no time are left out.

    Args:
        tasks: of all ranks.
        starts: seconds from the beginning, one per task.
        ends: likewise.
        memory: of every rank, drawn as a counter.

    Returns:
        The text of a `.json` file: `traceEvents` with times in microseconds.
    """
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}
    for task, start, end in zip(tasks, starts, ends, strict=True):
        for rank in task.ranks if end > start else ():
            key = rank, _thread(task, rank)
            if key not in threads:
                threads[key] = sum(known == rank for known, _ in threads)
            events.append(
                {
                    "name": task.name,
                    "cat": task.kind,
                    "ph": "X",
                    "pid": rank,
                    "tid": threads[key],
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                }
            )
    for rank, moments in enumerate(memory):
        for moment, held in moments:
            counted = {"name": "memory", "ph": "C", "pid": rank, "ts": moment * 1e6, "args": {"bytes": held}}
            events.append(counted)
    return json.dumps({"traceEvents": [*_names(threads), *events], "displayTimeUnit": "ms"})


def _thread(task: Task, rank: int) -> str:
    """The stream of a task as one of its ranks sees it."""
    others = [f"rank {other}" for other in task.ranks if other != rank]
    return f"{task.stream} with {' and '.join(others)}" if others else task.stream


def _names(threads: dict[tuple[int, str], int]) -> list[dict[str, Any]]:
    """What processes and threads are called."""
    said = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({rank for rank, _ in threads})
    ]
    for (rank, name), thread in threads.items():
        said.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
    return said
