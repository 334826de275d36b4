"""Tables of a pipeline's plan: its stages, its pipeline ranks, and the schedules it was chosen from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_search import ScheduleCandidate
from autoshard.pipeline.schedule.simulation import Simulation
from autoshard.units import format_bytes, format_seconds

_LINES = 12
"""Schedules that are listed."""


def summary_table(lines: Iterable[tuple[str, str]]) -> Table:
    """Return the labelled lines at the head of a plan."""
    table = Table(box=None, show_header=False, title="PipelinePlan", title_justify="left", title_style="bold")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in lines:
        table.add_row(Text(label), Text(value))
    return table


def stage_table(placement: Sequence[int], modules: Sequence[tuple[str, str]], costs: Sequence[StageCosts]) -> Table:
    """Return the rank, the modules and the costs of every stage, for one microbatch on one device.

    Gradients are reduced once per step.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in ("stage", "rank"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("modules", overflow="fold")
    for label in ("forward", "backward", "reduction", "at rest", "saved", "sent on", "sent back"):
        table.add_column(label, justify="right", no_wrap=True)
    for stage, (rank, (first, last), cost) in enumerate(zip(placement, modules, costs, strict=True)):
        amounts = (cost.rest_bytes, cost.saved_bytes, cost.forward_bytes, cost.backward_bytes)
        seconds = map(format_seconds, (cost.forward_seconds, cost.backward_seconds, cost.reduction_seconds))
        where = first or "(root)" if first == last else f"{first or '(root)'} to {last or '(root)'}"
        table.add_row(*map(Text, (str(stage), str(rank), where, *seconds, *map(format_bytes, amounts))))
    return table


def rank_table(step: Simulation) -> Table:
    """Return the peak memory and the idle share of every pipeline rank."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in ("rank", "stages", "peak", "not computing"):
        table.add_column(label, justify="right", no_wrap=True)
    placement = step.graph.schedule.placement
    for rank, (peak, idle) in enumerate(zip(step.peaks, step.idle, strict=True)):
        held = ", ".join(str(stage) for stage, holder in enumerate(placement) if holder == rank)
        table.add_row(*map(Text, (str(rank), held, format_bytes(peak), f"{idle:.1%}")))
    return table


def choice_table(candidates: Sequence[ScheduleCandidate]) -> Table:
    """Return the fastest schedules with their verdicts, and the number of all others."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for label in ("microbatches", "per rank", "step", "peak"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for line in candidates[:_LINES]:
        step = "" if line.seconds is None else format_seconds(line.seconds)
        peak = "" if line.peak is None else format_bytes(line.peak)
        cells = (line.schedule, str(line.microbatches), str(line.virtual), step, peak, line.verdict)
        table.add_row(*map(Text, cells))
    rest = len(candidates) - _LINES
    if rest > 0:
        table.add_row(Text(f"{rest} more"))
    return table
