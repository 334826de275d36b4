"""Pages of reports, read again: their words and charts, from the tree that they hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any


class Page:
    """The report of a page.

    Attributes:
        words: texts of the report.
        links: addresses that it links to.
        tables: with their rows.
        charts: name of a chart -> its data.
    """

    def __init__(self, text: str) -> None:
        (data,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)
        assert not re.search(r"\b(src|href)=", text)
        self.report: dict[str, Any] = json.loads(data)
        parts = list(_objects(self.report))
        self.words = [value for part in parts for value in _texts(part)]
        self.links = [part["link"] for part in parts if "link" in part]
        self.tables = [part for part in parts if part["type"] == "Table"]
        self.charts = {part["name"]: part for part in parts if part["type"] == "Chart"}

    def series(self, chart: str, view: int = 0) -> list[dict[str, Any]]:
        """Return the series of a view of a chart."""
        found: list[dict[str, Any]] = self.charts[chart]["views"][view]["series"]
        return found


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item)


def _texts(part: dict[str, Any]) -> Iterator[str]:
    for name, value in part.items():
        if isinstance(value, str) and name not in ("type", "link"):
            yield value
        elif name == "rows" and part["type"] == "Table":
            for row in value:
                yield from row
