"""Reports as text: plain for `str`, coloured for a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

from rich import box
from rich import table as rich_table
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.containers import Lines
from rich.measure import Measurement
from rich.text import Text

from autoshard.report.tree import Column, Facts, Note, Part, Table, brief_parts

WIDTH = 120

_STYLES = {"plain": "", "bold": "bold", "dim": "dim", "code": ""}


class NameText(Text):
    """A dotted name that is wrapped after dots, not inside words, if it is too long for its column."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        # A dot is at the end of its line.
        longest = max(len(part) for part in re.split(r"(?<=\.)", self.plain))
        return Measurement(longest, len(self.plain))

    def wrap(self, console: Console, width: int, **how: Any) -> Lines:
        """Return the lines; a word longer than a line is wrapped as in any text."""
        if len(self.plain) <= width or "." not in self.plain:
            return super().wrap(console, width, **how)
        breaks: list[int] = []
        start = previous = 0
        for end in (match.end() for match in re.finditer(r"[^.]*\.?", self.plain) if match.group()):
            if end - start > width and previous > start:
                breaks.append(previous)
                start = previous
            previous = end
        return Lines(line for part in self.divide(breaks) for line in Text.wrap(part, console, width, **how))


def plain(title: str, parts: Iterable[Part], width: int = WIDTH) -> str:
    """Return a report as text of limited width, without colours or trailing blanks."""
    # Independent of the widths and colours of the caller's terminal or notebook.
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False, emoji=False
    )
    with console.capture() as captured:
        console.print(renderable(title, parts))
    lines = "\n".join(line.rstrip() for line in captured.get().splitlines())
    # rich adds blank lines around tables.
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def renderable(title: str, parts: Iterable[Part]) -> Group:
    """Return a report for a rich console."""
    drawn: list[RenderableType] = [Text(title, style="bold")] if title else []
    above: Facts | Table | Note | None = None
    for part in brief_parts(parts):
        # A table already ends with a blank line.
        if isinstance(part, Note) and part.style == "bold" and drawn and not isinstance(above, Table):
            drawn.append(Text(""))
        drawn.append(_renderable(part))
        above = part
    return Group(*drawn)


def _renderable(part: Facts | Table | Note) -> RenderableType:
    match part:
        case Facts():
            return _facts(part)
        case Table():
            return _table(part)
    return Text(part.text, style=_STYLES[part.style])


def _facts(facts: Facts) -> rich_table.Table:
    table = rich_table.Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for fact in facts.rows:
        # As Text, because rich interprets brackets in strings as markup.
        table.add_row(Text(fact.label), Text(fact.text))
    return table


def _table(part: Table) -> rich_table.Table:
    table = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(part.columns):
        is_number = column.kind == "number"
        # Words such as "all_reduce" are not wrapped; names and sentences share the remaining width.
        is_word = not any(sign in row[number] for row in part.rows for sign in " .")
        whole = is_number or column.kind == "placement" or (column.kind == "text" and is_word)
        table.add_column(Text(column.label), justify="right" if is_number else "left", no_wrap=whole, overflow="fold")
    for row in part.first_rows:
        table.add_row(*(_cell(cell, column) for cell, column in zip(row, part.columns, strict=True)))
    return table


def _cell(cell: str, column: Column) -> Text:
    # As Text here, too: names of strategies contain brackets.
    text = NameText(cell) if column.kind == "name" else Text(cell)
    if column.kind == "placement":
        # Highlight sharded and partial placements among replicated ones.
        text.highlight_regex(r"^S\(.*", "cyan")
        text.highlight_regex(r"^P\(.*", "magenta")
    return text
