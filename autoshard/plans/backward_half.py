"""The sources of values that the backward half of a step reads from the forward half, layer by layer.

A tensor that both halves read is kept on the device, gathered again, recomputed by operators, or offloaded to the host.
A table has one row per layer, and one for equal layers; `str(plan)`, `plan.explain` and the page of a plan show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.capture.backward_copies import rerun_name
from autoshard.capture.recomputation import group_by_list_element
from autoshard.memory.footprint import SOURCES
from autoshard.names import group_names
from autoshard.plans.plan_data import Decision, PlanContents
from autoshard.report import Note, Table, names, numbers, texts
from autoshard.units import format_bytes, format_seconds

_MOST_LISTED = 4  # operators named in a row

# The column of a source, and its meaning.
_COLUMNS = {
    "saved": ("kept", "on the device from one half to the other"),
    "gathered": ("copies kept", "gathered parameters and inputs that stay on the device"),
    "gathered again": ("gathered again", "copies that both halves gather"),
    "run again": ("made again", "by operators that run again, in place of being kept"),
    "host": ("on the host", "moved there, and back"),
}
SOURCES_TITLE = "What the backward half reads"


@dataclass(frozen=True, slots=True)
class BackwardSources:
    """The sources of what the backward half reads of a part of the forward half.

    Attributes:
        bytes: bytes of one device, by source (`memory.footprint.SOURCES`).
        operators: name of an operator -> how often it is recomputed, without views, which take no time.
        seconds: predicted seconds of these operators.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __add__(self, other: BackwardSources) -> BackwardSources:
        operators = self.operators + other.operators
        return BackwardSources(self.bytes + other.bytes, operators, self.seconds + other.seconds)


def rerun_decisions(plan: PlanContents) -> list[Decision]:
    """Return the operators in the backward half that recompute forward operators."""
    again = {rerun_name(name) for name in plan.recomputed}
    again |= {rerun_name(choice.node) for choice in plan.choices if choice.phase == "forward"}
    return [choice for choice in plan.choices if choice.phase == "backward" and choice.node in again]


def sources_of(plans: Iterable[PlanContents]) -> dict[str, BackwardSources]:
    """Return the sources by module path, in the order in which modules run.

    Modules of which the backward half reads nothing are included. Without a backward half, all bytes are zero.

    Args:
        plans: the plan of a whole step, or those of the stages of a pipeline; the result is then per microbatch.
    """
    sources: dict[str, BackwardSources] = {}
    for plan in plans:
        for choice in plan.choices:
            sources.setdefault(choice.module, BackwardSources())
        for path, sizes in plan.memory.sources.items():
            sources[path] = sources.get(path, BackwardSources()) + BackwardSources(Counter(sizes))
        for choice in rerun_decisions(plan):
            operators = Counter([choice.operator.rpartition(".")[2]] if choice.seconds else [])
            sources[choice.module] += BackwardSources(Counter(), operators, choice.seconds)
    return sources


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Equal layers, or modules outside layers: one text for their paths, their number, and their sum."""

    text: str
    count: int
    sources: BackwardSources


def layer_rows(sources: Mapping[str, BackwardSources]) -> list[LayerRow]:
    """Return the rows of all layers, and of modules outside layers, from which the backward half reads."""
    # A layer is an element of a list of modules, as for recomputation.
    elements = group_by_list_element({path: path for path in sources})
    layer_of = {path: layer for layer, paths in elements.items() for path in paths}
    layers: dict[str, BackwardSources] = {}
    for path, of_module in sources.items():
        layer = layer_of.get(path, path)
        layers[layer] = layers.get(layer, BackwardSources()) + of_module
    return module_rows(layers)


def module_rows(sources: Mapping[str, BackwardSources]) -> list[LayerRow]:
    """Return the rows of all modules from which the backward half reads; equal modules share a row."""
    # The key omits seconds: equal layers differ in them by rounding.
    keys = {
        path: (frozenset(one.bytes.items()), frozenset(one.operators.items()))
        for path, one in sources.items()
        if one.bytes or one.operators
    }
    return [
        LayerRow(group.text or "(root)", len(group.names), _sum(sources[path] for path in group.names))
        for group in group_names(keys)
    ]


def _sum(parts: Iterable[BackwardSources]) -> BackwardSources:
    total = BackwardSources()
    for part in parts:
        total += part
    return total


def sources_parts(rows: Sequence[LayerRow]) -> tuple[Table | Note, ...]:
    """Return a table of these rows and their sum, with notes on its columns; nothing without rows."""
    if not rows:
        return ()
    total, shown = _total(rows), _shown_sources(rows)
    sums = [LayerRow("together", sum(row.count for row in rows), total)] if len(rows) > 1 else []
    again = bool(total.operators)
    labels = (_COLUMNS[source][0] for source in shown)
    columns = (
        *names("module"),
        *(texts("runs again") if again else ()),
        *numbers("count", *labels, *(("time",) if again else ())),
    )
    meanings = " ".join(f"{label.capitalize()}: {text}." for label, text in map(_COLUMNS.__getitem__, shown))
    legend = f"Bytes of one device that the backward half reads of the forward half. {meanings}"
    return Table.of(columns, (_cells(row, shown, again) for row in (*rows, *sums)), most=100), Note(legend, "dim")


def _cells(row: LayerRow, shown: Sequence[str], again: bool) -> list[str]:
    """Return the cells of a row, with a column of recomputed operators if any row has them."""
    one = row.sources
    sizes = [format_bytes(one.bytes[source]) if one.bytes[source] else "" for source in shown]
    if not again:
        return [row.text, str(row.count), *sizes]
    seconds = format_seconds(one.seconds) if one.operators else ""
    return [row.text, _operators_text(one.operators), str(row.count), *sizes, seconds]


def _total(rows: Iterable[LayerRow]) -> BackwardSources:
    return _sum(row.sources for row in rows)


def _shown_sources(rows: Iterable[LayerRow]) -> list[str]:
    """Return the sources with a column: those with any bytes."""
    held = _total(rows).bytes
    return [source for source in SOURCES if held[source]]


def _operators_text(operators: Counter[str]) -> str:
    """Return `"96: 64 mul, 32 silu"`; empty for none."""
    named = [f"{count} {name}" for name, count in operators.most_common(_MOST_LISTED)]
    others = len(operators) - len(named)
    more = [f"{others} other kind{'s' if others > 1 else ''}"] if others else []
    return f"{operators.total()}: {', '.join([*named, *more])}" if operators else ""
