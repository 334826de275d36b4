"""The tables of a plan: tensors, collectives and operators, with equal layers in one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement

from autoshard.names import group_names
from autoshard.plans.plan_data import Collective, Decision
from autoshard.report import Column, Table, names, numbers, texts
from autoshard.specs.spec import placement_text
from autoshard.units import format_bytes, format_seconds


def tensor_table(
    axes: Sequence[str],
    placements: Mapping[str, tuple[Placement, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    gathered: Mapping[str, str] | None = None,
) -> Table:
    """Return a table with one row for all tensors that differ only in indices of their names.

    Args:
        axes: names of the mesh axes.
        placements: the placements of the tensors by name.
        shapes: the shapes of the tensors by name; empty if unknown.
        gathered: for parameters, as in `ShardingPlan`. The others are `"whole"` (every device holds them) or `"never"`
            gathered: the step uses their shards.
    """
    # Grouped by everything that the row shows, so that it holds for all its tensors.
    keys: dict[str, tuple[str, ...]] = {}
    for name, row in placements.items():
        shape = ("x".join(map(str, shapes.get(name, ()))) or "scalar",) if shapes else ()
        how = "whole" if all(placement.is_replicate() for placement in row) else "never"
        last = () if gathered is None else (gathered.get(name, how),)
        keys[name] = (*shape, *map(placement_text, row), *last)
    columns = (
        *names("name"),
        *numbers("count"),
        *(texts("shape") if shapes else ()),
        *(Column(axis, "placement") for axis in axes),
        *(texts("gathered") if gathered is not None else ()),
    )
    return Table.of(columns, ((group.text, str(len(group.names)), *group.key) for group in group_names(keys)), most=100)


@dataclass(frozen=True, slots=True)
class WorkRow:
    """Equal operators or collectives of modules whose paths differ only in indices; bytes and seconds are totals.

    Attributes:
        labels: (kind, axis, phase) of collectives, (operator, phase, strategy) of operators.
    """

    labels: tuple[str, ...]
    module: str
    count: int
    bytes: int
    seconds: float


def collective_rows(collectives: Iterable[Collective]) -> list[WorkRow]:
    """Return collectives by kind, axis, phase and module pattern, the slowest first."""
    rows = _work_rows(
        (
            (sent.kind, sent.axis, sent.phase),
            sent.module,
            sent.count,
            sent.count * sent.bytes,
            sent.count * sent.seconds,
        )
        for sent in collectives
    )
    # A stable sort: rows of equal time keep the order of the step.
    return sorted(rows, key=lambda row: -row.seconds)


def operator_rows(choices: Iterable[Decision]) -> list[WorkRow]:
    """Return operators by name, phase, strategy and module pattern, in execution order."""
    return _work_rows(
        ((choice.operator, choice.phase, choice.strategy), choice.module, 1, 0, choice.seconds) for choice in choices
    )


def _work_rows(records: Iterable[tuple[tuple[str, ...], str, int, int, float]]) -> list[WorkRow]:
    """Sum the records (labels, module, count, bytes, seconds) of every module, then merge modules with equal sums."""
    sums: dict[tuple[str, ...], dict[str, tuple[int, int, float]]] = {}
    for labels, module, count, size, seconds in records:
        # Sum per module first: an operator called twice in every layer becomes a row with twice the count.
        modules = sums.setdefault(labels, {})
        total = modules.get(module, (0, 0, 0.0))
        modules[module] = (total[0] + count, total[1] + size, total[2] + seconds)
    rows = []
    for labels, modules in sums.items():
        # The key omits seconds: equal layers differ in them by rounding.
        for group in group_names({module: total[:2] for module, total in modules.items()}):
            times = len(group.names)
            seconds = sum(modules[module][2] for module in group.names)
            rows.append(WorkRow(labels, group.text, times * group.key[0], times * group.key[1], seconds))
    return rows


def collective_table(rows: Sequence[WorkRow], most: int = 30) -> Table:
    """Return a table of collectives, with one row for those after the first `most`."""
    rest: tuple[str, ...] = ()
    if len(rows) > most:
        others = rows[most:]
        sums = sum(row.count for row in others), sum(row.bytes for row in others), sum(row.seconds for row in others)
        summed = (str(sums[0]), format_bytes(sums[1]), format_seconds(sums[2]))
        rest = ("...", "", "", f"{len(others)} more", *summed)
    columns = (*texts("collective", "axis", "phase"), *names("module"), *numbers("count", "bytes", "time"))
    cells = (
        (*row.labels, row.module or "(root)", str(row.count), format_bytes(row.bytes), format_seconds(row.seconds))
        for row in rows
    )
    return Table.of(columns, cells, rest=rest, most=most)


def operator_table(rows: Iterable[WorkRow]) -> Table:
    """Return a table of operators."""
    columns = (*names("operator"), *texts("phase"), *names("strategy", "module"), *numbers("count", "time"))
    cells = ((*row.labels, row.module or "(root)", str(row.count), format_seconds(row.seconds)) for row in rows)
    return Table.of(columns, cells)
