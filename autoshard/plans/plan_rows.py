"""A plan as rows of text and numbers: what `str(plan)`, the terminal report and the web page all show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import Placement

from autoshard.names import group_names
from autoshard.specs.spec import placement_text
from autoshard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoshard.memory.footprint import Memory
    from autoshard.plans.sharding_plan import Collective, Decision, ShardingPlan


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

    `gathered` says of parameters how the step gets at them: `"whole"` (they are), `"never"` (it works on the shards),
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


def summary(plan: ShardingPlan) -> tuple[tuple[str, str], ...]:
    """Label and value of every line at the head of a plan; lines of which nothing is known are left out."""
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


def shares_text(plan: ShardingPlan) -> str:
    """`"39 of 64 rows on 8 of dp, 25 on 8"`; empty for equal shares."""
    told = []
    for axis, taken in plan.shares.items():
        runs = [(share, len(list(run))) for share, run in itertools.groupby(taken)]
        (first, ranks), *others = runs
        told.append(f"{first} of {sum(taken)} {'parts' if plan.parts else 'rows'} on {ranks} of {axis}")
        told += [f"{share} on {count}" for share, count in others]
    return ", ".join(told)


def memory_parts(memory: Memory) -> dict[str, int]:
    """What is held for what at the moment of the peak, as people call it; totals where that moment is not known."""
    if memory.held:
        return {_KINDS[kind]: held for kind, held in memory.held.items()}
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "buffers": memory.buffers,
        "activations": memory.activations,
    }
    return {name: held for name, held in parts.items() if held}


def memory_text(plan: ShardingPlan) -> str:
    """`"peak 4.5 GiB of 80.0 GiB (parameters 1.0 GiB, ...)"`."""
    held = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in memory_parts(plan.memory).items())
    of = f" of {format_bytes(plan.capacity)}" if plan.capacity else ""
    short = "" if plan.fits else ": does not fit"
    return f"peak {format_bytes(plan.memory.peak)}{of}{f' ({held})' if held else ''}{short}"


def peak_text(memory: Memory) -> str:
    """When most is held, and the largest tensors then; empty where that is not known."""
    if not memory.phase:
        return ""
    where = "" if memory.phase == "optimizer" else f" of {memory.module or 'the root module'}, {memory.operator}"
    sums: dict[str, list[int]] = {}
    for one in memory.largest:
        sums.setdefault(f"{one.name} ({one.kind})", []).append(one.bytes)
    largest = ", ".join(
        f"{name}{f' x {len(held)}' if len(held) > 1 else ''} {format_bytes(sum(held))}" for name, held in sums.items()
    )
    return f"in the {memory.phase}{where}; largest then: {largest}"


def _communication(plan: ShardingPlan) -> str:
    if not plan.collectives:
        return ", no collectives"
    seconds = sum(collective.count * collective.seconds for collective in plan.collectives)
    count = sum(collective.count for collective in plan.collectives)
    return f", {count} collectives taking {format_seconds(seconds)} before overlap"


def _layers_text(layers: Sequence[str]) -> str:
    if len(layers) <= 4:
        return ", ".join(layers)
    return f"{len(layers)} layers: {layers[0]}, {layers[1]}, ..., {layers[-1]}"


def _proof(plan: ShardingPlan) -> str:
    if plan.cost <= 0:
        return "nothing to choose"
    bound = f"cost {format_seconds(plan.cost)}, lower bound {format_seconds(plan.lower_bound)}"
    return f"{bound} (the best plan)" if plan.gap < 1e-9 else f"{bound} (at most {100 * plan.gap:.2g} % from the best)"


def parameter_rows(plan: ShardingPlan) -> tuple[TensorRow, ...]:
    """Parameters and buffers, layers put together where they are placed alike."""
    return tensor_rows(plan.placements, plan.shapes, plan.gathered)


def input_rows(plan: ShardingPlan) -> tuple[TensorRow, ...]:
    """Inputs of the model."""
    return tensor_rows(plan.input_placements, {})


def output_rows(plan: ShardingPlan) -> tuple[TensorRow, ...]:
    """Outputs of the model."""
    return tensor_rows(plan.output_placements, {})


def tensor_rows(
    placements: Mapping[str, tuple[Placement, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    gathered: Mapping[str, str] | None = None,
) -> tuple[TensorRow, ...]:
    """Tensors put together where their names differ in indices alone, and they are placed, and gathered, alike."""
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
    """Collectives by kind, axis, phase and module pattern, those that take most time first."""
    rows = _work_rows(
        collectives,
        labels=lambda one: (one.kind, one.axis, one.phase),
        amounts=lambda one: (one.count, one.count * one.bytes, one.count * one.seconds),
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def operator_rows(choices: Iterable[Decision]) -> tuple[WorkRow, ...]:
    """Operators by name, phase, strategy and module pattern, in the order in which they run."""
    return _work_rows(
        choices,
        labels=lambda one: (one.operator, one.phase, one.strategy),
        amounts=lambda one: (1, 0, one.seconds),
    )


def _work_rows(
    records: Iterable[Collective | Decision],
    labels: Callable[..., tuple[str, ...]],
    amounts: Callable[..., tuple[int, int, float]],
) -> tuple[WorkRow, ...]:
    """Sum up the records of every module, then put modules with equal sums together."""
    sums: dict[tuple[str, ...], dict[str, tuple[int, int, float]]] = {}
    for record in records:
        modules = sums.setdefault(labels(record), {})
        count, size, seconds = modules.get(record.module, (0, 0, 0.0))
        more = amounts(record)
        modules[record.module] = (count + more[0], size + more[1], seconds + more[2])
    rows = []
    for label, modules in sums.items():
        for group in group_names({module: total[:2] for module, total in modules.items()}):
            times = len(group.names)
            seconds = sum(modules[module][2] for module in group.names)
            rows.append(WorkRow(label, group.text, times * group.key[0], times * group.key[1], seconds))
    return tuple(rows)
