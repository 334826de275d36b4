"""A simulated step of a pipeline as a trace that Perfetto and chrome://tracing load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from autoshard.simulate.task_events import Task

Memory = Sequence[Sequence[tuple[float, int]]]
"""For every rank, bytes from a moment on: pairs of seconds and bytes, in order."""


def trace(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float], memory: Memory = ()) -> str:
    """Return a simulated step in Chrome's trace format.

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
        # Both ranks of a message are busy with it, and viewers show a process each.
        for rank in task.ranks if end > start else ():
            key = rank, _thread(task, rank)
            if key not in threads:
                # Numbers of threads begin at 0 in each rank.
                threads[key] = sum(numbered == rank for numbered, _ in threads)
            # The format counts microseconds.
            span = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append({"name": task.name, "cat": task.kind, "ph": "X", "pid": rank, "tid": threads[key], **span})
    for rank, moments in enumerate(memory):
        for moment, bytes_held in moments:
            events.append({"name": "memory", "ph": "C", "pid": rank, "ts": moment * 1e6, "args": {"bytes": bytes_held}})
    names = [_name("process", rank, f"rank {rank}") for rank in sorted({rank for rank, _ in threads})]
    names += [_name("thread", rank, stream) | {"tid": thread} for (rank, stream), thread in threads.items()]
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def _thread(task: Task, rank: int) -> str:
    """Return the stream of a task as one of its ranks sees it."""
    peers = [f"rank {peer}" for peer in task.ranks if peer != rank]
    return f"{task.stream} with {' and '.join(peers)}" if peers else task.stream


def _name(level: str, rank: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"name": f"{level}_name", "ph": "M", "pid": rank, "args": {"name": name}}
