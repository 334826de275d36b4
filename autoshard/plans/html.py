"""Pictures: a plan as an HTML page; a simulated step of a pipeline as an SVG, or as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from html import escape
from typing import Any

from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_text import (
    LEGEND,
    TensorRow,
    WorkRow,
    collective_rows,
    memory_parts,
    memory_text,
    operator_rows,
    peak_text,
    plan_tensors,
    summary,
)
from autoshard.simulate.events import Task
from autoshard.units import format_bytes, format_seconds

# The page loads nothing: it must open from a disk, in a mail and behind a strict content policy.
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --sharded: #0b7285; --partial: #9c36b5; }
@media (prefers-color-scheme: dark) { :root { --sharded: #66d9e8; --partial: #e599f7; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: .3rem .8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:hover { background: var(--soft); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
code { font: 13px ui-monospace, monospace; }
.sharded { color: var(--sharded); font-weight: 600; } .partial { color: var(--partial); font-weight: 600; }
.bar { display: flex; height: 1rem; max-width: 40rem; border-radius: 3px; overflow: hidden; }
.bar span { min-width: 1px; }
.legend span { margin-right: 1.2rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; border-radius: 2px; }
summary { cursor: pointer; }
"""
_COLOURS = ("#4263eb", "#f08c00", "#2f9e44", "#868e96", "#c2255c", "#0b7285", "#9c36b5", "#e8590c", "#5c940d")


def page(plan: PlanContents) -> str:
    """Return the plan as an HTML page that loads nothing else: summary, memory, placements, collectives, operators."""
    return document(f"Sharding plan: {plan.mesh}", plan_sections(plan))


def document(title: str, sections: Iterable[str]) -> str:
    """Return an HTML page of a title, which is plain text, and of sections, which are HTML."""
    title = escape(title)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def plan_sections(plan: PlanContents) -> list[str]:
    """Return the sections of a sharding plan as HTML: summary, memory, placements, collectives, operators."""
    return [
        facts_table(summary(plan)),
        f"<p>{escape(LEGEND)}</p>",
        _memory(plan),
        *(_tensors(f"{kind.capitalize()}s", rows, plan) for kind, rows in plan_tensors(plan).items()),
        _work("Collectives", ("collective", "axis", "phase"), collective_rows(plan.collectives), sized=True),
        _work("Operators", ("operator", "phase", "strategy"), operator_rows(plan.choices), sized=False),
    ]


def facts_table(lines: Iterable[tuple[str, str]]) -> str:
    """Return labels and values as an HTML table without a head."""
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in lines)
    return f"<table>{rows}</table>"


def text_table(labels: Sequence[str], rows: Iterable[Sequence[str]], texts: Container[str] = ()) -> str:
    """Return rows of plain texts as an HTML table; columns hold numbers, other than those whose labels are `texts`."""
    head = [(label, label not in texts) for label in labels]
    body = (
        [_cell(cell) if label in texts else _number(cell) for label, cell in zip(labels, row, strict=True)]
        for row in rows
    )
    return _table(head, body)


def _memory(plan: PlanContents) -> str:
    """Return a bar of the bytes of one device by kind, with its legend."""
    parts = memory_parts(plan.memory)
    coloured_parts = [
        (name, amount, _COLOURS[index % len(_COLOURS)]) for index, (name, amount) in enumerate(parts.items())
    ]
    if not coloured_parts:
        return ""
    # Shares of the bar are the bytes themselves, as flex factors: the browser does the division.
    bar = "".join(f'<span style="flex: {amount}; background: {colour}"></span>' for _, amount, colour in coloured_parts)
    legend = "".join(
        f'<span><i style="background: {colour}"></i>{name} {format_bytes(amount)}</span>'
        for name, amount, colour in coloured_parts
    )
    # The text of the peak goes on with the largest tensors, which are a table here.
    texts = (memory_text(plan), peak_text(plan.memory).partition(";")[0])
    lines = "".join(f"<p>{escape(text)}</p>" for text in texts if text)
    rows = [
        [_code(tensor.name), _cell(tensor.kind), _number(format_bytes(tensor.bytes))] for tensor in plan.memory.largest
    ]
    table = _table((("largest then", False), ("kind", False), ("bytes", True)), rows) if rows else ""
    return (
        f'<h2>Memory of one device</h2>\n{lines}\n<div class="bar">{bar}</div>\n<p class="legend">{legend}</p>\n{table}'
    )


def _tensors(title: str, rows: Sequence[TensorRow], plan: PlanContents) -> str:
    # A column in which every cell would be empty is left out.
    shaped, gathered = any(row.shape is not None for row in rows), any(row.gathered for row in rows)
    head = [
        ("name", False),
        ("count", True),
        *([("shape", False)] if shaped else []),
        *((axis, False) for axis in plan.mesh.names),
        *([("gathered", False)] if gathered else []),
    ]
    body = []
    for row in rows:
        shape = [_cell("x".join(map(str, row.shape)) if row.shape else "scalar")] if shaped else []
        how = [_cell(row.gathered)] if gathered else []
        body.append([_code(row.name), _number(str(row.count)), *shape, *map(_placement, row.placements), *how])
    return f"<h2>{title}</h2>\n{_table(head, body)}"


def _work(title: str, labels: Sequence[str], rows: Sequence[WorkRow], sized: bool) -> str:
    """Return a table of operators or collectives, folded up where it is long."""
    if not rows:
        return ""
    numbers = ("count", "bytes", "time") if sized else ("count", "time")
    head = [*((label, False) for label in (*labels, "module")), *((label, True) for label in numbers)]
    body = []
    for row in rows:
        size = [_number(format_bytes(row.bytes))] if sized else []
        texts = map(_code, (*row.labels, row.module or "(root)"))
        body.append([*texts, _number(str(row.count)), *size, _number(format_seconds(row.seconds))])
    table = _table(head, body)
    # About a screen.
    if len(rows) <= 30:
        return f"<h2>{title}</h2>\n{table}"
    return f"<h2>{title}</h2>\n<details><summary>{len(rows)} rows</summary>\n{table}\n</details>"


def _table(head: Iterable[tuple[str, bool]], body: Iterable[Iterable[str]]) -> str:
    """Return a table of titles, each with True if its column holds numbers, and of rows of cells."""
    titles = "".join(f"<th{' class=number' if number else ''}>{escape(text)}</th>" for text, number in head)
    rows = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in body)
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _code(text: str) -> str:
    return f"<td><code>{escape(text)}</code></td>"


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'


def _placement(text: str) -> str:
    # The colours of `plan_text`: sharded and partial placements stand out of replicated ones.
    kind = {"S": ' class="sharded"', "P": ' class="partial"'}.get(text[0], "")
    return f"<td><code{kind}>{escape(text)}</code></td>"


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
_LEFT, _TOP, _ROW, _BAR, _STRIP, _LETTER = 70, 40, 44, 26, 8, 7.0
"""Pixels: left margin with the ranks' names, top margin with the title, height of a rank's row, of its bar of compute
and its strip of communication, and the width of a letter."""
# Intervals of the time axis.
_TICKS = 8


def gantt(
    tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float], title: str = "", width: int = 1200
) -> str:
    """Return a simulated step as an SVG picture that loads nothing else.

    Compute of a rank is a bar, with its label where there is room (a task graph's is the microbatch); communication is
    a strip below. The name of a task is a tooltip.

    Args:
        tasks: of all ranks.
        starts: seconds from the beginning, one per task.
        ends: likewise.
        title: written above.
        width: of the picture, in pixels.

    Returns:
        The text of an `.svg` file.
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
    parts = [f'<text x="8" y="24" font-size="15">{escape(title)}</text>', *names, *ticks, *shapes]
    parts += _legend(kinds, bottom + 40)
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
