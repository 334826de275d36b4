"""The parts of a report: facts, tables, notes, bars and charts, in sections; plain data, independent of renderers.

Cells are texts. Numbers of charts are in seconds and bytes: the page chooses an axis's unit. Colours are names of the
page's style, such as `"forward"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

Kind = Literal["text", "name", "number", "placement"]
Unit = Literal["", "seconds", "bytes"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A labelled value.

    Attributes:
        label: the label of the value.
        value: the value as text.
        note: a remark, in parentheses in text.
        is_key: True for a key figure, shown at the top of the page.
        is_alarm: True if the page shows the fact in red.
    """

    label: str
    value: str
    note: str = ""
    is_key: bool = False
    is_alarm: bool = False

    @property
    def text(self) -> str:
        """The value and its note."""
        return f"{self.value} ({self.note})" if self.note else self.value


@dataclass(frozen=True, slots=True)
class Facts:
    """Labelled values; those without a value are dropped."""

    rows: tuple[Fact, ...]

    @staticmethod
    def of(rows: Iterable[Fact | tuple[str, str]]) -> Facts:
        """Return facts, made from facts or pairs of label and value."""
        facts = (row if isinstance(row, Fact) else Fact(*row) for row in rows)
        return Facts(tuple(fact for fact in facts if fact.value))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: of sentences and words, dotted names, numbers, or placements."""

    label: str
    kind: Kind = "text"


def texts(*labels: str) -> tuple[Column, ...]:
    """Return columns of sentences and words."""
    return tuple(Column(label) for label in labels)


def names(*labels: str) -> tuple[Column, ...]:
    """Return columns of names, which are wrapped after dots."""
    return tuple(Column(label, "name") for label in labels)


def numbers(*labels: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(label, "number") for label in labels)


Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells.

    Attributes:
        columns: the columns of every row.
        rows: one cell per column.
        rest: the row that summarises the rows after the first `most`, if a renderer omits them.
        most: rows shown in text; the page folds longer tables.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    rest: tuple[str, ...] = ()
    most: int = 30

    @staticmethod
    def of(columns: Sequence[Column], rows: Iterable[Row], *, rest: Row = (), most: int = 30) -> Table:
        """Return a table of rows of texts."""
        return Table(tuple(columns), tuple(map(tuple, rows)), tuple(rest), most)

    @property
    def first_rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows shown in text: all, or the first ones and the one that summarises the rest."""
        return (*self.rows[: self.most], self.rest) if self.rest else self.rows


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph: plain, bold, dim or code; `link` is its link address on the page."""

    text: str
    style: Literal["plain", "bold", "dim", "code"] = "plain"
    link: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a bar: its name, its amount as a number and as text, and its colour."""

    name: str
    amount: float
    text: str
    colour: str


@dataclass(frozen=True, slots=True)
class Bar:
    """Amounts that add up to a whole; the page draws them as one bar."""

    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a plot: numeric with a unit, or of categories.

    Attributes:
        title: the title of the axis, without its unit.
        unit: the unit of the amounts.
        categories: the category names in order; empty for a numeric axis.
        ends: the range shown at first; None for all.
        is_log: True for a logarithmic axis.
    """

    title: str = ""
    unit: Unit = ""
    categories: tuple[str, ...] = ()
    ends: tuple[float, float] | None = None
    is_log: bool = False


Place = str | float


@dataclass(frozen=True, slots=True)
class Series:
    """Points, lines or bars with one name and colour.

    Attributes:
        name: the name in the legend; empty for none.
        colour: the colour of all its items.
        kind: `"line"`, `"steps"` (constant until the next point), `"area"` (steps, stacked on previous areas),
            `"points"`, or `"bars"` along the numeric axis.
        x, y: the position of every point on each axis; for bars, the amount is their length.
        starts: for bars, where they begin; empty for 0, or for the end of the previous bars in a stacked plot.
        notes: shown when pointing at a point; several lines are allowed, with the first as title.
        labels: text at each point, or inside each bar if there is room.
        links: anchors of the sections that the points link to.
        pattern: 0 for plain bars, else the number of a hatching.
        is_dashed: True for a dashed line.
    """

    name: str
    colour: str
    kind: Literal["line", "steps", "area", "points", "bars"]
    x: tuple[Place, ...]
    y: tuple[Place, ...]
    starts: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    pattern: int = 0
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across a plot at a position on one axis, with a text."""

    axis: Literal["x", "y"]
    place: float
    text: str
    is_alarm: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing of series over two axes; `label` is the text of the button that shows it."""

    label: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a treemap.

    Attributes:
        parent: the index of its parent among the boxes; -1 for the root.
        label, text: the text in the box.
        amount: the amount of the box itself, without its children.
        colour: a name, or a fraction between 0 and 1.
        note: shown when pointing at the box.
    """

    parent: int
    label: str
    text: str
    amount: float
    colour: str | float
    note: str


@dataclass(frozen=True, slots=True)
class Tree:
    """Nested boxes, sized by amounts; `legend` has names and colours, or one name without a colour for fractions."""

    label: str
    boxes: tuple[Box, ...]
    legend: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing on the page, with buttons if it has several views or ranges.

    Attributes:
        name: unique in the report.
        label: a description of its content, for readers who cannot see it.
        views: at least one.
        height: the height in pixels.
        caption: a sentence below the chart.
        ranges: label of a button -> the range of the x axis that it shows; the first one is the whole.
        group: charts of one group show the same range of the x axis.
    """

    name: str
    label: str
    views: tuple[Plot | Tree, ...]
    height: int
    caption: str = ""
    ranges: tuple[tuple[str, float, float], ...] = ()
    group: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a title.

    Attributes:
        title: plain text.
        parts: in order.
        is_detail: True if only the page shows it; text and notebooks omit it.
        is_folded: True if the page shows only its title until it is selected.
        anchor: the target of links to it.
    """

    title: str
    parts: tuple[Part, ...]
    is_detail: bool = False
    is_folded: bool = False
    anchor: str = ""

    @staticmethod
    def detail(title: str, parts: Iterable[Part], *, is_folded: bool = False, anchor: str = "") -> Section:
        """Return a section that only the page shows."""
        return Section(title, tuple(parts), is_detail=True, is_folded=is_folded, anchor=anchor)


Part = Facts | Table | Note | Bar | Chart | Section


def brief_parts(parts: Iterable[Part]) -> Iterator[Facts | Table | Note]:
    """Yield the parts shown in text and notebooks: titles of sections become bold notes."""
    for part in parts:
        if isinstance(part, Section):
            if not part.is_detail and part.parts:
                yield Note(part.title, "bold")
                yield from brief_parts(part.parts)
        elif not isinstance(part, Bar | Chart):
            yield part


def to_data(value: Any) -> Any:
    """Return a tree as JSON data: parts as objects with their `type`, without fields that have their default."""
    if is_dataclass(value):
        kept = {item.name: getattr(value, item.name) for item in fields(value)}
        data = {item.name: to_data(kept[item.name]) for item in fields(value) if kept[item.name] != item.default}
        return {"type": type(value).__name__} | data
    return [to_data(item) for item in value] if isinstance(value, tuple) else value
