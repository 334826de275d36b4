"""The web page of a frontier: its plans by memory and time, what each holds, and the plan that was chosen of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autoshard.plans.html import Figure, Fold, Section, View, cards, document, facts_table, text_table
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_page import as_parts, memory_bar, plan_sections, tensor_sections
from autoshard.plans.plan_text import KIND_NAMES, memory_parts, summary
from autoshard.units import byte_unit, format_bytes, format_seconds, second_unit

DEVICES = (16, 24, 32, 40, 48, 80, 96, 141, 180)
"""Memory of usual devices in GB (10**9 bytes): T4, A10, V100, A100, L40S, H100, H20, H200, B200."""

_SAME = 0.01  # part of memory and time by which plans of one line differ at most

_LABELS = ("plan", "peak per device", "step", "slower than the fastest by", "")


def page(plans: Sequence[PlanContents], turning: PlanContents, chosen: PlanContents) -> str:
    """Return the page of a frontier.

    Args:
        plans: from the smallest peak to the shortest step.
        turning: the plan beyond which memory buys little time.
        chosen: the plan that is shown with all charts.
    """
    first, last = plans[0], plans[-1]
    number = next(index for index, plan in enumerate(plans) if plan is chosen)
    lead = cards(
        [
            ("Plans", str(len(plans)), f"{first.mesh}; plans within 1 % of another are one line"),
            ("Least memory", format_bytes(first.memory.peak), f"at {format_seconds(first.step_seconds)} per step"),
            ("Shortest step", format_seconds(last.step_seconds), f"with {format_bytes(last.memory.peak)}"),
            ("Chosen", f"plan {number}", f"{format_bytes(chosen.memory.peak)}, {format_seconds(chosen.step_seconds)}"),
        ]
    )
    listed = [(index, plans[index]) for index in distinct_plans(plans, (turning, chosen))]
    # One unit for the whole column, so that plans compare at a glance.
    unit, size = byte_unit(last.memory.peak)
    rows = [
        (
            str(index),
            f"{plan.memory.peak / size:.3f} {unit}",
            format_seconds(plan.step_seconds),
            f"{plan.step_seconds / last.step_seconds - 1:.1%}",
            _mark_text(turning, chosen) if plan is chosen else "turning point" if plan is turning else "",
        )
        for index, plan in listed
    ]
    sections = [
        Section("Frontier", [*_tradeoff(plans, turning, chosen), text_table(_LABELS, rows, texts=("",))]),
        Section("Memory of the plans", list(_parts_figure(plans))),
        Section(
            "Plans",
            [
                Fold(
                    f"Plan {index}: {format_bytes(plan.memory.peak)}, {format_seconds(plan.step_seconds)}",
                    [facts_table(summary(plan)), memory_bar(plan), *as_parts(tensor_sections(plan))],
                    _anchor(index),
                )
                for index, plan in listed
            ],
        ),
    ]
    for section in plan_sections(chosen):
        # The page has this title already.
        title = f"Plan {number}: summary" if section.title == "Summary" else section.title
        sections.append(Section(title, section.parts))
    return document(f"Frontier: {first.mesh}", lead, sections)


def distinct_plans(plans: Sequence[PlanContents], kept: Sequence[PlanContents]) -> list[int]:
    """Return the numbers of the plans to list: those within 1 % of a listed one in memory and time are left out.

    Args:
        plans: from the smallest peak to the shortest step.
        kept: plans that are listed in any case, such as the turning point.
    """
    listed = [0]
    for number, plan in enumerate(plans[1:], 1):
        last = plans[listed[-1]]
        slower, larger = last.step_seconds / plan.step_seconds, plan.memory.peak / max(last.memory.peak, 1)
        is_kept = plan is plans[-1] or any(plan is other for other in kept)
        if is_kept or max(slower, larger) > 1 + _SAME:
            listed.append(number)
    return listed


def _mark_text(turning: PlanContents, chosen: PlanContents) -> str:
    return "chosen: the turning point" if chosen is turning else "chosen"


def _anchor(index: int) -> str:
    return f"plan-{index}"


def _tradeoff(plans: Sequence[PlanContents], turning: PlanContents, chosen: PlanContents) -> Iterator[Figure]:
    """Yield the step that each amount of memory allows."""
    unit, size = byte_unit(plans[-1].memory.peak)
    time, second = second_unit(plans[-1].step_seconds)
    memory = [plan.memory.peak / size for plan in plans]
    steps = [plan.step_seconds / second for plan in plans]
    span = memory[-1] - memory[0] or memory[-1]
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "plans",
            # Memory between the peaks of two plans allows the first one only, hence steps and not straight lines.
            "x": [*memory, memory[-1] + 0.06 * span],
            "y": [*steps, steps[-1]],
            "line": {"shape": "hv", "color": "var(--accent)", "width": 1.5},
            "marker": {"size": [9] * len(plans) + [0], "color": "var(--accent)"},
            "customdata": [_point(index, plan) for index, plan in enumerate(plans)],
            "hovertemplate": "%{customdata.text}<extra></extra>",
        },
        _mark(_mark_text(turning, chosen), chosen, size, second, "star"),
    ]
    if chosen is not turning:
        data.append(_mark("turning point", turning, size, second, "diamond"))
    lines, notes = [], []
    for device in DEVICES:
        x = device * 1e9 / size
        if memory[0] - 0.1 * span <= x <= memory[-1] + 0.1 * span:
            style = {"color": "var(--line)", "width": 1, "dash": "dot"}
            lines.append({"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": style})
            notes.append(
                {"x": x, "y": 1, "yref": "paper", "yanchor": "top", "text": f"{device} GB", "showarrow": False}
            )
    layout = {
        "margin": {"l": 80, "r": 20, "t": 40, "b": 48},
        "xaxis": {"title": {"text": f"peak memory per device [{unit}]"}},
        "yaxis": {"title": {"text": f"predicted step [{time}]"}},
        "shapes": lines,
        "annotations": notes,
    }
    yield Figure(
        "tradeoff",
        f"Predicted step of {len(plans)} plans by their peak memory",
        (View("frontier", data, layout),),
        440,
        "Each point is a plan; select it to read about it below.",
    )


def _point(index: int, plan: PlanContents) -> dict[str, str]:
    text = f"<b>plan {index}</b><br>{format_bytes(plan.memory.peak)}<br>{format_seconds(plan.step_seconds)}"
    return {"text": text, "anchor": _anchor(index)}


def _mark(name: str, plan: PlanContents, size: int, second: float, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [plan.memory.peak / size],
        "y": [plan.step_seconds / second],
        "marker": {
            "size": 15,
            "color": "var(--mark)",
            "symbol": symbol,
            "line": {"width": 1, "color": "var(--surface)"},
        },
        "hoverinfo": "skip",
    }


def _parts_figure(plans: Sequence[PlanContents]) -> Iterator[Figure]:
    """Yield what every plan holds at its peak, by kind."""
    unit, size = byte_unit(plans[-1].memory.peak)
    names = [f"plan {index}" for index in range(len(plans))]
    parts = [memory_parts(plan.memory) for plan in plans]
    kinds = {name: kind for kind, name in KIND_NAMES.items()} | {"activations": "activations"}
    data = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": [held.get(name, 0) / size for held in parts],
            "marker": {"color": f"var(--{kind})"},
            "hovertemplate": f"%{{x}}: %{{y:.3f}} {unit}<extra>{name}</extra>",
        }
        for name, kind in kinds.items()
        if any(held.get(name) for held in parts)
    ]
    layout = {
        "barmode": "stack",
        "margin": {"l": 80, "r": 20, "t": 40, "b": 40},
        "xaxis": {"type": "category", "fixedrange": True, "showgrid": False},
        "yaxis": {"title": {"text": f"at the peak [{unit}]"}, "fixedrange": True},
    }
    yield Figure("parts", "What each plan holds at its peak, by kind", (View("parts", data, layout),), 380)
