"""A plot of a report as a picture file, drawn by matplotlib."""

from __future__ import annotations

import os
from typing import Any

from autoshard.errors import PlanError
from autoshard.report import Axis, Plot, Series
from autoshard.units import byte_unit, second_unit

_STYLES: dict[str, dict[str, Any]] = {
    "line": {"marker": "o"},
    "steps": {"marker": "o", "drawstyle": "steps-post"},
    "points": {"marker": "o", "linestyle": "none", "zorder": 3},
}


def save(plot: Plot, path: str | os.PathLike[str], title: str) -> None:
    """Draw the lines, steps, points and marks of a plot to a file.

    Args:
        plot: a plot over two numeric axes.
        path: the path of the picture; its suffix is the format, such as `.png`, `.svg` or `.pdf`.
        title: the title above the picture.

    Raises:
        PlanError: matplotlib is not installed.
    """
    # An optional dependency, so imported here.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(
            "pictures need matplotlib, which is not installed: pip install 'autoshard[plot]', or write the page by "
            "to_html."
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    x_label, x_size = _label(plot.x, [value for series in plot.series for value in series.x])
    y_label, y_size = _label(plot.y, [value for series in plot.series for value in series.y])
    scales = ["log" if axis.is_log else "linear" for axis in (plot.x, plot.y)]
    axes.set(xscale=scales[0], yscale=scales[1], xlabel=x_label, ylabel=y_label, title=title)
    for series in plot.series:
        _draw(axes, series, x_size, y_size)
    for mark in plot.marks:
        line, place = (axes.axvline, mark.place / x_size) if mark.axis == "x" else (axes.axhline, mark.place / y_size)
        line(place, color="grey", linestyle=":", linewidth=1)
        at = (place, 1.0) if mark.axis == "x" else (0.0, place)
        coordinates = ("data", "axes fraction") if mark.axis == "x" else ("axes fraction", "data")
        axes.annotate(mark.text, at, xycoords=coordinates, rotation=90 if mark.axis == "x" else 0, va="top")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _label(axis: Axis, values: list[Any]) -> tuple[str, float]:
    """Return the title of an axis with its unit, and the size of the unit."""
    if not axis.unit:
        return axis.title, 1
    name, size = byte_unit(max(values)) if axis.unit == "bytes" else second_unit(max(values))
    return f"{axis.title} [{name}]", size


def _draw(axes: Any, series: Series, x_size: float, y_size: float) -> None:
    x, y = ([float(value) / size for value in values] for values, size in ((series.x, x_size), (series.y, y_size)))
    style = {"linestyle": ":", "color": "grey"} if series.is_dashed else _STYLES[series.kind]
    axes.plot(x, y, **style, label=series.name, markersize=5, linewidth=1)
    # The legend contains the name of a series.
    for place, text in zip(zip(x, y, strict=True), series.labels, strict=False):
        if text != series.name:
            axes.annotate(text, place, textcoords="offset points", xytext=(4, 6), fontsize=8)
