"""The charts of a step: memory of one device by kind, and a timeline of its calls."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from autoshard.memory.footprint import KINDS
from autoshard.names import index_of
from autoshard.plans.plan_data import Decision, PlanContents
from autoshard.plans.plan_summary import KIND_NAMES
from autoshard.report import Axis, Chart, Mark, Plot, Series
from autoshard.units import format_bytes, format_seconds

# Memory held for the whole step is at the bottom, so that changes of the rest are visible.
_STACK = (
    *("parameter", "optimizer", "buffer", "input"),
    *("gradient", "output", "saved", "gathered", "communication", "temporary"),
)
_MOMENTS = 2000  # moments drawn in the memory chart: about two per pixel
_NEAR = 0.25  # part of a limit that the peak must reach for the limit to be drawn: else memory is a flat line
_SPANS = 4000  # bars in a row of a timeline: more are slow to move

Points = list[tuple[float, dict[str, int]]]


def memory_chart(plan: PlanContents, prefix: str = "") -> Iterator[Chart]:
    """Yield the chart of one device's bytes over the step, by kind; nothing if the plan does not know them."""
    points = memory_points(plan)
    if not points:
        return
    assert set(_STACK) == set(KINDS), "every kind has a place in the picture"
    times = tuple(moment for moment, _ in points)
    totals = tuple(_total(held) for _, held in points)
    peak, end = max(totals), times[-1]
    moment = times[totals.index(peak)]
    areas = (
        Series(KIND_NAMES[kind], kind, "area", times, tuple(held.get(kind, 0) for _, held in points))
        for kind in _STACK
        if any(held.get(kind, 0) for _, held in points)
    )
    limits, far = limit_marks([plan.capacity], peak, "limit" if plan.options.get("memory_limit") else "device")
    around = max(0.0, moment - end / 100), min(end, moment + end / 100)
    plot = Plot(
        "memory",
        Axis("time", "seconds", ends=(0.0, end)),
        Axis("one device", "bytes"),
        (*areas, Series("all", "text", "steps", times, totals), peak_point(moment, peak, f"peak {format_bytes(peak)}")),
        (*_phase_marks(plan), *limits),
    )
    yield Chart(
        f"{prefix}memory",
        f"Memory of one device over the step by kind, with a peak of {format_bytes(peak)}",
        (plot,),
        430,
        f"{far}Bytes held at each operator, at the call of it that holds most.",
        (("Whole step", 0.0, end), *_phase_ranges(plan), ("Peak", *around)),
        f"{prefix}step",
    )


def peak_point(moment: float, peak: int, text: str) -> Series:
    """Return a labelled point at a peak of memory."""
    return Series("", "accent", "points", (moment,), (peak,), labels=(text,))


def limit_marks(capacities: Iterable[int], peak: int, name: str) -> tuple[tuple[Mark, ...], str]:
    """Return lines at the limits of memory, and a sentence about limits too far above the peak to be drawn.

    Args:
        capacities: bytes that devices may hold; 0 if unknown.
        peak: bytes of the highest peak.
        name: the label of the lines.
    """
    limits = sorted({capacity for capacity in capacities if capacity})
    near = [capacity for capacity in limits if peak >= _NEAR * capacity]
    marks = (Mark("y", capacity, f"{name} {format_bytes(capacity)}", is_alarm=True) for capacity in near)
    far = "" if near or not limits else f"The limit of {format_bytes(limits[0])} is far above the picture. "
    return tuple(marks), far


def memory_points(plan: PlanContents) -> Points:
    """Return moments in seconds, in order, with the bytes by kind that a device holds from then on.

    At the last moment, the optimizer has updated the parameters. Of moments at the same time, or too close to be drawn,
    only the one with most memory is returned.
    """
    replay, operators = plan.step_replay, len(plan.choices)
    # A step of views only takes no time, over which nothing could be drawn.
    if not replay.held or not replay.compute:
        return []
    by_kind = replay.bytes_by_kind(operators + 1)
    times = [0.0] * operators
    begun = 0
    for span in replay.compute:
        # Operators that take no time, such as views, precede the next one that does.
        for moment in range(begun, span.moment + 1):
            times[moment] = span.start
        begun = max(begun, span.moment + 1)
    times[begun:] = [replay.seconds] * (operators - begun)
    # The host issues the first call before the device computes; tensors at rest are held from the beginning.
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
    """Return the time from the beginning of the step to the end of the optimizer's update, in seconds."""
    return plan.step_replay.seconds + _update_seconds(plan)


def _update_seconds(plan: PlanContents) -> float:
    return plan.update_seconds + plan.host_update_seconds


def _phase_starts(plan: PlanContents) -> dict[str, float]:
    """Return the phases with their starts in seconds."""
    starts: dict[str, float] = {}
    for span in plan.step_replay.compute:
        starts.setdefault(plan.choices[span.moment].phase, span.start if starts else 0.0)
    if _update_seconds(plan):
        starts["update"] = plan.step_replay.seconds
    return starts


def _phase_marks(plan: PlanContents) -> tuple[Mark, ...]:
    return tuple(Mark("x", start, phase) for phase, start in _phase_starts(plan).items())


def _phase_ranges(plan: PlanContents) -> Iterator[tuple[str, float, float]]:
    starts = _phase_starts(plan)
    ends = [*list(starts.values())[1:], _end(plan)]
    for (phase, start), end in zip(starts.items(), ends, strict=True):
        if phase != "update":
            yield phase.capitalize(), start, end


def timeline_chart(plan: PlanContents, prefix: str = "") -> Chart:
    """Return the chart of layers, compute and collectives by axis over a plan's step."""
    replay = plan.step_replay
    axes = [axis for axis in plan.mesh.names if any(span.axis == axis for span in replay.collectives)]
    rows = ("layers", "compute", *axes)
    plot = Plot(
        "timeline",
        Axis("time", "seconds", ends=(0.0, _end(plan))),
        Axis(categories=rows),
        (*_layer_bars(plan), *_compute_bars(plan), *_collective_bars(plan)),
        _phase_marks(plan),
    )
    return Chart(
        f"{prefix}timeline",
        f"Timeline of one device: compute, and collectives over {' and '.join(axes) or 'no axis'}",
        (plot,),
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


Call = tuple[str, float, float, str, str]
"""A bar of a timeline: its row, start and end, a note, and a label, which may be empty."""


def call_bars(name: str, colour: str, calls: Iterable[Call]) -> Series:
    """Return timeline bars with one name and colour."""
    rows, starts, ends, notes, labels = zip(*calls, strict=True)
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Series(name, colour, "bars", lengths, rows, starts, notes, labels if any(labels) else ())


def _collective_bars(plan: PlanContents) -> Iterator[Series]:
    calls: dict[str, list[Call]] = defaultdict(list)
    for sent in plan.step_replay.collectives:
        note = (
            f"{sent.kind} over {sent.axis}, {format_bytes(sent.bytes)}\n{format_seconds(sent.end - sent.start)}\n"
            f"issued in {plan.choices[sent.moment].module or '(root)'}"
        )
        calls[sent.kind].append((sent.axis, sent.start, sent.end, note, ""))
    for kind, of_kind in calls.items():
        yield call_bars(kind, kind, of_kind)


def _compute_bars(plan: PlanContents) -> Iterator[Series]:
    """Yield the compute of every phase, with one bar for consecutive calls of one module."""
    calls: dict[str, list[Call]] = defaultdict(list)
    for run in _runs([(span.start, span.end, plan.choices[span.moment]) for span in plan.step_replay.compute]):
        decision = run[0][2]
        calls[decision.phase].append(("compute", run[0][0], run[-1][1], _run_note(run), ""))
    for phase, of_phase in calls.items():
        yield call_bars(phase, phase, of_phase)
    if _update_seconds(plan):
        note = f"optimizer's update\n{format_seconds(_update_seconds(plan))}"
        yield call_bars("update", "update", [("compute", plan.step_replay.seconds, _end(plan), note, "")])


def _run_note(run: Sequence[Span]) -> str:
    decision = run[0][2]
    operators = Counter(choice.operator for choice in {choice.node: choice for *_, choice in run}.values())
    listed = ", ".join(f"{name}{f' x {count}' if count > 1 else ''}" for name, count in operators.most_common(4))
    more = f" and {len(operators) - 4} others" if len(operators) > 4 else ""
    seconds = sum(end - start for start, end, _ in run)
    return f"{decision.module or '(root)'}, {decision.phase}\n{format_seconds(seconds)}\n{listed}{more}"


Span = tuple[float, float, Decision]


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield runs of consecutive spans of one module and phase without gaps."""
    # If there are too many bars, gaps too small for a screen are closed.
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
    """Return the path of a module's layer: up to its first index, or its first two names."""
    parts = module.split(".")
    index = next((place for place, part in enumerate(parts) if index_of(part)), min(1, len(parts) - 1))
    return ".".join(parts[: index + 1])


def _short_name(layer: str) -> str:
    """Return the last name of a layer; a number gets the name before it."""
    parts = layer.split(".")
    return ".".join(parts[-2 if parts[-1].isdigit() else -1 :])


def _layer_bars(plan: PlanContents) -> Iterator[Series]:
    """Yield the layers' compute, one after the other, in two alternating colours."""
    calls: list[Call] = []
    spans = ((span.start, span.end, layer_of(plan.choices[span.moment].module)) for span in plan.step_replay.compute)
    for layer, run in itertools.groupby(spans, key=lambda span: span[2]):
        listed = list(run)
        start, end = listed[0][0], listed[-1][1]
        calls.append(("layers", start, end, f"{layer or '(root)'}\n{format_seconds(end - start)}", _short_name(layer)))
    for colour in (0, 1):
        if calls[colour::2]:
            yield call_bars("", f"layer-{colour}", calls[colour::2])
