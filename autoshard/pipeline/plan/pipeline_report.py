"""The report of a `PipelinePlan`: the picture of its step, its stages and ranks, and the sharding of every stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autoshard.pipeline.schedule.actions import Schedule
from autoshard.pipeline.schedule.costs import Simulation, StageCosts
from autoshard.pipeline.schedule.schedule_search import ESTIMATED, ScheduleCandidate
from autoshard.plans.candidate_chart import CandidateRow, candidates_chart
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_report import plan_report
from autoshard.plans.step_charts import Call, call_bars, limit_marks, peak_point
from autoshard.report import Axis, Chart, Plot, Section, Series, Table, numbers, texts
from autoshard.simulate.events import COMPUTE
from autoshard.units import format_bytes, format_seconds

_KIND_COLOURS = {
    "forward": "forward",
    "backward": "backward",
    "input backward": "backward",
    "weight backward": "temporary",
    "application": "update",
    "reduction": "all_reduce",
    "send forward": "all_gather",
    "send backward": "reduce_scatter",
}
_SCHEDULES = 12  # schedules listed in text


def step_sections(
    step: Simulation, capacities: Sequence[int], modules: Sequence[tuple[str, str]], costs: Sequence[StageCosts]
) -> Iterator[Section]:
    """Yield the predicted step, the costs of stages, and the memory of ranks.

    Args:
        step: the simulated step.
        capacities: for every rank, the bytes of one of its devices; 0 if unknown.
        modules: for every stage, its first and its last module.
        costs: the costs of every stage.
    """
    yield Section.detail("Step", [_step_chart(step), _memory_chart(step, capacities)])
    stages = _stage_table(step.schedule.placement, modules, costs)
    yield Section("Stages, for one microbatch on one device", (stages,))
    yield Section("Pipeline ranks", (_rank_table(step),))


def schedules_section(chosen: Schedule, candidates: Sequence[ScheduleCandidate], capacities: Sequence[int]) -> Section:
    """Return the candidates for the schedule."""
    if not candidates:
        return Section("Schedules", ())
    return Section("Schedules", (*_schedules_chart(chosen, candidates, capacities), _schedule_table(candidates)))


def stages_section(stages: Sequence[PlanContents], modules: Sequence[tuple[str, str]]) -> Section:
    """Return the sharding plan of every stage, folded."""
    folds = (
        Section.detail(
            f"Stage {index}: {first or '(root)'} to {last or '(root)'}",
            plan_report(stage, f"stage-{index}-").details(),
            is_folded=True,
        )
        for index, (stage, (first, last)) in enumerate(zip(stages, modules, strict=True))
    )
    return Section.detail("Sharding of the stages", folds)


def _stage_table(placement: Sequence[int], modules: Sequence[tuple[str, str]], costs: Sequence[StageCosts]) -> Table:
    """Return the rank, the modules and the costs of every stage, for one microbatch on one device.

    Gradients are reduced once per step.
    """
    rows = []
    for stage, (rank, (first, last), cost) in enumerate(zip(placement, modules, costs, strict=True)):
        amounts = (cost.rest_bytes, cost.saved_bytes, cost.forward_bytes, cost.backward_bytes)
        seconds = map(format_seconds, (cost.forward_seconds, cost.backward_seconds, cost.reduction_seconds))
        where = first or "(root)" if first == last else f"{first or '(root)'} to {last or '(root)'}"
        rows.append((str(stage), str(rank), where, *seconds, *map(format_bytes, amounts)))
    columns = (
        *numbers("stage", "rank"),
        *texts("modules"),
        *numbers("forward", "backward", "reduction", "at rest", "saved", "sent on", "sent back"),
    )
    return Table.of(columns, rows, most=100)


def _rank_table(step: Simulation) -> Table:
    """Return the peak memory and the idle share of every pipeline rank."""
    rows = []
    for rank, (peak, idle) in enumerate(zip(step.peaks, step.idle, strict=True)):
        held = ", ".join(str(stage) for stage, holder in enumerate(step.schedule.placement) if holder == rank)
        rows.append((str(rank), held, format_bytes(peak), f"{idle:.1%}"))
    return Table.of(numbers("rank", "stages", "peak", "not computing"), rows, most=100)


def _schedule_table(candidates: Sequence[ScheduleCandidate]) -> Table:
    """Return the schedules with their verdicts, the fastest first."""
    rows = (
        (
            line.schedule,
            str(line.microbatches),
            str(line.virtual),
            "" if line.seconds is None else format_seconds(line.seconds),
            "" if line.peak is None else format_bytes(line.peak),
            line.verdict,
        )
        for line in candidates
    )
    others = len(candidates) - _SCHEDULES
    rest = (f"{others} more", *[""] * 5) if others > 0 else ()
    columns = (*texts("schedule"), *numbers("microbatches", "per rank", "step", "peak"), *texts("verdict"))
    return Table.of(columns, rows, rest=rest, most=_SCHEDULES)


def _step_chart(step: Simulation) -> Chart:
    """Return a timeline with two rows for every rank: its compute, and its messages and reductions."""
    ranks = range(step.schedule.ranks)
    calls: dict[str, list[Call]] = {}
    for task, start, end in zip(step.tasks, step.starts, step.ends, strict=True):
        # Both ranks of a message are busy with it. Tasks that take no time are not drawn.
        for rank in task.ranks if end > start else ():
            row = f"rank {rank}" if task.stream == COMPUTE else f"messages of {rank}"
            note = f"{task.name}: {task.kind}\n{format_seconds(end - start)}"
            calls.setdefault(task.kind, []).append((row, start, end, note, task.label))
    plot = Plot(
        "timeline",
        Axis("time", "seconds", ends=(0.0, step.seconds)),
        Axis(categories=tuple(row for rank in ranks for row in (f"rank {rank}", f"messages of {rank}"))),
        tuple(call_bars(kind, _KIND_COLOURS.get(kind, "shift"), of_kind) for kind, of_kind in calls.items()),
    )
    end = step.seconds
    return Chart(
        "timeline",
        f"Timeline of {len(ranks)} pipeline ranks: a bar for every microbatch of a stage, and messages below",
        (plot,),
        110 + 50 * len(ranks),
        "Numbers are microbatches. The row below each rank has its messages and its reductions of gradients.",
        (("Whole step", 0.0, end), ("First quarter", 0.0, end / 4), ("Last quarter", end * 3 / 4, end)),
        "step",
    )


def _memory_chart(step: Simulation, capacities: Sequence[int]) -> Chart:
    """Return the bytes of one device of every rank over the step, with their limits."""
    peak = max(step.peaks)
    lines = []
    for rank, moments in enumerate(step.memory):
        # What is held at the last time is held to the end of the step.
        points = [*_drawn_moments(moments), (step.seconds, moments[-1][1])]
        times, held = zip(*points, strict=True)
        lines.append(Series(f"rank {rank}", f"placement-{1 + rank % 7}", "steps", times, held, is_dashed=rank >= 7))
    rank = step.peaks.index(peak)
    moment = next(moment for moment, amount in step.memory[rank] if amount == peak)
    marks, caption = limit_marks(capacities, peak, "limit")
    plot = Plot(
        "memory",
        Axis("time", "seconds", ends=(0.0, step.seconds)),
        Axis("one device", "bytes"),
        (*lines, peak_point(moment, peak, f"peak of rank {rank}: {format_bytes(peak)}")),
        marks,
    )
    label = f"Memory of one device of every pipeline rank over the step, at most {format_bytes(peak)}"
    return Chart("memory", label, (plot,), 380, caption, group="step")


def _drawn_moments(moments: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Yield the maximum and the last bytes at every time: lower values between two tasks last no time."""
    for time, group in itertools.groupby(moments, key=lambda moment: moment[0]):
        amounts = [held for _, held in group]
        if max(amounts) > amounts[-1]:
            yield time, max(amounts)
        yield time, amounts[-1]


def _schedules_chart(
    chosen: Schedule, candidates: Sequence[ScheduleCandidate], capacities: Sequence[int]
) -> Iterator[Chart]:
    capacity = min((capacity for capacity in capacities if capacity), default=0)
    size = chosen.name, chosen.microbatches, chosen.virtual
    rows: dict[str, CandidateRow] = {}
    for line in candidates:
        per_rank = f", {line.virtual} stages per rank" if line.virtual > 1 else ""
        name = f"{line.schedule}, {line.microbatches} microbatches{per_rank}"
        is_chosen = (line.schedule, line.microbatches, line.virtual) == size
        row = CandidateRow(
            name, line.seconds, None, line.peak, capacity, line.verdict, is_chosen, ESTIMATED in line.verdict
        )
        rows.setdefault(name, row)
    return candidates_chart(list(rows.values()))
