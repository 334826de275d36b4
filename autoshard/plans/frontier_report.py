"""The report of a frontier: its plans by memory and time, their memory by kind, and the chosen plan."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_report import memory_bar, plan_report, tensor_sections
from autoshard.plans.plan_summary import KIND_NAMES, memory_parts, summary
from autoshard.report import Axis, Chart, Fact, Facts, Mark, Plot, Report, Section, Series, Table, numbers, texts
from autoshard.units import byte_unit, format_bytes, format_seconds

DEVICES = (16, 24, 32, 40, 48, 80, 96, 141, 180)
"""Memory of common devices in GB (10**9 bytes): T4, A10, V100, A100, L40S, H100, H20, H200, B200."""

_SAME = 0.01  # relative difference of memory and time within which plans share a row
_PARTS = ("parameters", "gradients", "optimizer", "activations")


def frontier_report(plans: Sequence[PlanContents], turning: PlanContents, chosen: PlanContents) -> Report:
    """Return the report of a frontier.

    Args:
        plans: from the smallest peak to the shortest step.
        turning: the plan beyond which more memory saves little time.
        chosen: the plan shown with all charts on the page.
    """
    first, last = plans[0], plans[-1]
    number = next(index for index, plan in enumerate(plans) if plan is chosen)
    mark = "turning point" if chosen is turning else "chosen"
    facts = Facts(
        (
            Fact("plans", str(len(plans)), "plans within 1 % of another are one line", is_key=True),
            Fact(
                "least memory", format_bytes(first.memory.peak), f"{format_seconds(first.step_seconds)} per step", True
            ),
            Fact("shortest step", format_seconds(last.step_seconds), f"with {format_bytes(last.memory.peak)}", True),
            Fact(mark, f"plan {number}", _size_text(chosen), is_key=True),
        )
    )
    listed = [(index, plans[index]) for index in distinct_plans(plans, (turning, chosen))]
    held = (
        Section.detail(
            f"Plan {index}: {_size_text(plan)}",
            [summary(plan), memory_bar(plan), *tensor_sections(plan)],
            is_folded=True,
            anchor=f"plan-{index}",
        )
        for index, plan in listed
    )
    tradeoff = Chart(
        "tradeoff",
        f"Predicted step of {len(plans)} plans by their peak memory",
        (tradeoff_plot(plans, turning, chosen),),
        440,
        "Each point is a plan; select it to read about it below.",
    )
    sections = (
        Section("Frontier", (tradeoff, _table(listed, last, turning, chosen))),
        Section.detail("Memory of the plans", [_parts_chart(plans)]),
        Section.detail("Plans", held),
        *plan_report(chosen).details(f"Plan {number}: summary"),
    )
    return Report.of(f"Frontier on {first.mesh}", (facts, *sections))


def _size_text(plan: PlanContents) -> str:
    return f"{format_bytes(plan.memory.peak)}, {format_seconds(plan.step_seconds)}"


def _table(
    listed: Sequence[tuple[int, PlanContents]], last: PlanContents, turning: PlanContents, chosen: PlanContents
) -> Table:
    """Return a table of plans with the parts of their peaks, and their steps relative to the fastest plan."""
    # One unit for the whole column, so that plans are easy to compare.
    unit, size = byte_unit(last.memory.peak)
    rows = (
        (
            str(index),
            f"{plan.memory.peak / size:.3f} {unit}",
            *(format_bytes(getattr(plan.memory, part)) for part in _PARTS),
            format_seconds(plan.step_seconds),
            f"{plan.step_seconds / last.step_seconds - 1:.1%}",
            "turning point" if plan is turning else "chosen" if plan is chosen else "",
        )
        for index, plan in listed
    )
    labels = ("plan", "peak per device", *_PARTS, "step", "slower by")
    return Table.of((*numbers(*labels), *texts("")), rows, most=100)


def distinct_plans(plans: Sequence[PlanContents], kept: Sequence[PlanContents]) -> list[int]:
    """Return the indices of the plans to list, without those within 1 % of a listed one in memory and time.

    Args:
        plans: from the smallest peak to the shortest step.
        kept: plans to list in any case, such as the turning point.
    """
    listed = [0]
    for number, plan in enumerate(plans[1:], 1):
        last = plans[listed[-1]]
        slower, larger = last.step_seconds / plan.step_seconds, plan.memory.peak / max(last.memory.peak, 1)
        is_kept = plan is plans[-1] or any(plan is other for other in kept)
        if is_kept or max(slower, larger) > 1 + _SAME:
            listed.append(number)
    return listed


def tradeoff_plot(plans: Sequence[PlanContents], turning: PlanContents, chosen: PlanContents) -> Plot:
    """Return a plot of the fastest step for each amount of memory; arguments as for `frontier_report`."""
    memory = tuple(float(plan.memory.peak) for plan in plans)
    steps = tuple(plan.step_seconds for plan in plans)
    span, time = memory[-1] - memory[0] or memory[-1], steps[0] - steps[-1] or steps[0]
    points = Series(
        "plans",
        "accent",
        # Memory between the peaks of two plans only allows the first one, hence steps, not straight lines.
        "steps",
        memory,
        steps,
        notes=tuple(f"plan {index}\n{_size_text(plan)}" for index, plan in enumerate(plans)),
        links=tuple(f"plan-{index}" for index in range(len(plans))),
    )
    marked = [_point("turning point", turning)]
    if chosen is not turning:
        marked.append(_point("chosen", chosen))
    devices = (
        Mark("x", device * 1e9, f"{device} GB")
        for device in DEVICES
        if memory[0] - 0.1 * span <= device * 1e9 <= memory[-1] + 0.1 * span
    )
    axes = (
        Axis("peak memory per device", "bytes", ends=(memory[0] - 0.1 * span, memory[-1] + 0.1 * span)),
        Axis("predicted step", "seconds", ends=(steps[-1] - 0.1 * time, steps[0] + 0.1 * time)),
    )
    return Plot("frontier", *axes, (points, *marked), tuple(devices))


def _point(name: str, plan: PlanContents) -> Series:
    return Series(name, "mark", "points", (float(plan.memory.peak),), (plan.step_seconds,), labels=(name,))


def _parts_chart(plans: Sequence[PlanContents]) -> Chart:
    """Return a chart of every plan's memory at its peak, by kind."""
    names = tuple(f"plan {index}" for index in range(len(plans)))
    parts = [memory_parts(plan.memory) for plan in plans]
    colours = {name: kind for kind, name in KIND_NAMES.items()} | {"activations": "saved"}
    series = (
        Series(name, colour, "bars", names, tuple(held.get(name, 0) for held in parts))
        for name, colour in colours.items()
        if any(held.get(name) for held in parts)
    )
    plot = Plot("parts", Axis(categories=names), Axis("at the peak", "bytes"), tuple(series), is_stacked=True)
    return Chart("parts", "What each plan holds at its peak, by kind", (plot,), 380)
