"""`Report`, the tree of a result, and `HasReport`, which renders it as text, notebook output and page."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from rich.console import Group

from autoshard.report import html, text
from autoshard.report.tree import Part, Section, to_data


class HasReport(ABC):
    """A result with a report, which it prints, shows in notebooks and writes as a web page."""

    __slots__ = ()

    @abstractmethod
    def report(self) -> Report:
        """Return the content of the result as a tree of titled rows and series."""

    def __str__(self) -> str:
        report = self.report()
        return text.plain(report.title, report.parts)

    def __rich__(self) -> Group:
        report = self.report()
        return text.renderable(report.title, report.parts)

    def _repr_html_(self) -> str:
        report = self.report()
        return html.notebook(report.title, report.parts)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str]) -> None: ...
    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write a self-contained web page with tables and charts.

        Args:
            path: the file to write; None to return the text.
        """
        return self.report().write_page(path)


@dataclass(frozen=True, slots=True)
class Report(HasReport):
    """A tree of facts, tables, notes and charts in sections.

    Attributes:
        title: the title of the report.
        parts: in order.
    """

    title: str
    parts: tuple[Part, ...]

    @staticmethod
    def of(title: str, parts: Iterable[Part]) -> Report:
        """Return a report with these parts; sections without content are dropped."""
        return Report(title, tuple(part for part in parts if not isinstance(part, Section) or part.parts))

    def report(self) -> Report:
        return self

    def write_page(self, path: str | os.PathLike[str] | None) -> str | None:
        """Write the web page to a file, or return its text if there is no path."""
        content = html.page(self.title or "autoshard", self.to_json())
        if path is None:
            return content
        Path(path).write_text(content, "utf-8")
        return None

    def to_json(self) -> str:
        """Return the tree as a JSON text: parts are objects with their `type`, without default fields."""
        return json.dumps(to_data(self), allow_nan=False, separators=(",", ":"))

    def details(self, summary: str = "Summary") -> tuple[Section, ...]:
        """Return the parts as sections for the page of another report; parts outside sections become one section."""
        outside = [part for part in self.parts if not isinstance(part, Section)]
        sections = [part for part in self.parts if isinstance(part, Section)]
        shown = (Section.detail(part.title, part.parts, is_folded=part.is_folded) for part in sections)
        return (Section.detail(summary, outside), *shown)
