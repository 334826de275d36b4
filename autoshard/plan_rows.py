"""A plan as rows of text and numbers: what `str(plan)`, the terminal report and the web page all show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import Placement

from autoshard.memory.budget import format_bytes
from autoshard.names import grouped
from autoshard.specs.spec import placement_text

if TYPE_CHECKING:
    from autoshard.plan import Collective, Decision, ShardingPlan


STRATEGY_LEGEND = (
    "A strategy names the loop of the operator that a mesh axis splits, as its sharding rule calls it (docs/rules.md): "
    '"i on dp" splits loop i over axis dp, "j.1" is the second factor of loop j, "whole" splits nothing.'
)
LEGEND = (
    "R: replicated; S(d): dim d sharded; S(d,f=k): each of k equal parts of dim d sharded; P(op): yet to be reduced."
)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Tensors whose names differ in indices alone, of one shape and one placement."""

    name: str
    count: int
    shape: tuple[int, ...] | None
    placements: tuple[str, ...]


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


def format_seconds(seconds: float) -> str:
    """`"12.3 ms"`: seconds in the largest unit that leaves at least 1."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def summary(plan: ShardingPlan) -> tuple[tuple[str, str], ...]:
    """Label and value of every line at the head of a plan; lines of which nothing is known are left out."""
    memory = plan.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "buffers": memory.buffers,
        "activations": memory.activations,
    }
    held = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in parts.items() if amount)
    on = f" on cluster {plan.cluster}" if plan.cluster else ""
    lines = (
        ("mesh", f"{plan.mesh} ({plan.mesh.size} devices){on}"),
        ("predicted step", f"{format_seconds(plan.step_seconds)}{_communication(plan)}"),
        ("memory per device", f"peak {format_bytes(memory.peak)}{f' ({held})' if held else ''}"),
        ("search", f"{plan.method or 'none'}, {_proof(plan)}"),
        ("planned in", ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in plan.timings.items())),
        ("hints", ", ".join(f"{hint}: {pinned}" for hint, pinned in plan.hints.items())),
    )
    return tuple((label, value) for label, value in lines if value)


def _communication(plan: ShardingPlan) -> str:
    if not plan.collectives:
        return ", no collectives"
    seconds = sum(collective.count * collective.seconds for collective in plan.collectives)
    count = sum(collective.count for collective in plan.collectives)
    return f", {count} collectives taking {format_seconds(seconds)} before overlap"


def _proof(plan: ShardingPlan) -> str:
    if plan.cost <= 0:
        return "nothing to choose"
    bound = f"cost {format_seconds(plan.cost)}, lower bound {format_seconds(plan.lower_bound)}"
    return f"{bound} (the best plan)" if plan.gap < 1e-9 else f"{bound} (at most {100 * plan.gap:.2g} % from the best)"


def parameter_rows(plan: ShardingPlan) -> tuple[TensorRow, ...]:
    """Parameters and buffers, layers put together where they are placed alike."""
    return tensor_rows(plan.placements, plan.shapes)


def input_rows(plan: ShardingPlan) -> tuple[TensorRow, ...]:
    """Inputs of the model."""
    return tensor_rows(plan.input_placements, {})


def output_rows(plan: ShardingPlan) -> tuple[TensorRow, ...]:
    """Outputs of the model."""
    return tensor_rows(plan.output_placements, {})


def tensor_rows(
    placements: Mapping[str, tuple[Placement, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[TensorRow, ...]:
    """Tensors put together where their names differ in indices alone and they are placed alike."""
    keys = {
        name: (shapes.get(name), tuple(placement_text(placement) for placement in row))
        for name, row in placements.items()
    }
    return tuple(TensorRow(group.text, len(group.names), *group.key) for group in grouped(keys))


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
        for group in grouped({module: total[:2] for module, total in modules.items()}):
            times = len(group.names)
            seconds = sum(modules[module][2] for module in group.names)
            rows.append(WorkRow(label, group.text, times * group.key[0], times * group.key[1], seconds))
    return tuple(rows)
