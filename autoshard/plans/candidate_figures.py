"""The charts of candidates of a search: which were planned, how fast they are, what they hold, and which was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autoshard.plans.html import Figure, View
from autoshard.units import byte_unit, format_bytes, format_seconds, second_unit

_MOST = 30  # candidates of the chart: about a screen; the table has them all

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
        seconds: predicted time of its step; None where it was not planned.
        least_seconds: a lower bound of that; None where it is not known.
        peak: bytes that a device holds; None where it was not planned.
        capacity: bytes that a device may hold; 0 where that is not known.
        verdict: `"chosen"`, or the reason why not, for people.
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
        """The reason for the colour of the candidate."""
        if self.is_chosen:
            return "chosen"
        if self.seconds is None:
            return "bound"
        if self.is_estimate:
            return "estimate"
        return "too large" if self.capacity and (self.peak or 0) > self.capacity else "slower"


def candidates_figure(rows: Sequence[CandidateRow], prefix: str = "") -> Iterator[Figure]:
    """Yield the chart of candidates; none where no time of any is known."""
    known = [row for row in rows if _seconds(row) is not None]
    if not known:
        return
    # The fastest first: those that were close and lost stand below the one that won.
    order: dict[Fate, int] = {"chosen": 0, "slower": 1, "too large": 1, "estimate": 2, "bound": 3}
    shown = sorted(known, key=lambda row: (order[row.fate], _seconds(row)))[:_MOST]
    unit, size = second_unit(max(_seconds(row) or 0.0 for row in shown))
    views = [View("Step", list(_bars(shown, size)), _bar_layout([row.name for row in shown], unit))]
    planned = [row for row in rows if row.seconds is not None and row.peak is not None]
    if len(planned) > 1:
        views.append(_memory_view(planned, unit, size))
    more = f"{len(shown)} of {len(known)} candidates; the table has all. " if len(known) > len(shown) else ""
    yield Figure(
        f"{prefix}candidates",
        f"{len(known)} candidates of the search by the predicted time of a step",
        tuple(views),
        130 + 24 * max(len(shown), 8),
        f"{more}{_bounds_text(shown)}",
    )


def _bounds_text(rows: Sequence[CandidateRow]) -> str:
    has_bounds = any(row.fate == "bound" for row in rows)
    return "A lower bound is the least that the step of a candidate could take, which was not planned." * has_bounds


def _seconds(row: CandidateRow) -> float | None:
    return row.least_seconds if row.seconds is None else row.seconds


def _hover(row: CandidateRow) -> str:
    step = f"step {format_seconds(row.seconds)}" if row.seconds is not None else ""
    least = f"at least {format_seconds(row.least_seconds)}" if row.least_seconds is not None else ""
    of = f" of {format_bytes(row.capacity)}" if row.capacity else ""
    peak = f"peak {format_bytes(row.peak)}{of}" if row.peak is not None else ""
    return "<br>".join(filter(None, (f"<b>{row.name}</b>", step, least, peak, row.verdict)))


def _bars(rows: Sequence[CandidateRow], size: float) -> Iterator[dict[str, Any]]:
    for fate, name in _FATES.items():
        found = [row for row in rows if row.fate == fate]
        if found:
            seconds = [_seconds(row) or 0.0 for row in found]
            yield {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [row.name for row in found],
                "x": [amount / size for amount in seconds],
                "customdata": [_hover(row) for row in found],
                "hovertemplate": "%{customdata}<extra></extra>",
                "text": [format_seconds(amount) for amount in seconds],
                "textposition": "auto",
                "marker": {"color": f"var(--{fate.replace(' ', '-')})"},
            }


def _bar_layout(names: Sequence[str], unit: str) -> dict[str, Any]:
    return {
        "barmode": "overlay",
        "margin": {"l": 20, "r": 20, "t": 40, "b": 44},
        "uniformtext": {"mode": "show", "minsize": 10},
        "xaxis": {"title": {"text": f"predicted step [{unit}]"}, "fixedrange": True, "rangemode": "tozero"},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(names),
            "autorange": "reversed",
            "automargin": True,
            "fixedrange": True,
            "showgrid": False,
        },
    }


def _memory_view(rows: Sequence[CandidateRow], unit: str, size: float) -> View:
    """Return the step and the peak of the planned candidates as points."""
    memory, bytes = byte_unit(max(row.peak or 0 for row in rows))
    data = []
    for fate, name in _FATES.items():
        found = [row for row in rows if row.fate == fate]
        if found:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers+text" if fate == "chosen" else "markers",
                    "name": name,
                    "x": [(row.peak or 0) / bytes for row in found],
                    "y": [(row.seconds or 0.0) / size for row in found],
                    "text": [row.name for row in found],
                    "textposition": "middle right",
                    "customdata": [_hover(row) for row in found],
                    "hovertemplate": "%{customdata}<extra></extra>",
                    "marker": {"color": f"var(--{fate.replace(' ', '-')})", "size": 14 if fate == "chosen" else 10},
                }
            )
    layout: dict[str, Any] = {
        "margin": {"l": 70, "r": 20, "t": 40, "b": 44},
        "xaxis": {"title": {"text": f"peak of one device [{memory}]"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"predicted step [{unit}]"}, "rangemode": "tozero"},
    }
    capacities = {row.capacity for row in rows if row.capacity}
    # Ranks of a pipeline may have several limits, of which none is that of all.
    if len(capacities) == 1:
        (capacity,) = capacities
        if capacity <= 2 * max(row.peak or 0 for row in rows):
            layout |= _limit_line(capacity, bytes)
    return View("Step and memory", data, layout)


def _limit_line(capacity: int, bytes: int) -> dict[str, Any]:
    """Return the parts of a layout that draw a limit of memory on an x axis whose unit has so many bytes."""
    line = {"color": "var(--alarm)", "width": 1.5, "dash": "dash"}
    x = capacity / bytes
    return {
        "shapes": [{"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}],
        "annotations": [
            {
                "x": x,
                "y": 1,
                "yref": "paper",
                "xanchor": "right",
                "yanchor": "top",
                "text": f"limit {format_bytes(capacity)}",
                "showarrow": False,
                "font": {"color": "var(--alarm)"},
            }
        ],
    }


def speed_up_figure(points: Sequence[tuple[int, float, str]]) -> Figure:
    """Return the shortest step of every number of devices, beside that of perfect speed-up.

    Args:
        points: number of devices, seconds of a step, name of the mesh; at least one, the fewest devices first.
    """
    counts, steps = [count for count, *_ in points], [seconds for _, seconds, _ in points]
    unit, second = second_unit(max(steps))
    fastest = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": "fastest plan",
        "x": counts,
        "y": [step / second for step in steps],
        "text": [name for *_, name in points],
        "textposition": "top right",
        "line": {"color": "var(--accent)"},
        "marker": {"size": 9},
    }
    perfect = {
        "type": "scatter",
        "mode": "lines",
        "name": "perfect speed-up",
        "x": counts,
        "y": [steps[0] * counts[0] / count / second for count in counts],
        "line": {"color": "var(--muted)", "dash": "dot"},
    }
    layout = {
        "margin": {"l": 70, "r": 60, "t": 40, "b": 48},
        "xaxis": {"type": "log", "tickvals": counts, "title": {"text": "devices"}},
        "yaxis": {"type": "log", "title": {"text": f"predicted step [{unit}]"}},
    }
    label = "Shortest step of every number of devices"
    return Figure("devices", label, (View("devices", [fastest, perfect], layout),), 400)
