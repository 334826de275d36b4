"""A simulated step as a trace for Perfetto, or as an SVG element of a page without charts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from autoshard.simulate.events import Task
from autoshard.units import format_seconds

_KIND_COLOURS = {
    "forward": "#4263eb",
    "backward": "#2f9e44",
    "input backward": "#2f9e44",
    "weight backward": "#66a80f",
    "application": "#868e96",
    "reduction": "#c2255c",
    "send forward": "#f08c00",
    "send backward": "#f08c00",
}
_OTHER = "#0b7285"
_LEFT, _TOP, _ROW, _BAR, _STRIP, _LETTER = 70, 8, 44, 26, 8, 7.0
"""Pixels: left margin with the ranks' names, top margin, height of a rank's row, of its bar of compute and its strip of
communication, and the width of a letter."""
# Intervals of the time axis.
_TICKS = 8


def gantt(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float], width: int = 1200) -> str:
    """Return a simulated step as an SVG element that loads nothing else.

    Compute of a rank is a bar, with its label where there is room (a task graph's is the microbatch); communication is
    a strip below. The name of a task is a tooltip.

    Args:
        tasks: of all ranks.
        starts: seconds from the beginning, one per task.
        ends: likewise.
        width: of the picture, in pixels.
    """
    seconds = max(ends, default=0.0)
    # A step of no seconds has no time axis.
    scale = (width - _LEFT - 20) / seconds if seconds else 0.0
    ranks = sorted({rank for task in tasks for rank in task.ranks})
    rows = {rank: _TOP + _ROW * place for place, rank in enumerate(ranks)}
    bottom = _TOP + _ROW * len(ranks)
    # Nothing to draw of the others.
    timed = [row for row in zip(tasks, starts, ends, strict=True) if row[2] > row[1]]
    shapes = [_shape(task, start * scale, end * scale, rows[rank]) for task, start, end in timed for rank in task.ranks]
    names = [f'<text x="8" y="{top + 18}">rank {rank}</text>' for rank, top in rows.items()]
    ticks = [_tick(seconds * part / _TICKS, scale, bottom) for part in range(_TICKS + 1)] if seconds else []
    # In order of first appearance, without repeats: a set would order the legend anew in every run.
    kinds = dict.fromkeys(task.kind for task, _, _ in timed)
    parts = [*names, *ticks, *shapes, *_legend(kinds, bottom + 40)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 60}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _shape(task: Task, start: float, end: float, top: int) -> str:
    """Return the bar or the strip of a task on one rank, `start` and `end` in pixels."""
    # Communication is thin and below: it runs at the same time, and would hide the compute.
    computes = task.stream == "compute"
    y, height = (top, _BAR) if computes else (top + _BAR + 2, _STRIP)
    drawn = (
        f'<rect x="{_LEFT + start:.2f}" y="{y}" width="{end - start:.2f}" height="{height}" '
        f'fill="{_KIND_COLOURS.get(task.kind, _OTHER)}" stroke="white" stroke-width="0.5">'
        f"<title>{escape(f'{task.name}: {task.kind}')}</title></rect>"
    )
    # A label wider than its bar would run into the next one; the tooltip names the task in any case.
    if computes and task.label and end - start >= _LETTER * len(task.label) + 2:
        middle = _LEFT + (start + end) / 2
        drawn += f'<text x="{middle:.2f}" y="{y + 17}" text-anchor="middle" fill="white">{escape(task.label)}</text>'
    return drawn


def _tick(seconds: float, scale: float, bottom: int) -> str:
    x = _LEFT + seconds * scale
    return (
        f'<line x1="{x:.2f}" y1="{_TOP - 4}" x2="{x:.2f}" y2="{bottom}" stroke="#ddd"/>'
        f'<text x="{x:.2f}" y="{bottom + 14}" text-anchor="middle" fill="#666">{escape(format_seconds(seconds))}</text>'
    )


def _legend(kinds: Iterable[str], y: int) -> list[str]:
    drawn, x = [], float(_LEFT)
    for kind in kinds:
        drawn.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{_KIND_COLOURS.get(kind, _OTHER)}"/>')
        drawn.append(f'<text x="{x + 16}" y="{y}">{escape(kind)}</text>')
        x += 34 + _LETTER * len(kind)
    return drawn


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
            peers = [f"rank {peer}" for peer in task.ranks if peer != rank]
            key = rank, f"{task.stream} with {' and '.join(peers)}" if peers else task.stream
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


def _name(level: str, rank: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"name": f"{level}_name", "ph": "M", "pid": rank, "args": {"name": name}}
