"""The charts of a step: the memory of one device by kind, and its calls on a timeline."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoshard.memory.footprint import KINDS
from autoshard.names import index_of
from autoshard.plans.html import Figure, View
from autoshard.plans.plan_data import Decision, PlanContents
from autoshard.plans.plan_text import KIND_NAMES
from autoshard.units import byte_unit, format_bytes, format_seconds, second_unit

# What is held for the whole step lies at the bottom, so that the rest is seen to grow and shrink.
_STACK = (
    *("parameter", "optimizer", "buffer", "input"),
    *("gradient", "output", "saved", "gathered", "communication", "temporary"),
)
_MOMENTS = 2000  # moments of the memory that are drawn: about two a pixel
_NEAR = 0.25  # part of a limit that a peak must reach for the limit to be drawn: else the memory would be a flat line
_SPANS = 4000  # bars of one row of a timeline: more are slow to move
MARGIN = {"l": 90, "r": 20}
"""Pixels beside the axes, equal in all charts of a step, so that they can be read one below the other."""

Points = list[tuple[float, dict[str, int]]]


def memory_figure(plan: PlanContents, prefix: str = "") -> Iterator[Figure]:
    """Yield the chart of the bytes of one device over the step, by kind; none where the plan does not know them."""
    points = memory_points(plan)
    if not points:
        return
    unit, size = byte_unit(plan.memory.peak)
    time, second = second_unit(_end(plan))
    times = [moment / second for moment, _ in points]
    totals = [_total(held) for _, held in points]
    highest = totals.index(max(totals))
    peak = totals[highest]
    shapes, notes = _phases(plan, second)
    notes.append(peak_note(times[highest], peak / size, f"peak {format_bytes(peak)}", times[-1]))
    name = "limit" if plan.options.get("memory_limit") else "device"
    marks, top, caption = limit_marks([plan.capacity], peak, size, name)
    layout = {
        "margin": {**MARGIN, "t": 70, "b": 40},
        "hovermode": "x unified",
        "legend": {"y": 1.07},
        "xaxis": {"range": [0, times[-1]], "title": {"text": f"time [{time}]"}, "hoverformat": ".4f"},
        "yaxis": {"range": [0, top], "fixedrange": True, "title": {"text": f"one device [{unit}]"}},
        "shapes": [*shapes, *marks["shapes"]],
        "annotations": [*notes, *marks["annotations"]],
    }
    yield Figure(
        f"{prefix}memory",
        f"Memory of one device over the step by kind, with a peak of {format_bytes(peak)}",
        (View("memory", _areas(points, times, size, unit), layout),),
        430,
        f"{caption}Bytes held at each operator, at the call of it that holds most.",
        {"Whole step": (0.0, times[-1]), **_phase_ranges(plan, second), "Peak": _around(times[highest], times[-1])},
        f"{prefix}step",
    )


def _areas(points: Points, times: list[float], size: int, unit: str) -> list[dict[str, Any]]:
    """Return an area for every kind of memory that is held, and a line for all of them."""
    assert set(_STACK) == set(KINDS), "every kind has a place in the picture"
    hover = f"%{{y:.3f}} {unit}"
    areas: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": KIND_NAMES[kind],
            "x": times,
            "y": [held.get(kind, 0) / size for _, held in points],
            "stackgroup": "memory",
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": f"var(--{kind})",
            # A line of no width has the colour of the legend and of the hover label.
            "marker": {"color": f"var(--{kind})"},
            "hovertemplate": hover,
        }
        for kind in _STACK
        if any(held.get(kind, 0) for _, held in points)
    ]
    line = {"width": 1.2, "shape": "hv", "color": "var(--text)"}
    totals = [_total(held) / size for _, held in points]
    named = {"type": "scatter", "mode": "lines", "name": "all", "line": line, "hovertemplate": hover}
    return [*areas, {**named, "x": times, "y": totals}]


def peak_note(x: float, y: float, text: str, end: float) -> dict[str, Any]:
    """Return the annotation of a peak, to the side on which there is more room before the end of the axis."""
    place = {"x": x, "y": y, "ax": -60 if x > end / 2 else 60, "ay": -26}
    box = {"bgcolor": "var(--surface)", "bordercolor": "var(--accent)", "borderpad": 3}
    return {"text": text, "showarrow": True, "arrowhead": 2, **place, **box}


def limit_marks(
    capacities: Iterable[int], peak: int, size: int, name: str
) -> tuple[dict[str, list[dict[str, Any]]], float, str]:
    """Return lines at the limits of memory, with their names.

    Args:
        capacities: bytes that devices may hold; 0 where that is not known.
        peak: bytes of the highest peak.
        size: bytes of the unit of the axis.
        name: written at a line.

    Returns:
        Shapes and annotations of a layout, the end of the axis, and a sentence about limits that are too far above the
        peak to be drawn.
    """
    limits = sorted({capacity for capacity in capacities if capacity})
    near = [capacity for capacity in limits if peak >= _NEAR * capacity]
    shapes = [
        _line("var(--alarm)", x0=0, x1=1, xref="paper", y0=capacity / size, y1=capacity / size) for capacity in near
    ]
    left = {"x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    notes = [
        {**left, "y": capacity / size, "text": f"{name} {format_bytes(capacity)}", "font": {"color": "var(--alarm)"}}
        for capacity in near
    ]
    top = max([1.14 * peak, *(1.1 * capacity for capacity in near)]) / size
    far = "" if near or not limits else f"The limit of {format_bytes(limits[0])} is far above the picture. "
    return {"shapes": shapes, "annotations": notes}, top, far


def memory_points(plan: PlanContents) -> Points:
    """Return moments in seconds, in order, with the bytes by kind that a device holds from each of them on.

    At the last one, the optimizer has updated the parameters. Moments of one time are the one at which most is held;
    so are those that are too close to be drawn.
    """
    replay, operators = plan.step_replay, len(plan.choices)
    # A step of views alone takes no time, over which nothing can be drawn.
    if not replay.held or not replay.compute:
        return []
    by_kind = replay.bytes_by_kind(operators + 1)
    times = [0.0] * operators
    begun = 0
    for span in replay.compute:
        # Operators that take no time, such as views, come before the next one that does.
        for moment in range(begun, span.moment + 1):
            times[moment] = span.start
        begun = max(begun, span.moment + 1)
    times[begun:] = [replay.seconds] * (operators - begun)
    # The host issues the first call before the device computes; what is at rest is held from the beginning.
    times[0] = 0.0
    times.append(replay.seconds)
    points: Points = []
    for moment, time in enumerate(times):
        held = {kind: amounts[moment] for kind, amounts in by_kind.items()}
        if points and points[-1][0] == time:
            points[-1] = time, max(points[-1][1], held, key=_total)
        else:
            points.append((time, held))
    thinned = [
        (chunk[0][0], max((held for _, held in chunk), key=_total))
        for chunk in _chunks(points, -(-len(points) // _MOMENTS))
    ]
    return [*thinned, (_end(plan), thinned[-1][1])]


def _total(held: dict[str, int]) -> int:
    return sum(held.values())


def _chunks(points: Points, length: int) -> Iterator[Points]:
    for first in range(0, len(points), length):
        yield points[first : first + length]


def _end(plan: PlanContents) -> float:
    """Return the seconds from the beginning of the step to the end of the optimizer's update."""
    return plan.step_replay.seconds + _update_seconds(plan)


def _update_seconds(plan: PlanContents) -> float:
    return plan.update_seconds + plan.host_update_seconds


def _phase_starts(plan: PlanContents) -> dict[str, float]:
    """Return the phases with the seconds at which they start."""
    starts: dict[str, float] = {}
    for span in plan.step_replay.compute:
        starts.setdefault(plan.choices[span.moment].phase, span.start if starts else 0.0)
    if _update_seconds(plan):
        starts["update"] = plan.step_replay.seconds
    return starts


def _phase_ranges(plan: PlanContents, second: float) -> dict[str, tuple[float, float]]:
    starts = _phase_starts(plan)
    ends = [*list(starts.values())[1:], _end(plan)]
    return {
        phase.capitalize(): (start / second, end / second)
        for (phase, start), end in zip(starts.items(), ends, strict=True)
        if phase != "update"
    }


def _phases(plan: PlanContents, second: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return lines where phases start, and their names."""
    shapes, notes = [], []
    for phase, start in _phase_starts(plan).items():
        x = start / second
        if start:
            shapes.append(_line("var(--line)", x0=x, x1=x, y0=0, y1=1, yref="paper"))
        notes.append(
            {
                "x": x,
                "y": 1,
                "yref": "paper",
                # The name of a phase at the end of the axis would be cut off.
                "xanchor": "left" if start < 0.9 * _end(plan) else "right",
                "yanchor": "bottom",
                "text": phase,
                "showarrow": False,
                "font": {"color": "var(--muted)", "size": 11},
            }
        )
    return shapes, notes


def _line(colour: str, **place: Any) -> dict[str, Any]:
    return {"type": "line", "line": {"color": colour, "width": 1.5, "dash": "dash"}, **place}


def _around(moment: float, end: float) -> tuple[float, float]:
    """Return a fiftieth of the step around a moment."""
    return max(0.0, moment - end / 100), min(end, moment + end / 100)


def timeline_figure(plan: PlanContents, prefix: str = "") -> Iterator[Figure]:
    """Yield the chart of layers, compute and the collectives of every axis over the step; none without a replay."""
    replay = plan.step_replay
    if not replay.compute:
        return
    time, second = second_unit(_end(plan))
    axes = [axis for axis in plan.mesh.names if any(span.axis == axis for span in replay.collectives)]
    data = [*_layer_bars(plan, second), *_compute_bars(plan, second)]
    for kind in dict.fromkeys(span.kind for span in replay.collectives):
        spans = [span for span in replay.collectives if span.kind == kind]
        texts = [
            f"<b>{kind}</b> over {span.axis}, {format_bytes(span.bytes)}<br>{format_seconds(span.end - span.start)}"
            f"<br>issued in {plan.choices[span.moment].module or '(root)'}"
            for span in spans
        ]
        rows = [span.axis for span in spans]
        data.append(bars(kind, f"var(--{kind})", rows, [(s.start, s.end) for s in spans], second, texts))
    shapes, _ = _phases(plan, second)
    rows = ["layers", "compute", *axes]
    layout = {
        "margin": {**MARGIN, "t": 30, "b": 40},
        "barmode": "overlay",
        "bargap": 0.15,
        "uniformtext": {"mode": "hide", "minsize": 9},
        "xaxis": {"range": [0, _end(plan) / second], "title": {"text": f"time [{time}]"}},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": rows,
            "autorange": "reversed",
            "fixedrange": True,
            "showgrid": False,
        },
        "shapes": shapes,
    }
    yield Figure(
        f"{prefix}timeline",
        f"Timeline of one device: compute, and collectives over {' and '.join(axes) or 'no axis'}",
        (View("timeline", data, layout),),
        90 + 52 * len(rows),
        _replay_caption(plan),
        group=f"{prefix}step",
    )


def _replay_caption(plan: PlanContents) -> str:
    replay = plan.step_replay
    text = f"The calls of the step take {format_seconds(replay.seconds)}"
    if replay.collectives:
        exposed, hidden = format_seconds(replay.exposed), format_seconds(replay.hidden)
        text += f"; communication is exposed for {exposed} and beside compute for {hidden}"
    text += "."
    more = plan.step_seconds - plan.host_update_seconds - replay.seconds
    if more > 1e-3 * plan.step_seconds:
        text += (
            f" The predicted step of {format_seconds(plan.step_seconds)} has {format_seconds(more)} more: compute is "
            "slower beside communication, which the picture does not draw."
        )
    if plan.host_update_seconds:
        text += f" Updates on the host, behind them, are {format_seconds(plan.host_update_seconds)} of the step."
    return text


def bars(
    name: str,
    colour: str,
    rows: Sequence[str],
    spans: Sequence[tuple[float, float]],
    second: float,
    texts: Sequence[str],
    labels: Sequence[str] = (),
) -> dict[str, Any]:
    """Return bars of a timeline.

    Args:
        name: of the bars in the legend.
        colour: of all bars.
        rows: the row of each.
        spans: seconds of start and end of each.
        second: seconds of the unit of the axis.
        texts: shown of each when it is pointed at.
        labels: written inside each, where there is room.
    """
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(rows),
        "base": [start / second for start, _ in spans],
        "x": [(end - start) / second for start, end in spans],
        "customdata": list(texts),
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": colour, "line": {"width": 0}},
    }
    if labels:
        inside = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
        trace |= {"text": list(labels), **inside}
    return trace


def _compute_bars(plan: PlanContents, second: float) -> Iterator[dict[str, Any]]:
    """Yield the compute of every phase, a bar for the calls of one module that follow each other."""
    runs: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    spans = [(span.start, span.end, plan.choices[span.moment]) for span in plan.step_replay.compute]
    for run in _runs(spans):
        seconds = sum(end - start for start, end, _ in run)
        decision = run[0][2]
        operators = Counter(choice.operator for choice in {choice.node: choice for *_, choice in run}.values())
        listed = ", ".join(
            f"{operator}{f' x {count}' if count > 1 else ''}" for operator, count in operators.most_common(4)
        )
        more = f" and {len(operators) - 4} others" if len(operators) > 4 else ""
        text = f"<b>{decision.module or '(root)'}</b>, {decision.phase}<br>{format_seconds(seconds)}<br>{listed}{more}"
        runs[decision.phase].append((run[0][0], run[-1][1], text))
    for phase, found in runs.items():
        ends, texts = [(start, end) for start, end, _ in found], [text for *_, text in found]
        yield bars(phase, f"var(--{phase})", ["compute"] * len(found), ends, second, texts)
    if _update_seconds(plan):
        ends = [(plan.step_replay.seconds, _end(plan))]
        text = f"<b>optimizer's update</b><br>{format_seconds(_update_seconds(plan))}"
        yield bars("update", "var(--update)", ["compute"], ends, second, [text])


Span = tuple[float, float, Decision]


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield spans of one module and phase that follow each other without a gap."""
    # A gap that no screen can show joins its neighbours, where there are too many bars.
    gap = spans[-1][1] / _SPANS if len(spans) > _SPANS else 1e-9
    run: list[Span] = []
    for span in spans:
        if run and (_place(span) != _place(run[-1]) or span[0] - run[-1][1] > gap):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _place(span: Span) -> tuple[str, str]:
    return span[2].phase, span[2].module


def layer_of(module: str) -> str:
    """Return the path of the layer that a module is in: up to its first index, or its first two names."""
    parts = module.split(".")
    index = next((place for place, part in enumerate(parts) if index_of(part)), min(1, len(parts) - 1))
    return ".".join(parts[: index + 1])


def _short_name(layer: str) -> str:
    """Return the last name of a layer; with the name before it where it is a number, which says nothing alone."""
    parts = layer.split(".")
    return ".".join(parts[-2 if parts[-1].isdigit() else -1 :])


def _layer_bars(plan: PlanContents, second: float) -> Iterator[dict[str, Any]]:
    """Yield the layers that compute, one after the other, in two colours in turn."""
    found: list[tuple[float, float, str]] = []
    spans = ((span.start, span.end, layer_of(plan.choices[span.moment].module)) for span in plan.step_replay.compute)
    for layer, run in itertools.groupby(spans, key=lambda span: span[2]):
        listed = list(run)
        found.append((listed[0][0], listed[-1][1], layer))
    for colour in (0, 1):
        part = found[colour::2]
        if part:
            trace = bars(
                "layers",
                f"var(--layer-{colour})",
                ["layers"] * len(part),
                [(start, end) for start, end, _ in part],
                second,
                [f"<b>{layer or '(root)'}</b><br>{format_seconds(end - start)}" for start, end, layer in part],
                [_short_name(layer) for *_, layer in part],
            )
            yield trace | {"showlegend": False}
