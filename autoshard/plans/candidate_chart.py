"""The charts of a search's candidates: which were planned, their speed and memory, and which was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.report import Axis, Chart, Mark, Plot, Series
from autoshard.units import format_bytes, format_seconds

_MOST = 30  # candidates in the chart: about a screen; the table has all

Fate = Literal["chosen", "slower", "too large", "estimate", "bound"]
_FATES: dict[Fate, str] = {
    "chosen": "chosen",
    "slower": "not chosen",
    "too large": "holds too much",
    "estimate": "estimated, not planned",
    "bound": "lower bound",
}


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """A candidate of a search, such as a mesh or a schedule.

    Attributes:
        name: unique among the candidates.
        seconds: predicted time of its step; None if it was not planned.
        least_seconds: a lower bound of `seconds`; None if unknown.
        peak: peak bytes of a device; None if it was not planned.
        capacity: bytes that a device may hold; 0 if unknown.
        verdict: `"chosen"`, or the reason why not, as text.
        is_chosen: True for the result of the search.
        is_estimate: True if seconds and peak are estimates, since the candidate was not planned.
    """

    name: str
    seconds: float | None
    least_seconds: float | None
    peak: int | None
    capacity: int
    verdict: str
    is_chosen: bool
    is_estimate: bool = False

    @property
    def fate(self) -> Fate:
        """The state that determines the candidate's colour."""
        if self.is_chosen:
            return "chosen"
        if self.seconds is None:
            return "bound"
        if self.is_estimate:
            return "estimate"
        return "too large" if self.capacity and (self.peak or 0) > self.capacity else "slower"

    @property
    def shown_seconds(self) -> float | None:
        """The time of the step, or its lower bound if the candidate was not planned."""
        return self.least_seconds if self.seconds is None else self.seconds

    @property
    def note(self) -> str:
        """All known facts, one per line."""
        step = f"step {format_seconds(self.seconds)}" if self.seconds is not None else ""
        least = f"at least {format_seconds(self.least_seconds)}" if self.least_seconds is not None else ""
        of = f" of {format_bytes(self.capacity)}" if self.capacity else ""
        peak = f"peak {format_bytes(self.peak)}{of}" if self.peak is not None else ""
        return "\n".join(filter(None, (self.name, step, least, peak, self.verdict)))


def candidates_chart(rows: Sequence[CandidateRow], prefix: str = "") -> Iterator[Chart]:
    """Yield the chart of candidates; nothing if no time is known."""
    known = [row for row in rows if row.shown_seconds is not None]
    if not known:
        return
    # The fastest first: close losers are below the winner.
    order: dict[Fate, int] = {"chosen": 0, "slower": 1, "too large": 1, "estimate": 2, "bound": 3}
    shown = sorted(known, key=lambda row: (order[row.fate], row.shown_seconds))[:_MOST]
    views = [_step_view(shown)]
    planned = [row for row in rows if row.seconds is not None and row.peak is not None]
    if len(planned) > 1:
        views.append(_memory_view(planned))
    more = f"{len(shown)} of {len(known)} candidates; the table has all. " if len(known) > len(shown) else ""
    has_bounds = any(row.fate == "bound" for row in shown)
    bounds = "A lower bound is the least that the step of a candidate could take, which was not planned." * has_bounds
    yield Chart(
        f"{prefix}candidates",
        f"{len(known)} candidates of the search by the predicted time of a step",
        tuple(views),
        130 + 24 * max(len(shown), 8),
        f"{more}{bounds}",
    )


def _step_view(rows: Sequence[CandidateRow]) -> Plot:
    """Return the step, or its bound, of every candidate as a bar."""
    series = (
        Series(
            _FATES[fate],
            fate.replace(" ", "-"),
            "bars",
            tuple(row.shown_seconds or 0.0 for row in found),
            tuple(row.name for row in found),
            notes=tuple(row.note for row in found),
            labels=tuple(format_seconds(row.shown_seconds or 0.0) for row in found),
        )
        for fate, found in _by_fate(rows)
    )
    names = tuple(row.name for row in rows)
    return Plot("Step", Axis("predicted step", "seconds"), Axis(categories=names), tuple(series))


def _memory_view(rows: Sequence[CandidateRow]) -> Plot:
    """Return the step and the peak of the planned candidates as points."""
    series = (
        Series(
            _FATES[fate],
            fate.replace(" ", "-"),
            "points",
            tuple(float(row.peak or 0) for row in found),
            tuple(row.seconds or 0.0 for row in found),
            notes=tuple(row.note for row in found),
            labels=tuple(row.name for row in found) if fate == "chosen" else (),
        )
        for fate, found in _by_fate(rows)
    )
    capacities = {row.capacity for row in rows if row.capacity}
    marks = []
    # Ranks of a pipeline may have different limits; then no single limit is drawn.
    if len(capacities) == 1:
        (capacity,) = capacities
        if capacity <= 2 * max(row.peak or 0 for row in rows):
            marks.append(Mark("x", capacity, f"limit {format_bytes(capacity)}", is_alarm=True))
    axes = Axis("peak of one device", "bytes"), Axis("predicted step", "seconds")
    return Plot("Step and memory", *axes, tuple(series), tuple(marks))


def _by_fate(rows: Sequence[CandidateRow]) -> Iterator[tuple[Fate, list[CandidateRow]]]:
    for fate in _FATES:
        found = [row for row in rows if row.fate == fate]
        if found:
            yield fate, found


def speed_up_plot(points: Sequence[tuple[int, float, str]]) -> Plot:
    """Return a plot of the shortest step for every number of devices, beside perfect speed-up.

    Args:
        points: number of devices, seconds of a step, name of the mesh; at least one, sorted by number of devices.
    """
    counts, steps, meshes = zip(*points, strict=True)
    perfect = tuple(steps[0] * counts[0] / count for count in counts)
    return Plot(
        "devices",
        Axis("devices", is_log=True),
        Axis("predicted step", "seconds", is_log=True),
        (
            Series("fastest plan", "accent", "line", counts, steps, notes=meshes, labels=meshes),
            Series("perfect speed-up", "muted", "line", counts, perfect, is_dashed=True),
        ),
    )
