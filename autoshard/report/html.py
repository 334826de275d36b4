"""Reports as HTML: a fragment for notebooks, through the method `_repr_html_`, and web pages.

All text is escaped, and nothing is loaded. In notebooks, text has the colour of the surrounding page, the few other
colours are readable on light and dark pages, and styles are inline, so that the page's own do not change. A web page is
one static viewer.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources

from autoshard.report.tree import Column, Facts, Kind, Note, Part, Table, brief_parts

# Notebook pages are light or dark without telling which: these have a contrast above 4 on white and on #111.
_COLOURS = {"S": "color: #0b8294", "P": "color: #b14fc4"}
_BOLD = "font-weight: 600"
_STYLES = {"plain": "", "bold": _BOLD, "dim": "opacity: .7", "code": "font-family: monospace"}


def notebook(title: str, parts: Iterable[Part]) -> str:
    """Return a report as an HTML fragment."""
    heading = [Note(title, "bold")] if title else []
    return f'<div style="overflow-x: auto">{"".join(map(_part, (*heading, *brief_parts(parts))))}</div>'


def _part(part: Facts | Table | Note) -> str:
    match part:
        case Facts():
            return _grid("", ([_cell(row.label, "text", _BOLD), _cell(row.text, "text")] for row in part.rows))
        case Table():
            rows = ([_content(*cell) for cell in zip(row, part.columns, strict=True)] for row in part.first_rows)
            line = f"border-bottom: 1px solid #8888; {_BOLD}"
            head = "".join(_cell(column.label, column.kind, line, "th") for column in part.columns)
            return _grid(f"<thead><tr>{head}</tr></thead>", rows)
    # An empty text is an empty line.
    style = "; ".join(filter(None, ("white-space: pre-wrap; min-height: 1em", _STYLES[part.style])))
    return f'<div style="{style}">{escape(part.text)}</div>'


def _grid(head: str, rows: Iterable[list[str]]) -> str:
    body = "".join(f"\n<tr>{''.join(row)}</tr>" for row in rows)
    style = "border-collapse: collapse; margin: 0 0 1em 0; color: inherit"
    return f'<table style="{style}">{head}<tbody>{body}</tbody></table>'


def _content(cell: str, column: Column) -> str:
    return _cell(cell, column.kind, _COLOURS.get(cell[:1], "") if column.kind == "placement" else "")


def _cell(text: str, kind: Kind, style: str = "", tag: str = "td") -> str:
    # By default, notebooks align cells to the right and shorten long ones.
    styles = (
        "padding: .2em .8em .2em 0",
        f"text-align: {'right' if kind == 'number' else 'left'}",
        "vertical-align: top",
        f"white-space: {'pre' if kind in ('number', 'placement') else 'pre-wrap'}",
        "max-width: 60em",
        *filter(None, [style]),
    )
    return f'<{tag} style="{"; ".join(styles)}">{escape(text)}</{tag}>'


# Nothing is loaded from elsewhere.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def page(title: str, tree: str) -> str:
    """Return the web page of a report: one static viewer, which draws the embedded JSON tree.

    Args:
        title: the title of the page, as plain text.
        tree: the report as JSON.
    """
    # In a script element, only the end tag is special.
    data = tree.replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_file('page.css')}</style>\n</head>\n<body>\n"
        f"<noscript>This page draws its tables and charts by a script of its own: allow it to run.</noscript>\n"
        f'<script type="application/json" id="report">{data}</script>\n<script>{_file("page.js")}</script>\n'
        f"</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return resources.files("autoshard.report").joinpath("viewer", name).read_text("utf-8")
