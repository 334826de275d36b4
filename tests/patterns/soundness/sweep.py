"""Every operator that torch's own samples meet, checked against its rule: which calls to take, and what comes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

import autoshard.operators  # noqa: F401  # which captures and rules need
from autoshard.patterns.registry import rule_for
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.soundness import check, strategies
from autoshard.patterns.strategy import axis_choices, fits, operand_spec, result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.soundness._torch import tree_leaves
from tests.patterns.soundness.record import RecordedOperator
from tests.patterns.soundness.samples import opinfo_calls, opinfo_names, own_calls

SIZES = (2, 3, 4, 5)
"""Sizes of axes to check on, where they divide something."""

NOT_COMPARED = {
    "aten::empty": "memory as it was found",
    "aten::empty_like": "memory as it was found",
    "aten::empty_strided": "memory as it was found",
    "aten::empty_permuted": "memory as it was found",
    "aten::new_empty": "memory as it was found",
    "aten::new_empty_strided": "memory as it was found",
}
"""Operators whose results are no numbers to compare, and why."""

NEAR_POLES = {"aten::logit_backward"}
"""Operators with a pole that some samples of torch come close to."""

BY_RANK = {"aten::topk", "aten::kthvalue", "aten::median", "aten::nanmedian", "aten::mode"}
"""Operators that return places of elements, and do not promise which of several equal ones they take."""

Strategy = tuple[str, ...]
"""What a strategy places where on an axis of one size: a text for every operand, `->`, and every result."""


@dataclass(slots=True)
class OperatorSamples:
    """What the samples met of one operator.

    Attributes:
        calls: distinct calls, by shapes and arguments.
        chosen: those of them that have strategies of their own, to be checked.
        samples: some that have no rule.
        declined: how many calls have no rule.
        errors: what rules raised instead of answering.
        strategies: those that the rule offers on one axis, over all calls.
    """

    calls: set[OpCall] = field(default_factory=set)
    chosen: list[RecordedOperator] = field(default_factory=list)
    samples: list[RecordedOperator] = field(default_factory=list)
    declined: int = 0
    errors: list[str] = field(default_factory=list)
    strategies: set[Strategy] = field(default_factory=set)


def collect(calls: Iterable[RecordedOperator], most: int) -> dict[str, OperatorSamples]:
    """Sort recorded calls by operator, and choose those to check: at most `most` of each, that add a strategy."""
    met: dict[str, OperatorSamples] = defaultdict(OperatorSamples)
    for recorded in calls:
        entry, call = met[str(recorded.op)], recorded.call
        if call in entry.calls:
            continue
        entry.calls.add(call)
        try:
            rule = rule_for(call)
        except Exception as error:  # a rule that fails on a call is as wrong as one that computes something else
            entry.errors.append(f"{recorded.op} in {recorded.source}: its rule raises {type(error).__name__}: {error}")
            continue
        if rule is None:
            entry.declined += 1
            if len(entry.samples) < most:
                entry.samples.append(recorded)
            continue
        if len(entry.chosen) < most:
            offered = offers(call, rule)
            if not offered <= entry.strategies:
                entry.chosen.append(recorded)
                entry.strategies |= offered
    return dict(met)


def offers(call: OpCall, rule: Rule) -> set[Strategy]:
    """What the rule of a call offers on one axis, with the element types, on which rules may depend."""
    kinds = tuple(str(meta.dtype) for meta in call.operands)
    found = set()
    for size in useful_sizes(rule):
        mesh = MeshShape.of({"x": size})
        for choice in axis_choices(rule, size):
            if fits(rule, (choice,), mesh):
                operands = [str(operand_spec(rule, (choice,), mesh, index)) for index in range(len(rule.operands))]
                results = [str(result_spec(rule, (choice,), mesh, index)) for index in range(len(rule.results))]
                found.add((*kinds, *operands, "->", *results))
    return found


def useful_sizes(rule: Rule) -> tuple[int, ...]:
    """The sizes of axes that have something to split; 2 if none has."""
    return tuple(size for size in SIZES if any(choice >= 0 for choice in axis_choices(rule, size))) or (2,)


def findings(recorded: RecordedOperator) -> list[str]:
    """What is wrong with the strategies of one call."""
    if recorded.op._schema.name in NOT_COMPARED or ambiguous(recorded):
        return []
    rule = rule_for(recorded.call)
    assert rule is not None
    found = check(recorded.op, (recorded.args, recorded.kwargs), sizes=useful_sizes(rule))
    return [f"{finding} (in {recorded.source}, on {_shapes(recorded)})" for finding in found]


def ambiguous(recorded: RecordedOperator) -> bool:
    """Whether several answers are right.

    Equal elements, of which the operator returns the place of one; complex infinities, whose imaginary part a sum with
    something finite keeps or loses, depending on the order of the terms; numbers of 16 bits near a pole, by which the
    rounding of their parts becomes large.
    """
    tensors = [leaf for leaf in tree_leaves((recorded.args, recorded.kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_complex() and not tensor.isfinite().all() for tensor in tensors):
        return True
    if recorded.op._schema.name in NEAR_POLES and any(tensor.dtype.itemsize == 2 for tensor in tensors):
        return True
    return recorded.op._schema.name in BY_RANK and tensors[0].unique().numel() < tensors[0].numel()


def strategy_count(recorded: RecordedOperator) -> int:
    """How many strategies `findings` runs."""
    rule = rule_for(recorded.call)
    assert rule is not None
    meshes = [MeshShape.of({"x": size}) for size in useful_sizes(rule)] + [MeshShape.of({"x": 2, "y": 2})]
    return sum(1 for mesh in meshes for _ in strategies(rule, mesh))


def _shapes(recorded: RecordedOperator) -> str:
    return ", ".join(f"{meta.dtype} {list(meta.shape)}".removeprefix("torch.") for meta in recorded.call.operands)


def everything(names: Sequence[str] | None = None, most: int = 20) -> Iterator[RecordedOperator]:
    """All recorded calls, in the same order each time.

    Args:
        names: entries of torch's operator database; all by default.
        most: samples of each.
    """
    torch.manual_seed(0)
    yield from own_calls()
    for name in opinfo_names() if names is None else names:
        yield from opinfo_calls(name, most)
