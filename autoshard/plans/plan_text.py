"""A plan as plain text of limited width: `str(plan)` and `plan.explain(...)`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard.errors import PlanError
from autoshard.names import ancestors, matching, suggestion
from autoshard.plans import plan_rows
from autoshard.plans.plan_rows import TensorRow, WorkRow
from autoshard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoshard.plans.sharding_plan import ShardingPlan

WIDTH = 120
_ROWS = 30


def render(plan: ShardingPlan, width: int = WIDTH) -> str:
    """The plan as tables: summary, parameters, inputs and outputs, collectives; at most `width` characters wide."""
    return plain([summary_table(plan), *tensor_tables(plan), *collective_tables(plan), Text(plan_rows.LEGEND)], width)


def summary_table(plan: ShardingPlan) -> Table:
    """The lines at the head of a plan."""
    table = Table(box=None, show_header=False, title="ShardingPlan", title_justify="left", title_style="bold")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in plan_rows.summary(plan):
        table.add_row(Text(label), Text(value))
    return table


def tensor_tables(plan: ShardingPlan) -> list[Table]:
    """Placements of parameters, inputs and outputs, a column for each mesh axis."""
    parts = (
        ("parameter", plan_rows.parameter_rows(plan)),
        ("input", plan_rows.input_rows(plan)),
        ("output", plan_rows.output_rows(plan)),
    )
    return [_tensor_table(title, rows, plan.mesh.names) for title, rows in parts if rows]


def _tensor_table(title: str, rows: Sequence[TensorRow], axes: Sequence[str]) -> Table:
    shaped = any(row.shape is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, overflow="fold")
    table.add_column("count", justify="right")
    if shaped:
        table.add_column("shape", overflow="fold")
    for axis in axes:
        table.add_column(Text(axis), no_wrap=True)
    gathered = any(row.gathered for row in rows)
    if gathered:
        table.add_column("gathered", no_wrap=True)
    for row in rows:
        shape = ["x".join(map(str, row.shape)) if row.shape else "scalar"] if shaped else []
        how = [row.gathered] if gathered else []
        table.add_row(*map(Text, (row.name, str(row.count), *shape, *row.placements, *how)))
    return table


def collective_tables(plan: ShardingPlan) -> list[Table]:
    """The collectives of a step, those that take most time first; none where there are none."""
    rows = plan_rows.collective_rows(plan.collectives)
    return [_work_table(("collective", "axis", "phase"), rows, by="bytes", limit=_ROWS)] if rows else []


def _work_table(labels: Sequence[str], rows: Sequence[WorkRow], by: str = "", limit: int | None = None) -> Table:
    """Rows under their labels, with a column of bytes where `by` names it; the sum of what is over `limit` last."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in labels:
        table.add_column(label, overflow="fold")
    table.add_column("module", overflow="fold")
    for label in ("count", by, "time"):
        if label:
            table.add_column(label, justify="right", no_wrap=True)
    shown, rest = rows[:limit], rows[len(rows[:limit]) :]
    if rest:
        left = WorkRow(("...", *[""] * (len(labels) - 1)), f"{len(rest)} more", *_total(rest))
        shown = (*shown, left)
    for row in shown:
        size = [format_bytes(row.bytes)] if by else []
        cells = (*row.labels, row.module or "(root)", str(row.count), *size, format_seconds(row.seconds))
        table.add_row(*map(Text, cells))
    return table


def _total(rows: Iterable[WorkRow]) -> tuple[int, int, float]:
    rows = tuple(rows)
    return sum(row.count for row in rows), sum(row.bytes for row in rows), sum(row.seconds for row in rows)


def explain(plan: ShardingPlan, path_glob: str, width: int = WIDTH) -> str:
    """What `ShardingPlan.explain` returns.

    Raises:
        PlanError: no parameter, operator or collective of the plan is at a path that the glob matches.
    """
    return plain(explanation(plan, path_glob), width)


def explanation(plan: ShardingPlan, path_glob: str) -> list[Table | Text]:
    """The tables of `explain`."""
    names = [name for name in plan.placements if _under(path_glob, name)]
    at = {name.rpartition(".")[0] for name in names}
    covered = {module for module in _modules(plan) if module in at or _under(path_glob, module)}
    if not names and not covered:
        raise no_match_error(path_glob, paths(plan))
    return [
        *_explained_parameters(plan, names),
        *_explained_hints(plan, names),
        *_explained_work(plan, covered),
        Text(plan_rows.STRATEGY_LEGEND),
    ]


def paths(plan: ShardingPlan) -> set[str]:
    """What `explain` can be asked of: names of parameters, and paths of modules."""
    above = (path for name in plan.placements for path in ancestors(name))
    return {*plan.placements, *_modules(plan), *above} - {""}


def no_match_error(path_glob: str, known: set[str]) -> PlanError:
    """The error that says that no path matches, with those that come near."""
    return PlanError(
        f"nothing in the plan is at {path_glob!r}: no parameter and no module matches. {suggestion(path_glob, known)}"
    )


def matches(plan: ShardingPlan, path_glob: str) -> bool:
    """Whether `explain` has something to say."""
    return any(_under(path_glob, path) for path in paths(plan))


def _modules(plan: ShardingPlan) -> set[str]:
    """Paths of the modules whose operators or collectives the plan tells of."""
    return {one.module for one in plan.choices} | {one.module for one in plan.collectives}


def _under(glob: str, path: str) -> bool:
    """Whether the glob matches the path or a module above it."""
    return bool(path) and bool(matching(glob, (path, *ancestors(path))))


def _explained_parameters(plan: ShardingPlan, names: Sequence[str]) -> list[Table | Text]:
    chosen = set(names)
    placements = {name: row for name, row in plan.placements.items() if name in chosen}
    rows = plan_rows.tensor_rows(placements, plan.shapes, plan.gathered)
    return [_tensor_table("parameter", rows, plan.mesh.names)] if rows else []


def _explained_hints(plan: ShardingPlan, names: Sequence[str]) -> list[Table | Text]:
    """The hints that pinned any of these parameters."""
    used = {hint: pinned for hint, pinned in plan.hints.items() if any(_under(hint, name) for name in names)}
    return [Text(f"pinned by the hint {hint!r}: {pinned}") for hint, pinned in used.items()]


def _explained_work(plan: ShardingPlan, modules: set[str]) -> list[Table | Text]:
    """Operators and collectives of these modules."""
    parts: list[Table | Text] = []
    operators = plan_rows.operator_rows(one for one in plan.choices if one.module in modules)
    if operators:
        parts.append(_work_table(("operator", "phase", "strategy"), operators))
    collectives = plan_rows.collective_rows(one for one in plan.collectives if one.module in modules)
    if collectives:
        parts.append(_work_table(("collective", "axis", "phase"), collectives, by="bytes"))
    else:
        parts.append(Text("no collectives here"))
    compute, sent = (format_seconds(_total(rows)[2]) for rows in (operators, collectives))
    parts.append(Text(f"predicted: operators {compute}, collectives {sent}"))
    return parts


def plain(parts: Iterable[Table | Text], width: int) -> str:
    """Tables as text of limited width, without colours or trailing blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")
