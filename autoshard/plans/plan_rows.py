"""A plan as rows of text and numbers, from which `str(plan)`, the terminal report and the web page are made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement

from autoshard.memory.footprint import Memory
from autoshard.names import group_names
from autoshard.plans.contents import Collective, Decision, PlanContents
from autoshard.specs.spec import placement_text
from autoshard.units import format_bytes, format_seconds

_KINDS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "buffer": "buffers",
    "input": "inputs",
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
    lines = (
        ("mesh", f"{plan.mesh} ({plan.mesh.size} devices){on}"),
        ("predicted step", f"{format_seconds(plan.step_seconds)}{_communication(plan)}"),
        ("optimizer's update", format_seconds(plan.update_seconds) if plan.update_seconds else ""),
        ("shares", f"{shares_text(plan)}; memory is that of equal shares" if plan.shares else ""),
        ("memory per device", memory_text(plan)),
        ("peak", peak_text(plan.memory)),
        ("search", f"{plan.method or 'none'}, {_proof(plan)}"),
        ("planned in", ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in plan.timings.items())),
        ("recomputed", _layers_text(plan.recomputed)),
        ("hints", ", ".join(f"{hint}: {pinned}" for hint, pinned in plan.hints.items())),
    )
    return tuple((label, value) for label, value in lines if value)


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
        return {_KINDS[kind]: amount for kind, amount in memory.held.items()}
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


def _layers_text(layers: Sequence[str]) -> str:
    # A deep model recomputes dozens of layers: their names would fill the screen.
    if len(layers) <= 4:
        return ", ".join(layers)
    return f"{len(layers)} layers: {layers[0]}, {layers[1]}, ..., {layers[-1]}"


def _proof(plan: PlanContents) -> str:
    # A model of one device, or without operators that communicate, has nothing to decide.
    if plan.cost <= 0:
        return "nothing to choose"
    bound = f"cost {format_seconds(plan.cost)}, lower bound {format_seconds(plan.lower_bound)}"
    return f"{bound} (the best plan)" if plan.gap < 1e-9 else f"{bound} (at most {100 * plan.gap:.2g} % from the best)"


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
    keys = {
        name: (
            shapes.get(name),
            tuple(placement_text(placement) for placement in row),
            "" if gathered is None else gathered.get(name, _not_gathered(row)),
        )
        for name, row in placements.items()
    }
    return tuple(TensorRow(group.text, len(group.names), *group.key) for group in group_names(keys))


def _not_gathered(placements: Sequence[Placement]) -> str:
    return "whole" if all(placement.is_replicate() for placement in placements) else "never"


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
