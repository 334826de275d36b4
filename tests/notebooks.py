"""What a notebook shows of an object: its HTML, read again."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from typing import Any

_BLOCKS = {"div", "table", "caption", "tr", "th", "td"}


class NotebookPage(HTMLParser):
    """Text, tags and attributes of a piece of HTML whose tags must close in the order in which they open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.styles: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)
        self.styles += [value or "" for name, value in attrs if name == "style"]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        self.text += "\n" if tag in _BLOCKS else ""

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "tr" in self._open:
            self.rows[-1][-1] += data


def shown(thing: Any) -> NotebookPage:
    """Return what a notebook shows of an object, which must be all that `str` says, in a page of its own colours."""
    page = NotebookPage(thing._repr_html_())
    # `str` wraps lines, so that words of cells stand elsewhere: letters are compared.
    assert _letters(page.text) == _letters(str(thing))
    assert page.attributes == {"style"}
    assert not any(name in style for style in page.styles for name in ("background", "url(", "color: black"))
    return page


def check_repr(thing: object) -> None:
    """Check that a prompt shows an object as one short line."""
    text = repr(thing)
    assert text.startswith(f"{type(thing).__name__}(")
    assert text.endswith(")")
    assert "\n" not in text
    assert len(text) < 160


def _letters(text: str) -> Counter[str]:
    return Counter("".join(text.replace("─", "").split()))
