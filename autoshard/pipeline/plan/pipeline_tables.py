"""The rows of a pipeline's plan, and its tables for terminals; its web page is made of the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from autoshard.pipeline.schedule.costs import Simulation, StageCosts
from autoshard.pipeline.schedule.schedule_search import ScheduleCandidate
from autoshard.units import format_bytes, format_seconds

# Schedules that are listed.
_LINES = 12

STAGE_LABELS = (
    *("stage", "rank", "modules", "forward", "backward", "reduction"),
    *("at rest", "saved", "sent on", "sent back"),
)
RANK_LABELS = ("rank", "stages", "peak", "not computing")
SCHEDULE_LABELS = ("schedule", "microbatches", "per rank", "step", "peak", "verdict")


def _rows_table(labels: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table of rows: sentences are folded, all else stays on its line, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in labels:
        if label in ("modules", "verdict"):
            table.add_column(label, overflow="fold")
        else:
            table.add_column(label, justify="left" if label == "schedule" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


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
    return _rows_table(STAGE_LABELS, stage_rows(placement, modules, costs))


def stage_rows(
    placement: Sequence[int], modules: Sequence[tuple[str, str]], costs: Sequence[StageCosts]
) -> Iterator[tuple[str, ...]]:
    """Yield the texts of `STAGE_LABELS` for every stage."""
    for stage, (rank, (first, last), cost) in enumerate(zip(placement, modules, costs, strict=True)):
        amounts = (cost.rest_bytes, cost.saved_bytes, cost.forward_bytes, cost.backward_bytes)
        seconds = map(format_seconds, (cost.forward_seconds, cost.backward_seconds, cost.reduction_seconds))
        where = first or "(root)" if first == last else f"{first or '(root)'} to {last or '(root)'}"
        yield (str(stage), str(rank), where, *seconds, *map(format_bytes, amounts))


def rank_table(step: Simulation) -> Table:
    """Return the peak memory and the idle share of every pipeline rank."""
    return _rows_table(RANK_LABELS, rank_rows(step))


def rank_rows(step: Simulation) -> Iterator[tuple[str, ...]]:
    """Yield the texts of `RANK_LABELS` for every pipeline rank."""
    placement = step.schedule.placement
    for rank, (peak, idle) in enumerate(zip(step.peaks, step.idle, strict=True)):
        held = ", ".join(str(stage) for stage, holder in enumerate(placement) if holder == rank)
        yield str(rank), held, format_bytes(peak), f"{idle:.1%}"


def choice_table(candidates: Sequence[ScheduleCandidate]) -> Table:
    """Return the fastest schedules with their verdicts, and the number of all others."""
    table = _rows_table(SCHEDULE_LABELS, schedule_rows(candidates[:_LINES]))
    rest = len(candidates) - _LINES
    if rest > 0:
        table.add_row(Text(f"{rest} more"))
    return table


def schedule_rows(candidates: Iterable[ScheduleCandidate]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of `SCHEDULE_LABELS` for every schedule."""
    for line in candidates:
        step = "" if line.seconds is None else format_seconds(line.seconds)
        peak = "" if line.peak is None else format_bytes(line.peak)
        yield line.schedule, str(line.microbatches), str(line.virtual), step, peak, line.verdict
