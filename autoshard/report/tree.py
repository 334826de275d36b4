"""The parts of a report: facts, tables, notes, bars and charts, in sections. They are data, and know no renderer.

Cells are texts, and numbers of charts are in seconds and bytes: the page chooses the unit of an axis. Colours are names
of the page's style, such as `"forward"`.
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
        label: of the value.
        value: as text.
        note: more about it, which text has in parentheses.
        is_key: True for a key figure, which the page shows at its head.
        is_alarm: True if the page shows it in red.
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
    """Labelled values; those without a value are left out."""

    rows: tuple[Fact, ...]

    @staticmethod
    def of(rows: Iterable[Fact | tuple[str, str]]) -> Facts:
        """Return facts, or pairs of label and value, as facts."""
        facts = (row if isinstance(row, Fact) else Fact(*row) for row in rows)
        return Facts(tuple(fact for fact in facts if fact.value))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: of sentences and words, of dotted names, of numbers, or of placements."""

    label: str
    kind: Kind = "text"


def texts(*labels: str) -> tuple[Column, ...]:
    """Return columns of sentences and words."""
    return tuple(Column(label) for label in labels)


def names(*labels: str) -> tuple[Column, ...]:
    """Return columns of names, which break behind dots."""
    return tuple(Column(label, "name") for label in labels)


def numbers(*labels: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(label, "number") for label in labels)


Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells.

    Attributes:
        columns: of every row.
        rows: a cell for every column.
        rest: the row that stands for the rows behind the first `most`, where a renderer leaves them out.
        most: rows that text shows; the page folds up longer tables.
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
        """The rows that text shows: all, or the first and the one that stands for the rest."""
        return (*self.rows[: self.most], self.rest) if self.rest else self.rows


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph, plain, bold, dim or code; `link` is an address that the page has behind it."""

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
    """Amounts that add up to a whole, drawn as one bar by the page."""

    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a plot: of amounts in a unit, or of categories.

    Attributes:
        title: of the axis, without its unit.
        unit: of the amounts.
        categories: their names in order; empty for an axis of amounts.
        ends: the part that is shown at first; None for all.
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
    """Points, lines or bars of one name and colour.

    Attributes:
        name: in the legend; empty for none.
        colour: of all.
        kind: `"line"`, `"steps"` (a line that stays until the next point), `"area"` (steps, stacked on the areas before
            it), `"points"`, or `"bars"` along the axis of amounts.
        x, y: a place on each axis for every point; of bars, the amount is their length.
        starts: of bars, where they begin; empty for 0, or for the end of the bars before in a stacked plot.
        notes: shown of each point when it is pointed at; may have several lines, of which the first is a title.
        labels: written at each point, or inside each bar where there is room.
        links: anchors of the sections that points stand for.
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
    """A line across a plot at a place on one axis, with a text."""

    axis: Literal["x", "y"]
    place: float
    text: str
    is_alarm: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing of series over two axes; `label` is that of the button that shows it."""

    label: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tree.

    Attributes:
        parent: the number of its parent among the boxes; -1 for the root.
        label, text: written in it.
        amount: of the box itself, without those below it.
        colour: a name, or a share between 0 and 1.
        note: shown when it is pointed at.
    """

    parent: int
    label: str
    text: str
    amount: float
    colour: str | float
    note: str


@dataclass(frozen=True, slots=True)
class Tree:
    """Boxes within boxes, sized by amounts; `legend` has names and colours, or one name and no colour for shares."""

    label: str
    boxes: tuple[Box, ...]
    legend: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of the page, with buttons where it has several views or ranges.

    Attributes:
        name: unique in its report.
        label: its content in words, for readers who do not see it.
        views: at least one.
        height: in pixels.
        caption: a sentence below it.
        ranges: label of a button, and the ends of the x axis that it shows; the first one is the whole.
        group: charts of one group show the same part of the x axis.
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
    """Parts below a title.

    Attributes:
        title: plain text.
        parts: in order.
        is_detail: True if the page alone shows it; text and notebooks leave it out.
        is_folded: True if the page shows its title alone until it is selected.
        anchor: where links to it lead.
    """

    title: str
    parts: tuple[Part, ...]
    is_detail: bool = False
    is_folded: bool = False
    anchor: str = ""

    @staticmethod
    def detail(title: str, parts: Iterable[Part], *, is_folded: bool = False, anchor: str = "") -> Section:
        """Return a section that the page alone shows."""
        return Section(title, tuple(parts), is_detail=True, is_folded=is_folded, anchor=anchor)


Part = Facts | Table | Note | Bar | Chart | Section


def brief_parts(parts: Iterable[Part]) -> Iterator[Facts | Table | Note]:
    """Yield what text and notebooks show of some parts: titles of sections are bold notes."""
    for part in parts:
        if isinstance(part, Section):
            if not part.is_detail and part.parts:
                yield Note(part.title, "bold")
                yield from brief_parts(part.parts)
        elif not isinstance(part, Bar | Chart):
            yield part


def to_data(value: Any) -> Any:
    """Return a tree as data for JSON: parts as objects with their `type`, without fields that have their default."""
    if is_dataclass(value):
        kept = {item.name: getattr(value, item.name) for item in fields(value)}
        data = {item.name: to_data(kept[item.name]) for item in fields(value) if kept[item.name] != item.default}
        return {"type": type(value).__name__} | data
    return [to_data(item) for item in value] if isinstance(value, tuple) else value
