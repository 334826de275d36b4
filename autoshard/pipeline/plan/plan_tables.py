"""A pipeline's plan as plain text: `str(plan)` and `plan.explain(...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from autoshard.plans import plan_text
from autoshard.plans.plan_rows import shares_text
from autoshard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoshard.pipeline.plan.pipeline_plan import PipelinePlan

_LINES = 12


def render(plan: PipelinePlan, width: int = plan_text.WIDTH) -> str:
    """The plan as tables: summary, stages, pipeline ranks, and the schedules that there were to choose from."""
    parts = [summary_table(plan)]
    if plan.costs:
        parts += [stage_table(plan), rank_table(plan)]
    if plan.table:
        parts.append(choice_table(plan))
    return plan_text.plain(parts, width)


def summary_table(plan: PipelinePlan) -> Table:
    """The lines at the head of a plan."""
    on = f" on cluster {plan.cluster}" if plan.cluster else ""
    lines = [
        ("mesh", f"{plan.mesh} ({plan.mesh.size} devices){on}, pipeline axis {plan.axis}{_ranks_text(plan)}"),
        ("schedule", schedule_text(plan)),
        ("gradients", _gradients_text(plan)),
        *(("shares", text) for text in _shares_texts(plan)),
        ("predicted step", step_text(plan)),
        ("memory per device", _memory_text(plan)),
    ]
    if plan.timings:
        spent = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in plan.timings.items())
        lines.append(("planned in", spent))
    table = Table(box=None, show_header=False, title="PipelinePlan", title_justify="left", title_style="bold")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in lines:
        table.add_row(Text(label), Text(value))
    return table


def _ranks_text(plan: PipelinePlan) -> str:
    return f", ranks of {', '.join(map(str, plan.devices))} devices" if plan.devices else ""


def schedule_text(plan: PipelinePlan) -> str:
    """`"1F1B, 8 microbatches, 1 stage per rank"`."""
    stages = "1 stage" if plan.virtual == 1 else f"{plan.virtual} stages"
    batches = "1 microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches"
    return f"{plan.schedule.name}, {batches}, {stages} per rank"


def step_text(plan: PipelinePlan) -> str:
    """`"12.3 ms, of which ranks are idle 8.1 %"`."""
    return f"{format_seconds(plan.step_seconds)}, of which ranks do not compute {plan.bubble:.1%}"


def _gradients_text(plan: PipelinePlan) -> str:
    """When they are reduced."""
    if plan.microbatches == 1:
        return "reduced as they are made"
    stages = [str(stage) for stage in range(plan.schedule.stages) if plan.reduced_at(stage) == "microbatch"]
    often = f"; with every microbatch those that are smaller then, of stages {', '.join(stages)}" if stages else ""
    return f"added up over the microbatches, reduced once per step{often}"


def _shares_texts(plan: PipelinePlan) -> list[str]:
    """For all stages whose ranks take the same shares of a microbatch, what these are; none where all are equal."""
    stages: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        stages.setdefault(shares_text(stage), []).append(index)
    return [f"stages {', '.join(map(str, held))}: {text}" for text, held in stages.items() if text]


def _memory_text(plan: PipelinePlan) -> str:
    if not plan.peaks:
        return "not known"
    rank = max(range(len(plan.peaks)), key=plan.peaks.__getitem__)
    room = plan.capacities[rank] if plan.capacities else 0
    of = f" of {format_bytes(room)}" if room else ""
    return f"peak {format_bytes(plan.peaks[rank])}{of} on rank {rank}{'' if plan.fits else ': does not fit'}"


def stage_table(plan: PipelinePlan) -> Table:
    """What every stage runs, takes and holds, for one microbatch on one device; gradients are reduced once per step."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in ("stage", "rank"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("modules", overflow="fold")
    for label in ("forward", "backward", "reduction", "at rest", "saved", "sent on", "sent back"):
        table.add_column(label, justify="right", no_wrap=True)
    modules = plan.modules or (("", ""),) * len(plan.stages)
    for stage, (rank, (first, last), cost) in enumerate(zip(plan.schedule.placement, modules, plan.costs, strict=True)):
        amounts = (cost.rest_bytes, cost.saved_bytes, cost.forward_bytes, cost.backward_bytes)
        seconds = map(format_seconds, (cost.forward_seconds, cost.backward_seconds, cost.reduction_seconds))
        where = first or "(root)" if first == last else f"{first or '(root)'} to {last or '(root)'}"
        table.add_row(*map(Text, (str(stage), str(rank), where, *seconds, *map(format_bytes, amounts))))
    return table


def rank_table(plan: PipelinePlan) -> Table:
    """What every pipeline rank holds at its peak, and how long it is idle."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in ("rank", "stages", "peak", "not computing"):
        table.add_column(label, justify="right", no_wrap=True)
    placement, step = plan.schedule.placement, plan.simulation
    for rank, (peak, idle) in enumerate(zip(step.peaks, step.idle, strict=True)):
        held = ", ".join(str(stage) for stage, where in enumerate(placement) if where == rank)
        table.add_row(*map(Text, (str(rank), held, format_bytes(peak), f"{idle:.1%}")))
    return table


def choice_table(plan: PipelinePlan) -> Table:
    """The first schedules of the table, the fastest first, and how many more there were."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for label in ("microbatches", "per rank", "step", "peak"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for line in plan.table[:_LINES]:
        step = "" if line.seconds is None else format_seconds(line.seconds)
        peak = "" if line.peak is None else format_bytes(line.peak)
        cells = (line.schedule, str(line.microbatches), str(line.virtual), step, peak, line.verdict)
        table.add_row(*map(Text, cells))
    rest = len(plan.table) - _LINES
    if rest > 0:
        table.add_row(Text(f"{rest} more"))
    return table


def explain(plan: PipelinePlan, path_glob: str) -> str:
    """What `PipelinePlan.explain` returns.

    Raises:
        PlanError: nothing in any stage matches.
    """
    said = [
        f"stage {index}\n{stage.explain(path_glob)}"
        for index, stage in enumerate(plan.stages)
        if plan_text.matches(stage, path_glob)
    ]
    if not said:
        raise plan_text.no_match_error(path_glob, set().union(*map(plan_text.paths, plan.stages)))
    return "\n\n".join(said)
