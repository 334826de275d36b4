"""Tables of rich as text: plain for `str`, and as HTML for notebooks."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.containers import Lines
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

WIDTH = 120

# Pages of notebooks are light or dark and do not say which: these have a contrast above 4 on white and on #111.
_COLOURS = {"cyan": "#0b8294", "magenta": "#b14fc4"}


class NameText(Text):
    """A dotted name, which breaks behind dots where it is too long for its column, and not inside of a word."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        # A dot stands at the end of its line.
        longest = max(len(part) for part in re.split(r"(?<=\.)", self.plain))
        return Measurement(longest, len(self.plain))

    def wrap(self, console: Console, width: int, **how: Any) -> Lines:
        """Return the lines; of a word that is longer than a line, as of any text."""
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


def plain(parts: Iterable[RenderableType], width: int) -> str:
    """Return tables as text of limited width, without colours or trailing blanks."""
    console = _console(width)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    # rich pads tables with blank lines of its own.
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def html(*parts: RenderableType) -> str:
    """Return tables and texts as HTML, for the method `_repr_html_` by which notebooks show objects.

    All text is escaped, and nothing is loaded. Text has the colour of the page that it is put in, and the few other
    colours can be read on light and on dark pages. Styles are those of each element, so that the page keeps its own.

    Args:
        parts: groups, tables, and texts, padded or not.

    Raises:
        TypeError: a part is of another type.
    """
    console = _console(WIDTH)
    return f'<div style="overflow-x: auto">{"".join(_block(part, console) for part in parts)}</div>'


def _console(width: int) -> Console:
    # Widths and colours of the caller's terminal or notebook must not change the text.
    return Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False, emoji=False
    )


def _block(part: object, console: Console) -> str:
    match part:
        case Group():
            return "".join(_block(inner, console) for inner in part.renderables)
        case Padding():
            return f'<div style="margin-left: {part.left}ch">{_block(part.renderable, console)}</div>'
        case Table():
            return _table(part, console)
        case Text() | str():
            # An empty text is an empty line.
            return f'<div style="white-space: pre-wrap; min-height: 1em">{_inline(part, console)}</div>'
    raise TypeError(f"no HTML for a {type(part).__name__}: pass groups, tables and texts of rich")


def _table(table: Table, console: Console) -> str:
    title, head = "", ""
    if table.title is not None:
        style = "caption-side: top; text-align: left; color: inherit; font-weight: 600"
        title = f'<caption style="{style}">{_inline(table.title, console)}</caption>'
    if table.show_header:
        line = "border-bottom: 1px solid #8888; font-weight: 600"
        cells = (_cell("th", column.header, column, console, line) for column in table.columns)
        head = f"<thead><tr>{''.join(cells)}</tr></thead>"
    rows = (
        "".join(_cell("td", cell, column, console) for cell, column in zip(row, table.columns, strict=True))
        for row in zip(*(column.cells for column in table.columns), strict=True)
    )
    body = "".join(f"\n<tr>{row}</tr>" for row in rows)
    style = "border-collapse: collapse; margin: 0 0 1em 0; color: inherit"
    return f'<table style="{style}">{title}{head}<tbody>{body}</tbody></table>'


def _cell(tag: str, content: RenderableType, column: Column, console: Console, style: str = "") -> str:
    # Notebooks align cells to the right, and shorten long ones, unless told otherwise.
    styles = (
        "padding: .2em .8em .2em 0",
        f"text-align: {'right' if column.justify == 'right' else 'left'}",
        "vertical-align: top",
        f"white-space: {'pre' if column.no_wrap else 'pre-wrap'}",
        "max-width: 60em",
        *filter(None, (style, _css(console.get_style(column.style)))),
    )
    return f'<{tag} style="{"; ".join(styles)}">{_inline(content, console)}</{tag}>'


def _inline(content: object, console: Console) -> str:
    """Return a text with its styles; a string is markup, as it is to rich."""
    text = console.render_str(content, highlight=False) if isinstance(content, str) else content
    if not isinstance(text, Text):
        raise TypeError(f"no HTML for a cell that is a {type(text).__name__}: pass a text of rich")
    # `assemble` makes the style of the whole text one of its spans, which are all that `render` looks at.
    segments = Text.assemble(text).render(console, end="")
    return "".join(_span(segment.text, _css(segment.style)) for segment in segments)


def _span(text: str, css: str) -> str:
    return f'<span style="{css}">{escape(text)}</span>' if css else escape(text)


def _css(style: Style | None) -> str:
    """Return a style as CSS; colours that are not known to fit all pages are left out."""
    if style is None:
        return ""
    colour = _COLOURS.get(style.color.name, "") if style.color is not None else ""
    weight = ("font-weight: 600" if style.bold else "", "opacity: .7" if style.dim else "")
    return "; ".join(filter(None, (f"color: {colour}" if colour else "", *weight)))
