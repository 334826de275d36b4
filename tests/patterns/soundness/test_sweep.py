"""Every operator that torch's own samples meet, forward and backward: no strategy that its rule offers is unsound."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autoshard.program.graph_emitter import supports_layout
from autoshard.specs.axes import MeshShape
from tests.patterns.soundness._torch import tree_flatten, tree_leaves, tree_unflatten
from tests.patterns.soundness.conditioning import add_to_operands, lost_digits
from tests.patterns.soundness.record import RecordedOperator, record
from tests.patterns.soundness.samples import own_calls
from tests.patterns.soundness.sweep import NOT_COMPARED, OperatorSamples, ambiguous, collect, everything, findings

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Programs reshape where these would refuse."""

PINV = aten.linalg_pinv.atol_rtol_tensor
"""A sample asks for what is above the largest singular value, times one: rounding decides whether that itself is."""

EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""What memory holds by chance is in no order."""

PARTS = 8
MOST = 2
"""Calls checked of every operator; those that add a strategy are taken first come, first served."""

SAMPLES = 4
"""Of each entry of torch's database. docs/coverage.md is made of more, and of more calls."""


@cache
def _met() -> dict[str, OperatorSamples]:
    return collect(everything(most=SAMPLES), MOST)


@cache
def _ours() -> dict[str, OperatorSamples]:
    """The same of the operators of neural networks, which come first among all."""
    return collect(own_calls(), MOST)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_strategy_of_every_operator_that_torch_samples_meet(part: int) -> None:
    """Beside those of neural networks, which the test below checks."""
    ours = {recorded.call for met in _ours().values() for recorded in met.chosen}
    chosen = [recorded for met in _met().values() for recorded in met.chosen if recorded.call not in ours]
    found = [finding for recorded in chosen[part::PARTS] for finding in findings(recorded)]
    assert found == []


@pytest.mark.slow
def test_no_rule_fails_on_a_call_that_torch_samples_make() -> None:
    assert [error for met in _met().values() for error in met.errors] == []


@pytest.mark.slow
def test_most_of_what_torch_samples_meet_has_a_rule() -> None:
    assert len(_met()) > 500
    assert sum(bool(met.chosen) for met in _met().values()) > 0.75 * len(_met())


@pytest.mark.slow
def test_kernels_that_read_other_elements_in_another_order_of_memory_are_known() -> None:
    """All others give the same numbers for operands in column order."""
    unknown = {
        str(recorded.op)
        for met in _met().values()
        for recorded in met.chosen
        if recorded.op not in (*VIEWS, PINV)
        and recorded.op.overloadpacket.__name__ not in EMPTY
        and torch.Tag.nondeterministic_seeded not in recorded.op.tags
        if not all(_same_in_columns(recorded, place) for place in range(-1, 8))
    }
    assert unknown == set()


def _same_in_columns(recorded: RecordedOperator, place: int) -> bool:
    """Whether an operator gives the same with one of its tensors (-1: all) in column order, if it may lie so."""
    leaves, structure = tree_flatten((recorded.args, recorded.kwargs))
    tensors = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for position in tensors if place < 0 else tensors[place : place + 1]:
        backwards = tuple(range(leaves[position].ndim))[::-1]
        columns = leaves[position].permute(backwards).contiguous().permute(backwards)
        leaves[position] = columns if supports_layout(recorded.op, columns) else leaves[position]
    args, kwargs = tree_unflatten(leaves, structure)
    ours, theirs = (
        [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        for results in (recorded.op(*args, **kwargs), recorded.results)
    )
    return all(torch.allclose(one, other, 1e-6, 1e-6, True) for one, other in zip(ours, theirs, strict=True))


def test_every_strategy_of_the_operators_of_neural_networks() -> None:
    met = _ours()
    assert len(met) > 90
    assert [error for entry in met.values() for error in entry.errors] == []
    found = [finding for entry in met.values() for recorded in entry.chosen for finding in findings(recorded)]
    assert found == []


@pytest.mark.slow
def test_every_operator_that_torch_samples_meet_is_as_exact_as_on_one_device() -> None:
    """One call of each, whose floating operands lie far from zero, whatever they are."""
    double = [
        next((call for call in met.chosen if any(meta.dtype == torch.float64 for meta in call.call.operands)), None)
        for met in _met().values()
    ]
    compared = [call for call in double if call is not None and call.op._schema.name not in NOT_COMPARED]
    far = [call for recorded in compared if (call := add_to_operands(recorded, 1e6)) is not None]
    assert len(far) > 400
    meshes = [MeshShape.of({"x": size}) for size in (4, 5)]
    found = [problem for call in far for problem in lost_digits(call, meshes)]
    assert not found, "\n".join(found[:5])


def test_records_are_functional_and_hold_the_backward_half() -> None:
    x = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
    calls = record(lambda t: t.sin().mul_(2).relu_(), (x,), {}, "sample")
    names = [call.op for call in calls]
    assert [op for op in names if op._schema.is_mutable] == []
    assert names[:3] == [aten.sin.default, aten.mul.Tensor, aten.relu.default]
    assert aten.threshold_backward.default in names[3:]
    assert not any(isinstance(call.results, torch.Tensor) and call.results.requires_grad for call in calls)


def test_calls_whose_answer_torch_leaves_open_are_not_compared() -> None:
    different, tied = torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)
    (open_answer,) = record(torch.topk, (tied, 2), {}, "sample")
    (one_answer,) = record(torch.topk, (different, 2), {}, "sample")
    assert ambiguous(open_answer)
    assert not ambiguous(one_answer)
    assert findings(open_answer) == []
