"""A plan as rich tables: plain text for `str(plan)` and `plan.explain(...)`, colours for a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.errors import PlanError
from autoshard.names import ancestors, matching, suggestion
from autoshard.plans import plan_rows
from autoshard.plans.contents import PlanContents
from autoshard.plans.plan_rows import TensorRow, WorkRow
from autoshard.units import format_bytes, format_seconds

WIDTH = 120
_COLLECTIVE = ("collective", "axis", "phase")
# Collectives listed by `str(plan)`; the others are summed up in one row.
_ROWS = 30


def render(plan: PlanContents, width: int = WIDTH) -> str:
    """Return the plan as tables, at most `width` characters wide: summary, parameters, inputs, outputs, collectives."""
    return plain(_parts(plan), width)


def plan_table(plan: PlanContents) -> Group:
    """Return the content of `str(plan)` with colours, as wide as the console that prints it."""
    *tables, legend = _parts(plan)
    return Group(*map(_colour_placements, tables), Text(str(legend), style="dim"))


def _parts(plan: PlanContents) -> list[Table | Text]:
    summary = Table(box=None, show_header=False, title="ShardingPlan", title_justify="left", title_style="bold")
    summary.add_column(style="bold")
    summary.add_column(overflow="fold")
    for label, value in plan_rows.summary(plan):
        # As Text, for brackets in a string are markup to rich.
        summary.add_row(Text(label), Text(value))
    tensors = [_tensor_table(kind, rows, plan.mesh.names) for kind, rows in plan_rows.plan_tensors(plan).items()]
    collectives = plan_rows.collective_rows(plan.collectives)
    sent = [_work_table(_COLLECTIVE, collectives, by="bytes", limit=_ROWS)] if collectives else []
    return [summary, *tensors, *sent, Text(plan_rows.LEGEND)]


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


def _work_table(labels: Sequence[str], rows: Sequence[WorkRow], by: str = "", limit: int | None = None) -> Table:
    """Return a table of rows; with a column of bytes where `by` names it, and the sum of the rows over `limit` last."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in labels:
        table.add_column(label, overflow="fold")
    table.add_column("module", overflow="fold")
    for label in ("count", by, "time"):
        if label:
            table.add_column(label, justify="right", no_wrap=True)
    omitted = rows[limit:] if limit is not None else ()
    shown = list(rows[:limit])
    if omitted:
        shown.append(WorkRow(("...", *[""] * (len(labels) - 1)), f"{len(omitted)} more", *_total(omitted)))
    for row in shown:
        size = [format_bytes(row.bytes)] if by else []
        cells = (*row.labels, row.module or "(root)", str(row.count), *size, format_seconds(row.seconds))
        # As Text here too: names of strategies have brackets.
        table.add_row(*map(Text, cells))
    return table


def _total(rows: Sequence[WorkRow]) -> tuple[int, int, float]:
    return sum(row.count for row in rows), sum(row.bytes for row in rows), sum(row.seconds for row in rows)


def explain(plan: PlanContents, path_glob: str, width: int = WIDTH) -> str:
    """Return the text of `ShardingPlan.explain`.

    Raises:
        PlanError: no parameter, operator or collective of the plan is at a path that the glob matches.
    """
    return plain(_explanation(plan, path_glob), width)


def explanation_table(plan: PlanContents, path_glob: str) -> Group:
    """Return the content of `explain` with colours; `PlanError` where nothing matches."""
    return Group(*map(_colour_placements, _explanation(plan, path_glob)))


def _explanation(plan: PlanContents, path_glob: str) -> list[Table | Text]:
    names = {name for name in plan.placements if _under(path_glob, name)}
    owners = {name.rpartition(".")[0] for name in names}
    # A parameter's operators stand under the module that owns it.
    modules = {module for module in _modules(plan) if module in owners or _under(path_glob, module)}
    if not names and not modules:
        raise no_match_error(path_glob, paths(plan))
    parts: list[Table | Text] = []
    placements = {name: row for name, row in plan.placements.items() if name in names}
    if placements:
        rows = plan_rows.tensor_rows(placements, plan.shapes, plan.gathered)
        parts.append(_tensor_table("parameter", rows, plan.mesh.names))
    for hint, pinned in plan.hints.items():
        if any(_under(hint, name) for name in names):
            parts.append(Text(f"pinned by the hint {hint!r}: {pinned}"))
    return [*parts, *_explained_work(plan, modules), Text(plan_rows.STRATEGY_LEGEND)]


def _explained_work(plan: PlanContents, modules: set[str]) -> list[Table | Text]:
    """Return the tables of the operators and collectives of these modules."""
    parts: list[Table | Text] = []
    operators = plan_rows.operator_rows(choice for choice in plan.choices if choice.module in modules)
    if operators:
        parts.append(_work_table(("operator", "phase", "strategy"), operators))
    collectives = plan_rows.collective_rows(sent for sent in plan.collectives if sent.module in modules)
    parts.append(_work_table(_COLLECTIVE, collectives, by="bytes") if collectives else Text("no collectives here"))
    compute, communication = (format_seconds(_total(rows)[2]) for rows in (operators, collectives))
    return [*parts, Text(f"predicted: operators {compute}, collectives {communication}")]


def paths(plan: PlanContents) -> set[str]:
    """Return the paths that `explain` knows: names of parameters, and paths of modules."""
    above = (path for name in plan.placements for path in ancestors(name))
    return {*plan.placements, *_modules(plan), *above} - {""}


def no_match_error(path_glob: str, known_paths: set[str]) -> PlanError:
    """Return the error that says that no path matches, with those that come near."""
    return PlanError(
        f"nothing in the plan is at {path_glob!r}: no parameter and no module matches. "
        f"{suggestion(path_glob, known_paths)}"
    )


def matches(plan: PlanContents, path_glob: str) -> bool:
    """Return True if the glob matches a path that `explain` knows."""
    return any(_under(path_glob, path) for path in paths(plan))


def _modules(plan: PlanContents) -> set[str]:
    """Return paths of the modules that have operators or collectives."""
    return {choice.module for choice in plan.choices} | {sent.module for sent in plan.collectives}


def _under(glob: str, path: str) -> bool:
    """Return True if the glob matches the path or a module above it."""
    return bool(path) and bool(matching(glob, (path, *ancestors(path))))


def _colour_placements(part: Table | Text) -> Table | Text:
    """Colour sharded and partial placements, so that they stand out of replicated ones."""
    if isinstance(part, Table):
        for cell in (cell for column in part.columns for cell in column.cells if isinstance(cell, Text)):
            cell.highlight_regex(r"\bS\(\d+(,f=\d+)?\)", "cyan")
            cell.highlight_regex(r"\bP\(\w+\)", "magenta")
    return part


def plain(parts: Iterable[RenderableType], width: int) -> str:
    """Return tables as text of limited width, without colours or trailing blanks."""
    # Widths and colours of the caller's terminal must not change the text.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    # rich pads tables with blank lines of its own.
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")
