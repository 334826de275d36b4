"""A plan as rows of text and numbers, and as tables: plain text for `str(plan)`, colours for a terminal.

The web page of a plan is made of the same rows (`plans.plan_page`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch.distributed.tensor import Placement

from autoshard.display import WIDTH, NameText, plain
from autoshard.errors import PlanError
from autoshard.memory.footprint import Memory
from autoshard.names import ancestors, group_names, matching, suggestion
from autoshard.plans.backward_half import (
    SOURCES_TITLE,
    LayerRow,
    layer_rows,
    module_rows,
    source_cells,
    source_labels,
    sources_legend,
    sources_of,
)
from autoshard.plans.plan_data import Collective, Decision, PlanContents
from autoshard.specs.spec import placement_text
from autoshard.units import format_bytes, format_seconds

_COLLECTIVE = ("collective", "axis", "phase")
# Collectives listed by `str(plan)`; the others are summed up in one row.
_ROWS = 30
_MOST_LISTED = 4  # layers, or operators, that run again

# Kind of an allocation -> its name for people.
KIND_NAMES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "buffer": "buffers",
    "input": "inputs",
    "output": "outputs",
    "saved": "saved activations",
    "gathered": "gathered copies",
    "communication": "communication",
    "temporary": "temporaries",
}
STRATEGY_LEGEND = (
    "A strategy names the loop of the operator that a mesh axis splits, as its sharding rule calls it (docs/rules.md): "
    '"i on dp" splits loop i over axis dp, "j.1" is the second factor of loop j, "whole" splits nothing.'
)
LEGEND = (
    "R: replicated; S(d): dim d sharded; S(d,f=k): each of k equal parts of dim d sharded; P(op): yet to be reduced."
)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Tensors whose names differ in indices alone, of one shape and one placement.

    Attributes:
        gathered: of parameters: `"whole"` (every device holds them), `"never"` (the step works on the shards),
            `"once"`, or `"again"` in the backward half.
    """

    name: str
    count: int
    shape: tuple[int, ...] | None
    placements: tuple[str, ...]
    gathered: str = ""


@dataclass(frozen=True, slots=True)
class WorkRow:
    """Equal operators or collectives of modules whose paths differ in indices alone; bytes and seconds are of them all.

    Attributes:
        labels: (kind, axis, phase) of collectives, (operator, phase, strategy) of operators.
    """

    labels: tuple[str, ...]
    module: str
    count: int
    bytes: int
    seconds: float


def summary(plan: PlanContents) -> tuple[tuple[str, str], ...]:
    """Return label and value of every line at the head of a plan; lines without a value are left out."""
    on = f" on cluster {plan.cluster}" if plan.cluster else ""
    subject = dict(plan.subject)
    made = made_text(subject.pop("made on", ""), plan.versions)
    lines = (
        *subject.items(),
        ("mesh", f"{plan.mesh} ({plan.mesh.size} devices){on}"),
        ("predicted step", f"{format_seconds(plan.step_seconds)}{_communication(plan)}"),
        ("throughput", throughput_text(plan)),
        ("optimizer's update", format_seconds(plan.update_seconds) if plan.update_seconds else ""),
        ("shares", f"{shares_text(plan)}; memory is that of equal shares" if plan.shares else ""),
        ("memory per device", memory_text(plan)),
        ("peak", peak_text(plan.memory)),
        ("search", f"{plan.method or 'none'}, {_proof(plan)}"),
        ("made on", made if plan.subject else ""),
        ("planned in", ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in plan.timings.items())),
        ("recomputed", recomputed_text(plan)),
        ("moved to the host", offloaded_text(plan)),
        ("optimizer on the host", hosted_text(plan)),
        ("hints", ", ".join(f"{hint}: {pinned}" for hint, pinned in plan.hints.items())),
    )
    return tuple((label, value) for label, value in lines if value)


def made_text(date: str, versions: Mapping[str, str]) -> str:
    """Return `"2026-11-27 with autoshard 0.2.0, torch 2.13.0"`."""
    return " with ".join(filter(None, (date, ", ".join(f"{name} {version}" for name, version in versions.items()))))


def throughput_text(plan: PlanContents) -> str:
    """Return `"468,000 tokens per second, 43 % of the devices' peak (MFU)"`; empty where it is not known."""
    tokens, samples, used = plan.tokens_per_second, plan.samples_per_second, plan.utilization
    rates = [f"{rate:,.0f} {name} per second" for rate, name in ((tokens, "tokens"), (samples, "samples")) if rate]
    return ", ".join([*rates[:1], *([f"{used:.1%} of the devices' peak rate (MFU)"] if used else [])])


def shares_text(plan: PlanContents) -> str:
    """Return `"39 of 64 rows on 8 of dp, 25 on 8"`; empty for equal shares."""
    texts = []
    for axis, shares in plan.shares.items():
        (first, ranks), *later_runs = [(share, len(list(run))) for share, run in itertools.groupby(shares)]
        texts.append(f"{first} of {sum(shares)} {'parts' if plan.parts else 'rows'} on {ranks} of {axis}")
        texts += [f"{share} on {count}" for share, count in later_runs]
    return ", ".join(texts)


def memory_parts(memory: Memory) -> dict[str, int]:
    """Return the bytes held at the moment of the peak by kind; totals of the step where that moment is not known."""
    if memory.held:
        return {KIND_NAMES[kind]: amount for kind, amount in memory.held.items()}
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "buffers": memory.buffers,
        "activations": memory.activations,
    }
    return {name: amount for name, amount in parts.items() if amount}


def memory_text(plan: PlanContents) -> str:
    """Return `"peak 4.5 GiB of 80.0 GiB (parameters 1.0 GiB, ...)"`."""
    parts = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in memory_parts(plan.memory).items())
    of = f" of {format_bytes(plan.capacity)}" if plan.capacity else ""
    short = "" if plan.fits else ": does not fit"
    return f"peak {format_bytes(plan.memory.peak)}{of}{f' ({parts})' if parts else ''}{short}"


def peak_text(memory: Memory) -> str:
    """Return the moment of the peak, and the largest tensors then; empty where it is not known."""
    if not memory.phase:
        return ""
    where = "" if memory.phase == "optimizer" else f" of {memory.module or 'the root module'}, {memory.operator}"
    # Equal names are one entry with a count: the largest tensors are often one activation of every layer.
    sums: dict[str, list[int]] = {}
    for tensor in memory.largest:
        sums.setdefault(f"{tensor.name} ({tensor.kind})", []).append(tensor.bytes)
    largest = ", ".join(
        f"{name}{f' x {len(sizes)}' if len(sizes) > 1 else ''} {format_bytes(sum(sizes))}"
        for name, sizes in sums.items()
    )
    return f"in the {memory.phase}{where}; largest then: {largest}"


def _communication(plan: PlanContents) -> str:
    if not plan.collectives:
        return ", no collectives"
    seconds = sum(collective.count * collective.seconds for collective in plan.collectives)
    count = sum(collective.count for collective in plan.collectives)
    return f", {count} collectives taking {format_seconds(seconds)} before overlap"


def recomputed_text(plan: PlanContents) -> str:
    """Return what runs again: `"32 layers: ..."`, or `"96 operators: 32 of aten.silu, ..."` where they were chosen."""
    operators = {decision.node: decision for decision in plan.choices}
    decisions = [operators[name] for name in plan.recomputed if name in operators]
    if decisions:
        # Views, which take no time, would be most of them.
        names = Counter(decision.operator for decision in decisions if decision.seconds)
        listed = ", ".join(f"{count} of {name}" for name, count in names.most_common(_MOST_LISTED))
        more = ", ..." if len(names) > _MOST_LISTED else ""
        return f"{names.total()} operators: {listed}{more}" if names else "views"
    layers = plan.recomputed
    # A deep model recomputes dozens of layers: their names would fill the screen.
    if len(layers) <= _MOST_LISTED:
        return ", ".join(layers)
    return f"{len(layers)} layers: {layers[0]}, {layers[1]}, ..., {layers[-1]}"


def offloaded_text(plan: PlanContents) -> str:
    """Return `"64 tensors, 12.0 GiB of the host of a device"`; empty where nothing is moved."""
    tensors = "1 tensor" if len(plan.offloaded) == 1 else f"{len(plan.offloaded)} tensors"
    moved = plan.memory.host - plan.memory.host_optimizer
    return f"{tensors}, {format_bytes(moved)} of the host of a device" if plan.offloaded else ""


def hosted_text(plan: PlanContents) -> str:
    """Return `"that of 64 parameters, 12.0 GiB of the host of a device, updated in 0.2 s"`; empty without any."""
    if not plan.hosted:
        return ""
    parameters = "1 parameter" if len(plan.hosted) == 1 else f"{len(plan.hosted)} parameters"
    held = format_bytes(plan.memory.host_optimizer)
    return (
        f"that of {parameters}, {held} of the host of a device, updated in {format_seconds(plan.host_update_seconds)}"
    )


def slower_text(plan: PlanContents) -> str:
    """Return `"may be up to 15 % slower than the best"`, by cost and lower bound."""
    return f"may be up to {100 * (plan.cost / plan.lower_bound - 1):.2g} % slower than the best"


def _proof(plan: PlanContents) -> str:
    # A model of one device, or without operators that communicate, has nothing to decide.
    if plan.cost <= 0:
        return "nothing to choose"
    bound = f"cost {format_seconds(plan.cost)}, lower bound {format_seconds(plan.lower_bound)}"
    if plan.gap >= 1e-9 and plan.lower_bound <= 0:
        return bound
    return f"{bound} (the best plan)" if plan.gap < 1e-9 else f"{bound} ({slower_text(plan)})"


def plan_tensors(plan: PlanContents) -> dict[str, tuple[TensorRow, ...]]:
    """Return the rows of the parameters and buffers, of the inputs and of the outputs; kinds without rows left out."""
    rows = {
        "parameter": tensor_rows(plan.placements, plan.shapes, plan.gathered),
        "input": tensor_rows(plan.input_placements, {}),
        "output": tensor_rows(plan.output_placements, {}),
    }
    return {kind: of_kind for kind, of_kind in rows.items() if of_kind}


def tensor_rows(
    placements: Mapping[str, tuple[Placement, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    gathered: Mapping[str, str] | None = None,
) -> tuple[TensorRow, ...]:
    """Return one row for all tensors whose names differ in indices alone and which are placed and gathered alike."""
    # Tensors are grouped by all that their row shows, so that a row never says what holds for some of them only.
    keys = {}
    for name, row in placements.items():
        how = ""
        if gathered is not None:
            how = gathered.get(name, "whole" if all(placement.is_replicate() for placement in row) else "never")
        keys[name] = shapes.get(name), tuple(map(placement_text, row)), how
    return tuple(TensorRow(group.text, len(group.names), *group.key) for group in group_names(keys))


def collective_rows(collectives: Iterable[Collective]) -> tuple[WorkRow, ...]:
    """Return collectives by kind, axis, phase and module pattern, those that take most time first."""
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
    # A stable sort: rows of equal time stay in the order of the step.
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def operator_rows(choices: Iterable[Decision]) -> tuple[WorkRow, ...]:
    """Return operators by name, phase, strategy and module pattern, in the order in which they run."""
    return _work_rows(
        ((choice.operator, choice.phase, choice.strategy), choice.module, 1, 0, choice.seconds) for choice in choices
    )


def _work_rows(records: Iterable[tuple[tuple[str, ...], str, int, int, float]]) -> tuple[WorkRow, ...]:
    """Sum up the records (labels, module, count, bytes, seconds) of every module, then join modules with equal sums."""
    sums: dict[tuple[str, ...], dict[str, tuple[int, int, float]]] = {}
    for labels, module, count, size, seconds in records:
        # Sums per module come first: an operator called twice in every layer is a row with twice the count.
        modules = sums.setdefault(labels, {})
        total = modules.get(module, (0, 0, 0.0))
        modules[module] = (total[0] + count, total[1] + size, total[2] + seconds)
    rows = []
    for labels, modules in sums.items():
        # Seconds are no part of the key: equal layers differ in them by rounding.
        for group in group_names({module: total[:2] for module, total in modules.items()}):
            times = len(group.names)
            seconds = sum(modules[module][2] for module in group.names)
            rows.append(WorkRow(labels, group.text, times * group.key[0], times * group.key[1], seconds))
    return tuple(rows)


def render(plan: PlanContents, width: int = WIDTH) -> str:
    """Return the plan as tables, at most `width` characters wide: summary, parameters, inputs, outputs, collectives."""
    return plain(_parts(plan), width)


def plan_table(plan: PlanContents) -> Group:
    """Return the content of `str(plan)` with colours, as wide as the console that prints it."""
    *tables, legend = _parts(plan)
    return Group(*map(_colour_placements, tables), Text(str(legend), style="dim"))


def summary_table(title: str, lines: Iterable[tuple[str, str]]) -> Table:
    """Return labels and values as a table with a title."""
    facts = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold")
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for label, value in lines:
        # As Text, for brackets in a string are markup to rich.
        facts.add_row(Text(label), Text(value))
    return facts


def number_table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of rows of cells: columns of texts, then columns of numbers, by their labels."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows = list(rows)
    for number, label in enumerate(texts):
        # Words such as "all_reduce" stay whole, and names and sentences take the room that is left.
        is_word = label != "module" and not any(sign in row[number] for row in rows for sign in " .")
        table.add_column(Text(label), overflow="fold", no_wrap=is_word)
    for label in numbers:
        table.add_column(Text(label), justify="right", no_wrap=True)
    for row in rows:
        # As texts here too: names of strategies have brackets.
        table.add_row(*(NameText(cell) if number < len(texts) else Text(cell) for number, cell in enumerate(row)))
    return table


def _parts(plan: PlanContents) -> list[Table | Text]:
    facts = summary_table("ShardingPlan", summary(plan))
    tensors = [_tensor_table(kind, rows, plan.mesh.names) for kind, rows in plan_tensors(plan).items()]
    collectives = collective_rows(plan.collectives)
    sent = [_work_table(_COLLECTIVE, collectives, by="bytes", limit=_ROWS)] if collectives else []
    return [facts, *tensors, *sent, *limited_sources([plan]), Text(LEGEND)]


def limited_sources(plans: Sequence[PlanContents]) -> list[Table | Text]:
    """Return what the backward half of a step, or of the stages of a pipeline, has from where, layer by layer.

    Returns:
        A table and what its columns mean; nothing where no plan keeps a memory limit: a device then keeps all. Of the
        stages of a pipeline, all is of one microbatch.
    """
    if not any(plan.options.get("memory_limit") or plan.recomputed or plan.offloaded for plan in plans):
        return []
    return _sources_table(layer_rows(sources_of(plans)), ", for one microbatch" if len(plans) > 1 else "")


def _sources_table(rows: Sequence[LayerRow], of: str = "") -> list[Table | Text]:
    if not rows:
        return []
    table = number_table(*source_labels(rows), source_cells(rows))
    table.title, table.title_justify, table.title_style = f"{SOURCES_TITLE}{of}", "left", "bold"
    return [table, Text(f"{sources_legend(rows)}\n")]


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
        table.add_row(NameText(row.name), *map(Text, (str(row.count), *shape, *row.placements, *how)))
    return table


def _work_table(labels: Sequence[str], rows: Sequence[WorkRow], by: str = "", limit: int | None = None) -> Table:
    """Return a table of rows; with a column of bytes where `by` names it, and the sum of the rows over `limit` last."""
    omitted = rows[limit:] if limit is not None else ()
    shown = list(rows[:limit])
    if omitted:
        shown.append(WorkRow(("...", *[""] * (len(labels) - 1)), f"{len(omitted)} more", *_total(omitted)))
    cells = []
    for row in shown:
        size = [format_bytes(row.bytes)] if by else []
        cells.append((*row.labels, row.module or "(root)", str(row.count), *size, format_seconds(row.seconds)))
    return number_table((*labels, "module"), ("count", *filter(None, [by]), "time"), cells)


def _total(rows: Sequence[WorkRow]) -> tuple[int, int, float]:
    return sum(row.count for row in rows), sum(row.bytes for row in rows), sum(row.seconds for row in rows)


def explain(plan: PlanContents, path_glob: str) -> str:
    """Return the text of `ShardingPlan.explain`.

    Raises:
        PlanError: no parameter, operator or collective of the plan is at a path that the glob matches.
    """
    return plain(_explanation(plan, path_glob), WIDTH)


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
        rows = tensor_rows(placements, plan.shapes, plan.gathered)
        parts.append(_tensor_table("parameter", rows, plan.mesh.names))
    for hint, pinned in plan.hints.items():
        if any(_under(hint, name) for name in names):
            parts.append(Text(f"pinned by the hint {hint!r}: {pinned}"))
    return [*parts, *_explained_work(plan, modules), Text(STRATEGY_LEGEND)]


def _explained_work(plan: PlanContents, modules: set[str]) -> list[Table | Text]:
    """Return the tables of the operators and collectives of these modules."""
    parts: list[Table | Text] = []
    operators = operator_rows(choice for choice in plan.choices if choice.module in modules)
    if operators:
        parts.append(_work_table(("operator", "phase", "strategy"), operators))
    collectives = collective_rows(sent for sent in plan.collectives if sent.module in modules)
    parts.append(_work_table(_COLLECTIVE, collectives, by="bytes") if collectives else Text("no collectives here"))
    sources = {path: of_module for path, of_module in sources_of([plan]).items() if path in modules}
    parts += _sources_table(module_rows(sources))
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
