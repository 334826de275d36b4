"""A plan as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from autoshard.plans import plan_rows
from autoshard.plans.contents import PlanContents
from autoshard.plans.plan_rows import TensorRow, WorkRow
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
    summary = "".join(
        f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in plan_rows.summary(plan)
    )
    sections = [
        f"<table>{summary}</table>",
        f"<p>{escape(plan_rows.LEGEND)}</p>",
        _memory(plan),
        *(_tensors(f"{kind.capitalize()}s", rows, plan) for kind, rows in plan_rows.plan_tensors(plan).items()),
        _work("Collectives", ("collective", "axis", "phase"), plan_rows.collective_rows(plan.collectives), sized=True),
        _work("Operators", ("operator", "phase", "strategy"), plan_rows.operator_rows(plan.choices), sized=False),
    ]
    title = f"Sharding plan: {escape(str(plan.mesh))}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def _memory(plan: PlanContents) -> str:
    """Return a bar of the bytes of one device by kind, with its legend."""
    parts = plan_rows.memory_parts(plan.memory)
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
    texts = (plan_rows.memory_text(plan), plan_rows.peak_text(plan.memory).partition(";")[0])
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
