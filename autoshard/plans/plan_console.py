"""A plan on a terminal, with rich."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plans import plan_rows, plan_text
from autoshard.plans.sharding_plan import ShardingPlan

_SHARDED, _PARTIAL = "cyan", "magenta"


def plan_table(plan: ShardingPlan) -> Group:
    """Everything that `str(plan)` says, with colours, as wide as the console that prints it."""
    tables = [plan_text.summary_table(plan), *plan_text.tensor_tables(plan), *plan_text.collective_tables(plan)]
    return Group(*map(_colour_placements, tables), Text(plan_rows.LEGEND, style="dim"))


def explanation_table(plan: ShardingPlan, path_glob: str) -> Group:
    """What `plan.explain(path_glob)` says, with colours; `PlanError` where nothing matches."""
    return Group(*map(_colour_placements, plan_text.explanation(plan, path_glob)))


def _colour_placements(part: Table | Text) -> RenderableType:
    """The part with its placements coloured, sharded and partial ones apart from replicated ones."""
    if isinstance(part, Table):
        for column in part.columns:
            for cell in column.cells:
                _colour(cell)
    return part


def _colour(cell: RenderableType) -> None:
    if isinstance(cell, Text):
        cell.highlight_regex(r"\bS\(\d+(,f=\d+)?\)", _SHARDED)
        cell.highlight_regex(r"\bP\(\w+\)", _PARTIAL)
