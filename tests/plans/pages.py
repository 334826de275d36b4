"""Pages of plans, read again: their text, and the figures that they hold as data."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Text, attributes and figures of a page, whose tags must close in the order in which they open.

    Attributes:
        words: pieces of text.
        links: values of `href` and `src`.
        figures: name of a figure -> its data.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: list[str] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self._open: list[str] = []
        self._figure = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "figure":
            self._figure = (values["id"] or "").removeprefix("chart-")
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "figure" in self._open and self._open[-1] == "script":
            self.figures[self._figure] = json.loads(data)
        elif self._open[-1:] != ["script"]:
            self.words.append(data)
