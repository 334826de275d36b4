"""The HTML page of a `PipelinePlan`: the picture of its step, its stages and ranks, and the sharding of every stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.pipeline.plan.pipeline_tables import (
    RANK_LABELS,
    SCHEDULE_LABELS,
    STAGE_LABELS,
    rank_rows,
    schedule_rows,
    stage_rows,
)
from autoshard.pipeline.schedule.actions import Schedule
from autoshard.pipeline.schedule.costs import Simulation, StageCosts
from autoshard.pipeline.schedule.schedule_search import ESTIMATED, ScheduleCandidate
from autoshard.plans.candidate_figures import CandidateRow, candidates_figure
from autoshard.plans.html import Figure, Fold, Part, Section, View, cards, document, facts_table, text_table
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_page import as_parts, plan_sections
from autoshard.plans.step_figures import MARGIN, bars, limit_marks, peak_note
from autoshard.plans.step_picture import gantt
from autoshard.simulate.events import COMPUTE
from autoshard.units import byte_unit, format_bytes, format_seconds, second_unit

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParts:
    """The parts of a pipeline's plan that its page shows; attributes are those of `PipelinePlan`, where not described.

    Attributes:
        summary: labels and values of the head of the plan.
        modules: for every stage, its first and its last module.
        step: the simulated step; None for a plan without costs.
        candidates: for the schedule.
    """

    stages: Sequence[PlanContents]
    summary: Sequence[tuple[str, str]]
    modules: Sequence[tuple[str, str]]
    costs: Sequence[StageCosts]
    step: Simulation | None
    capacities: Sequence[int]
    candidates: Sequence[ScheduleCandidate]
    schedule: Schedule
    step_seconds: float
    bubble: float
    peaks: Sequence[int]


def page(title: str, plan: PipelineParts) -> str:
    """Return the page of a pipeline's plan."""
    return document(title, _cards(plan), pipeline_sections(plan))


def pipeline_sections(plan: PipelineParts) -> list[Section]:
    """Return the sections of a pipeline's plan.

    They are the predicted step, its summary, the costs of stages, the memory of ranks, all candidates for the schedule,
    and, folded up, the sharding plan of every stage.
    """
    sections = [Section("Summary", [facts_table(plan.summary)])]
    # Plans that are built by hand may have no costs, and then no predicted step.
    if plan.step is not None:
        rows = stage_rows(plan.schedule.placement, plan.modules, plan.costs)
        listed = text_table(STAGE_LABELS, rows, texts=("modules",))
        sections = [
            Section("Step", [_step_figure(plan.step), _memory_figure(plan, plan.step)]),
            *sections,
            Section("Stages", ["<p>One microbatch on one device.</p>", listed]),
            Section("Pipeline ranks", [text_table(RANK_LABELS, rank_rows(plan.step))]),
        ]
    if plan.candidates:
        rows = schedule_rows(plan.candidates)
        listed = text_table(SCHEDULE_LABELS, rows, texts=("schedule", "verdict"))
        parts: list[Part] = [listed] if len(plan.candidates) <= 30 else [Fold(f"{len(plan.candidates)} rows", [listed])]
        sections.append(Section("Schedules", [*_schedules_figure(plan), *parts]))
    stages = [
        Fold(
            f"Stage {index}: {first or '(root)'} to {last or '(root)'}",
            as_parts(plan_sections(stage, prefix=f"stage-{index}-")),
        )
        for index, (stage, (first, last)) in enumerate(zip(plan.stages, plan.modules, strict=True))
    ]
    return [*sections, Section("Sharding of the stages", stages)]


def _cards(plan: PipelineParts) -> str:
    figures = [("Predicted step", format_seconds(plan.step_seconds), f"ranks do not compute {plan.bubble:.1%}")]
    if plan.peaks:
        rank = max(range(len(plan.peaks)), key=plan.peaks.__getitem__)
        capacity = plan.capacities[rank] if plan.capacities else 0
        of = f"of {format_bytes(capacity)} on rank {rank}" if capacity else f"on rank {rank}"
        figures.append(("Peak of one device", format_bytes(plan.peaks[rank]), of))
    schedule = plan.schedule
    figures.append(("Stages", str(schedule.stages), f"on {schedule.ranks} pipeline ranks"))
    figures.append(("Schedule", schedule.name, f"{schedule.microbatches} microbatches"))
    return cards(figures)


def _step_figure(step: Simulation) -> Figure:
    """Return a timeline with two rows for every rank: its compute, and its messages and reductions."""
    unit, second = second_unit(step.seconds)
    ranks = range(step.schedule.ranks)
    names = [row for rank in ranks for row in (f"rank {rank}", f"messages of {rank}")]
    rows: dict[str, list[tuple[str, float, float, str, str]]] = {}
    for task, start, end in zip(step.tasks, step.starts, step.ends, strict=True):
        # Both ranks of a message are busy with it. Nothing is drawn of tasks that take no time.
        for rank in task.ranks if end > start else ():
            row = f"rank {rank}" if task.stream == COMPUTE else f"messages of {rank}"
            text = f"<b>{task.name}</b>: {task.kind}<br>{format_seconds(end - start)}"
            rows.setdefault(task.kind, []).append((row, start, end, text, task.label))
    data: list[dict[str, Any]] = []
    for kind, found in rows.items():
        spans, texts = [(start, end) for _, start, end, *_ in found], [text for *_, text, _ in found]
        labels = [label for *_, label in found]
        colour = f"var(--{_KIND_COLOURS.get(kind, 'shift')})"
        data.append(bars(kind, colour, [row for row, *_ in found], spans, second, texts, labels))
        if any(labels):
            # A microbatch ends where the next one begins. Messages are too short for lines round them.
            data[-1]["marker"]["line"] = {"width": 0.7, "color": "var(--surface)"}
    layout = {
        "margin": {**MARGIN, "t": 40, "b": 40},
        "barmode": "overlay",
        "bargap": 0.12,
        "uniformtext": {"mode": "hide", "minsize": 9},
        "xaxis": {"range": [0, step.seconds / second], "title": {"text": f"time [{unit}]"}},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names,
            "range": [len(names) - 0.4, -0.6],
            "tickvals": [f"rank {rank}" for rank in ranks],
            "fixedrange": True,
            "showgrid": False,
        },
    }
    whole = (0.0, step.seconds / second)
    return Figure(
        "timeline",
        f"Timeline of {len(ranks)} pipeline ranks: a bar for every microbatch of a stage, and messages below",
        (View("timeline", data, layout),),
        110 + 50 * len(ranks),
        "Numbers are microbatches. The narrow row below each rank has its messages and its reductions of gradients.",
        {"Whole step": whole, "First quarter": (0.0, whole[1] / 4), "Last quarter": (whole[1] * 3 / 4, whole[1])},
        "step",
        f'<div class="wide picture">{gantt(step.tasks, step.starts, step.ends)}</div>',
    )


def _memory_figure(plan: PipelineParts, step: Simulation) -> Figure:
    """Return the bytes of one device of every rank over the step, with their limits."""
    peak = max(step.peaks)
    unit, size = byte_unit(peak)
    time, second = second_unit(step.seconds)
    data = []
    for rank, moments in enumerate(step.memory):
        # What is held at the end stays until the step's end.
        points = [*_drawn_moments(moments), (step.seconds, moments[-1][1])]
        colour = f"var(--placement-{1 + rank % 7})"
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"rank {rank}",
                "x": [moment / second for moment, _ in points],
                "y": [held / size for _, held in points],
                "line": {"shape": "hv", "color": colour, "width": 2, "dash": "solid" if rank < 7 else "dot"},
                "hovertemplate": f"%{{y:.3f}} {unit}",
            }
        )
    rank = step.peaks.index(peak)
    moment = next(moment for moment, held in step.memory[rank] if held == peak)
    note = peak_note(moment / second, peak / size, f"peak of rank {rank}: {format_bytes(peak)}", step.seconds / second)
    marks, top, caption = limit_marks(plan.capacities, peak, size, "limit")
    layout = {
        "margin": {**MARGIN, "t": 40, "b": 40},
        "hovermode": "x unified",
        "xaxis": {"range": [0, step.seconds / second], "title": {"text": f"time [{time}]"}, "hoverformat": ".4f"},
        "yaxis": {"range": [0, top], "fixedrange": True, "title": {"text": f"one device [{unit}]"}},
        "shapes": marks["shapes"],
        "annotations": [note, *marks["annotations"]],
    }
    label = f"Memory of one device of every pipeline rank over the step, at most {format_bytes(peak)}"
    return Figure("memory", label, (View("memory", data, layout),), 380, caption, group="step")


def _drawn_moments(moments: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Yield the most and the last that is held at every time; between two tasks, less is held for no time."""
    for time, group in itertools.groupby(moments, key=lambda moment: moment[0]):
        amounts = [held for _, held in group]
        if max(amounts) > amounts[-1]:
            yield time, max(amounts)
        yield time, amounts[-1]


def _schedules_figure(plan: PipelineParts) -> Iterator[Figure]:
    capacity = min((capacity for capacity in plan.capacities if capacity), default=0)
    size = plan.schedule.name, plan.schedule.microbatches, plan.schedule.virtual
    rows: dict[str, CandidateRow] = {}
    for line in plan.candidates:
        per_rank = f", {line.virtual} stages per rank" if line.virtual > 1 else ""
        name = f"{line.schedule}, {line.microbatches} microbatches{per_rank}"
        is_chosen = (line.schedule, line.microbatches, line.virtual) == size
        row = CandidateRow(
            name, line.seconds, None, line.peak, capacity, line.verdict, is_chosen, ESTIMATED in line.verdict
        )
        rows.setdefault(name, row)
    return candidates_figure(list(rows.values()))
