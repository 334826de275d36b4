"""The HTML page of a `PipelinePlan`: the picture of its step, its stages and ranks, and the sharding of every stage."""

from __future__ import annotations

from html import escape

from autoshard.pipeline.plan.pipeline_plan import (
    RANK_LABELS,
    SCHEDULE_LABELS,
    STAGE_LABELS,
    PipelinePlan,
    rank_rows,
    schedule_rows,
    stage_rows,
)
from autoshard.plans.html import document, facts_table, gantt, plan_sections, text_table


def page(plan: PipelinePlan) -> str:
    """Return the plan as an HTML page that loads nothing else.

    It has the summary, the predicted step as a picture, the costs of stages, the memory of ranks, all candidates for
    the schedule, and, folded up, the sharding plan of every stage.
    """
    sections = [facts_table(plan.summary())]
    # Plans that are built by hand may have no costs, and then no predicted step.
    if plan.costs:
        step = plan.simulation
        rows = stage_rows(plan.schedule.placement, plan.stage_modules, plan.costs)
        sections += [
            f'<h2>Predicted step</h2>\n<div class="wide">{gantt(step.tasks, step.starts, step.ends)}</div>',
            f"<h2>Stages, one microbatch on one device</h2>\n{text_table(STAGE_LABELS, rows, texts=('modules',))}",
            f"<h2>Pipeline ranks</h2>\n{text_table(RANK_LABELS, rank_rows(step))}",
        ]
    if plan.table:
        rows = schedule_rows(plan.table)
        sections.append(f"<h2>Schedules</h2>\n{text_table(SCHEDULE_LABELS, rows, texts=('schedule', 'verdict'))}")
    sections.append("<h2>Sharding of the stages</h2>")
    for index, (stage, (first, last)) in enumerate(zip(plan.stages, plan.stage_modules, strict=True)):
        modules = escape(f"{first or '(root)'} to {last or '(root)'}")
        content = "\n".join(section for section in plan_sections(stage) if section)
        sections.append(f"<details><summary>Stage {index}: {modules}</summary>\n{content}\n</details>")
    return document(f"Pipeline plan: {plan.mesh}", sections)
