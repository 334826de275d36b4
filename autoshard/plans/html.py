"""Web pages in one file that loads nothing: sections, tables, and figures that an embedded plotly.js draws.

A figure is data for plotly.js, in which colours are names of the page's style (`"var(--forward)"`), so that one figure
is drawn on light and dark pages. Without plotly the page has its tables alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class View:
    """One of the drawings that a figure can show.

    Attributes:
        label: of the button that shows it.
        data: traces of plotly.js.
        layout: of plotly.js.
    """

    label: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing, with buttons where it has several views or ranges.

    Attributes:
        name: of the figure, unique in its page.
        label: its content in words, for readers who do not see it.
        views: at least one.
        height: in pixels.
        caption: a sentence below it.
        ranges: label of a button -> the part of the x axis that it shows; the first one is the whole.
        group: figures of one group show the same part of the x axis.
        fallback: HTML in its place where plotly is not installed.
    """

    name: str
    label: str
    views: tuple[View, ...]
    height: int
    caption: str = ""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    group: str = ""
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Parts of a page that are folded up below a line of text; `anchor` is where links lead."""

    summary: str
    parts: Sequence[Part]
    anchor: str = ""


Part = str | Figure | Fold
"""HTML, a figure, or parts that are folded up."""


@dataclass(frozen=True, slots=True)
class Section:
    """Parts of a page below a title, which is plain text and no other section's; left out where it has no content."""

    title: str
    parts: Sequence[Part]


class HasPage(ABC):
    """An object that can be written as a web page."""

    __slots__ = ()

    @abstractmethod
    def _page(self) -> str:
        """Return the text of the page."""

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str]) -> None: ...
    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write a web page that loads nothing else, with charts where plotly is installed (`autoshard[html]`).

        Args:
            path: the file to write, of about 5 MB with charts; None to return the text.
        """
        return write_page(self._page(), path)


def write_page(text: str, path: str | os.PathLike[str] | None) -> str | None:
    """Write the text of a page to a file, or return it where there is no path."""
    if path is None:
        return text
    Path(path).write_text(text, "utf-8")
    return None


def document(title: str, lead: str, sections: Iterable[Section]) -> str:
    """Return an HTML page.

    Args:
        title: plain text.
        lead: HTML below the title, in front of the sections.
        sections: of the page.
    """
    sections = list(sections)
    has_figures = any(_has_figures(section.parts) for section in sections)
    script = _plotly() if has_figures else ""
    contents = {section.title: _parts(section.parts, drawn=bool(script)) for section in sections}
    contents = {title: content for title, content in contents.items() if content}
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title in contents)
    body = "\n".join(
        f'<section id="{_anchor(title)}">\n<h2>{escape(title)}</h2>\n{content}\n</section>'
        for title, content in contents.items()
    )
    note = f'<p class="note">{escape(_NO_PLOTLY)}</p>' if has_figures and not script else ""
    # The script of the page draws what the figures' data describe, so it comes behind them.
    scripts = f"<script>{script}</script>\n<script>{_file('page.js')}</script>\n" if script else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_file('page.css')}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n{lead}\n</header>\n"
        f'<nav aria-label="Sections">{links}</nav>\n<main>\n{note}\n{body}\n</main>\n{scripts}</body>\n</html>\n'
    )


# Nothing is loaded from anywhere; `blob:` and `data:` are pictures that a reader saves.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_NO_PLOTLY = (
    "This page has no charts, for it was made where plotly is not installed: pip install 'autoshard[html]' and make it "
    "again."
)


def _plotly() -> str:
    """Return the script of plotly.js; empty where plotly is not installed."""
    if importlib.util.find_spec("plotly") is None:
        return ""
    # Imported here: it is an optional dependency, and most plans are never a page.
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


def _file(name: str) -> str:
    return resources.files("autoshard.plans").joinpath("page", name).read_text("utf-8")


def _has_figures(parts: Iterable[Part]) -> bool:
    return any(isinstance(part, Figure) or (isinstance(part, Fold) and _has_figures(part.parts)) for part in parts)


def _parts(parts: Iterable[Part], drawn: bool) -> str:
    return "\n".join(filter(None, (_part(part, drawn) for part in parts)))


def _part(part: Part, drawn: bool) -> str:
    match part:
        case Figure():
            return _figure(part) if drawn else part.fallback
        case Fold():
            anchor = f' id="{escape(part.anchor)}"' if part.anchor else ""
            return (
                f"<details{anchor}><summary>{escape(part.summary)}</summary>\n{_parts(part.parts, drawn)}\n</details>"
            )
    return part


def _figure(figure: Figure) -> str:
    data = {
        "views": [{"label": view.label, "data": view.data, "layout": view.layout} for view in figure.views],
        "ranges": [[label, list(ends)] for label, ends in figure.ranges.items()],
        "group": figure.group,
    }
    # Inside a script, text may hold all but the end of the script.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    return (
        f'<figure class="chart" id="chart-{escape(figure.name)}"><div class="tools"></div>'
        f'<div class="plot" tabindex="0" role="group" aria-roledescription="chart" aria-label="{escape(figure.label)}" '
        f'style="height: {figure.height}px"></div>{caption}<script type="application/json">{text}</script></figure>'
    )


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def cards(figures: Iterable[tuple[str, str, str]], alarms: Container[str] = ()) -> str:
    """Return the key figures at the head of a page: label, value, and a note below it; red where it is an alarm."""
    items = "".join(
        f"<div{' class=alarm' if label in alarms else ''}><dt>{escape(label)}</dt><dd>{escape(value)}</dd>"
        f"<dd class=note>{escape(note)}</dd></div>"
        for label, value, note in figures
    )
    return f'<dl class="cards">{items}</dl>'


def facts_table(lines: Iterable[tuple[str, str]]) -> str:
    """Return labels and values as an HTML table without a head."""
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in lines)
    return f'<div class="wide"><table class="facts">{rows}</table></div>'


def text_table(labels: Sequence[str], rows: Iterable[Sequence[str]], texts: Container[str] = ()) -> str:
    """Return rows of plain texts as an HTML table; columns hold numbers, other than those whose labels are `texts`."""
    head = [(label, label not in texts) for label in labels]
    body = (
        [text_cell(cell) if label in texts else number_cell(cell) for label, cell in zip(labels, row, strict=True)]
        for row in rows
    )
    return table(head, body)


def table(head: Iterable[tuple[str, bool]], body: Iterable[Iterable[str]]) -> str:
    """Return a table of titles, each with True if its column holds numbers, and of rows of cells."""
    titles = "".join(f"<th{' class=number' if number else ''}>{escape(text)}</th>" for text, number in head)
    rows = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in body)
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def text_cell(text: str) -> str:
    """Return a cell of plain text."""
    return f"<td>{escape(text)}</td>"


def code_cell(text: str, css_class: str = "") -> str:
    """Return a cell of a name."""
    return f"<td><code{f' class={css_class}' if css_class else ''}>{escape(text)}</code></td>"


def number_cell(text: str) -> str:
    """Return a cell of an amount."""
    return f'<td class="number">{escape(text)}</td>'
