"""Padding of uneven shards: what replaces it, where, and that the results of true elements never depend on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autoshard.patterns.local import LocalCall, unwrap
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.notation import bind
from autoshard.patterns.padding import (
    emit_local,
    fill_operands,
    masks,
    padded_factors,
    zero_padded_results,
)
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import Rule, refine
from autoshard.patterns.soundness import check
from autoshard.patterns.strategy import WHOLE, Choices, axis_choices, operand_spec, result_spec
from autoshard.specs.axes import MeshShape
from autoshard.specs.tensors import shard
from tests.operators.attention.attention_calls import BACKWARD, FORWARD, backward_args, forward_args

aten = torch.ops.aten
FOUR = MeshShape.of({"x": 4})
TWO = MeshShape.of({"x": 2})


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def local_call(
    rule: Rule, choices: Choices, mesh: MeshShape, op: Any, args: Sequence[Any], padding: float = math.nan
) -> LocalCall:
    """The call as all ranks make it, with padding of one kind behind uneven shards."""
    call = call_of(op, args, {}, op(*args))
    values = []
    for position, tensor in enumerate(arg for arg in args if isinstance(arg, torch.Tensor)):
        spec = operand_spec(rule, choices, mesh, position)
        shards = [shard(tensor, spec, mesh, place, padded=True, padding=padding) for place in mesh.coordinates()]
        values.append(PerRank(tuple(shards)))
    return LocalCall(call, rule, choices, mesh, Lockstep(mesh), values)


def filled(call: LocalCall) -> tuple[Any, ...]:
    fill_operands(call)
    return call.operands


def named(op: Any, *args: Any) -> Rule:
    rule = rule_for(call_of(op, args, {}, op(*args)))
    assert rule is not None
    return rule


def test_both_operands_of_a_contraction_are_filled_with_zeros() -> None:
    """Padding of one may be no number, which zeros in the other do not hide."""
    left, right = normal(3, 6), normal(6, 2)
    call = local_call(named(aten.mm.default, left, right), (1,), FOUR, aten.mm.default, (left, right))
    assert list(padded_factors(call.rule, call.choices, FOUR).values()) == [0]
    first, second = unwrap(filled(call))
    assert torch.equal(torch.cat(first.values, 1)[:, :6], left)
    assert not torch.cat(first.values, 1)[:, 6:].any()
    assert not torch.cat(second.values)[6:].any()


def test_what_keeps_the_factor_is_left_alone() -> None:
    left, right = normal(6, 3), normal(3, 2)
    call = local_call(named(aten.mm.default, left, right), (0,), FOUR, aten.mm.default, (left, right))
    assert call.operands == filled(call)
    rows = torch.cat(emit_local(call).values)
    torch.testing.assert_close(rows[:6], left @ right)
    assert rows[6:].isnan().all()


@pytest.mark.parametrize(
    ("op", "neutral"),
    [(aten.amax.default, -math.inf), (aten.amin.default, math.inf), (aten.sum.dim_IntList, 0.0), (aten.mean.dim, 0.0)],
)
def test_each_reduction_has_its_neutral_number(op: Any, neutral: float) -> None:
    x = normal(6, 2)
    call = local_call(named(op, x, [0]), (0,), FOUR, op, (x, [0]))
    assert (torch.cat(unwrap(filled(call)[0]).values)[6:] == neutral).all()


def test_numbers_of_integers_are_the_ends_of_their_range() -> None:
    x = torch.arange(12).view(6, 2) - 100
    call = local_call(named(aten.amax.default, x, [0]), (0,), FOUR, aten.amax.default, (x, [0]), padding=7)
    assert (torch.cat(unwrap(filled(call)[0]).values)[6:] == torch.iinfo(torch.int64).min).all()


def test_indices_in_padding_point_at_something() -> None:
    table, index = normal(5, 2), torch.tensor([4, 1, 3])
    rule = named(aten.embedding.default, table, index)
    choice = rule.indices("dim0")
    call = local_call(rule, choice, TWO, aten.embedding.default, (table, index), padding=101)
    assert torch.cat(unwrap(filled(call)[1]).values).tolist() == [4, 1, 3, 0]
    rows = torch.cat(emit_local(call).values)
    assert torch.equal(rows[:3], table[index])


def test_padding_stands_behind_every_stretch_of_a_strided_shard() -> None:
    x = normal(9)
    rule = refine(named(aten.sum.dim_IntList, x, [0]), {0: (3,)})
    call = local_call(rule, (1,), TWO, aten.sum.dim_IntList, (x, [0]))
    assert [value.isnan().nonzero().flatten().tolist() for value in unwrap(call.operands[0]).values] == [[], [1, 3, 5]]
    torch.testing.assert_close(torch.stack(emit_local(call).values).sum(), x.sum())


def test_a_sum_of_what_is_not_zero_at_zero_is_not_padded() -> None:
    """A rule without linear sets does not say that zeros add nothing."""
    x = normal(6)
    call = call_of(aten.sum.default, (x,), {}, x.sum())
    assert axis_choices(bind("d -> ", call), 4) == (WHOLE,)
    assert axis_choices(bind("d -> ", call, uneven=True), 4) == (WHOLE,)
    assert axis_choices(bind("d -> ", call, fill={"d": 0.0}), 4) == (WHOLE, 0)
    assert axis_choices(bind("d -> ", call, linear="0"), 4)[:2] == (WHOLE, 0)


def test_a_local_program_has_to_say_that_it_copes_with_padding() -> None:
    x = normal(6)
    call = call_of(aten.neg.default, (x,), {}, -x)
    assert axis_choices(bind("... -> ...", call, local=LocalCall.run), 4) == (WHOLE,)
    assert axis_choices(bind("... -> ...", call, local=LocalCall.run, uneven=("...",)), 4) == (WHOLE, 0)


def test_integers_are_not_divided_by_padding() -> None:
    assert check(aten.floor_divide.default, (torch.arange(6), torch.arange(1, 7))) == []
    x = torch.arange(1, 7)
    call = local_call(named(aten.floor_divide.default, x, x), (0,), FOUR, aten.floor_divide.default, (x, x), padding=0)
    assert torch.cat(emit_local(call).values)[:6].tolist() == [1] * 6


X, Y, Z = normal(6, 3), normal(6, 3) + 9, normal(3, 5)


@pytest.mark.parametrize(
    ("op", "args", "name", "zero"),
    [
        (aten.mm.default, (X, Z), "i", True),
        (aten.mul.Tensor, (X, Y), "dim0", True),
        (aten.add.Tensor, (X, Y), "dim0", True),
        (aten.add.Tensor, (X, normal(3)), "dim0", False),
        (aten.div.Tensor, (X, Y), "dim0", False),
        (aten.div.Tensor, (X, normal(3)), "dim0", True),
        (aten.exp.default, (X,), "dim0", False),
        (aten.sum.dim_IntList, (X, [1]), "d0", True),
        (aten.mean.dim, (X, [1]), "d0", False),  # it has a local program, of which nothing is known
        (aten.amax.default, (X, [1]), "d0", False),
        (aten.threshold_backward.default, (X, Y, 0), "dim0", False),
        (aten.view.default, (X, [2, 3, 3]), "d1", True),
        (aten.view.default, (torch.arange(18).view(6, 3), [2, 9]), "d0", True),
        (aten.expand.default, (X.unsqueeze(0), [3, 6, 3]), "d1", True),
        (aten.expand.default, (X.unsqueeze(0), [3, 6, 3]), "new0", False),
        (aten.cumsum.default, (X, 0), "d0", False),
        (aten.addmm.default, (normal(5), X, Z), "i", False),
    ],
)
def test_zeros_are_known_to_stay_zeros_where_they_do(op: Any, args: tuple[Any, ...], name: str, zero: bool) -> None:
    rule = named(op, *args)
    call = local_call(rule, rule.indices(name), FOUR, op, args, padding=0)
    known = zero_padded_results(rule, rule.indices(name), [True] * len(call.operands))
    assert known == (zero,)
    if not zero:
        return
    value = emit_local(call)
    spec = result_spec(rule, call.choices, FOUR, 0)
    for place, held in zip(FOUR.coordinates(), value.values, strict=True):
        mine = shard(torch.ones(call.call.results[0].shape), spec, FOUR, place, padded=True)
        assert not held[mine == 0].any()


def test_what_is_zero_already_is_not_made_zero_again() -> None:
    left, right = normal(3, 6), normal(6, 2)
    rule = named(aten.mm.default, left, right)
    call = local_call(rule, (1,), FOUR, aten.mm.default, (left, right), padding=0)
    assert [mask.operand for mask in masks(call.call, rule, (1,), FOUR)] == [0, 1]
    call.zeros = (True, False)
    left_shards, right_shards = call.operands
    assert filled(call)[0] is left_shards
    assert filled(call)[1] is not right_shards
    assert call.zeros == (True, True)


@pytest.mark.parametrize("vocabulary", [5, 7, 61])
def test_cross_entropy_of_a_vocabulary_that_does_not_divide(vocabulary: int) -> None:
    scores, target = normal(6, vocabulary), torch.tensor([0, vocabulary - 1, 2, -100, 3, 1])
    logarithms = scores.log_softmax(1)
    loss, weight = aten.nll_loss_forward(logarithms, target, None, 1, -100)
    gradient = aten.nll_loss_backward(loss, logarithms, target, None, 1, -100, weight)
    for op, args in (
        (aten._log_softmax.default, (scores, 1, False)),
        (aten.nll_loss_forward.default, (logarithms, target, None, 1, -100)),
        (aten.nll_loss_backward.default, (loss, logarithms, target, None, 1, -100, weight)),
        (aten._log_softmax_backward_data.default, (gradient, logarithms, 1, torch.float64)),
    ):
        assert check(op, args, sizes=(2, 3, 4, 5)) == []


@pytest.mark.parametrize(
    ("source", "target"),
    [((24,), (6, 4)), ((6, 4), (24,)), ((9, 5), (3, 3, 5)), ((2, 3, 4), (6, 4)), ((5, 36), (5, 3, 3, 4))],
)
def test_views_keep_blocks_of_whole_steps(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    """A factor that stands above others in a dim takes their steps along, on either side of the view."""
    x = normal(*source)
    assert check(aten.view.default, (x, list(target)), sizes=(2, 4, 5)) == []
    assert check(aten.expand.default, (x.unsqueeze(0), [3, *source]), sizes=(2, 4, 5)) == []


@pytest.mark.parametrize("heads", [(3, 3), (6, 3), (6, 2)])
def test_attention_of_heads_that_do_not_divide(heads: tuple[int, int]) -> None:
    tensors = normal(3, heads[0], 5, 4), normal(3, heads[1], 5, 4), normal(3, heads[1], 5, 4)
    assert check(FORWARD, forward_args(tensors, True), sizes=(2, 4, 5)) == []
    assert check(BACKWARD, backward_args(normal(3, heads[0], 5, 4), tensors, True), sizes=(2, 4, 5)) == []


@pytest.mark.parametrize("groups", [1, 5])
def test_convolution_of_sizes_that_do_not_divide(groups: int) -> None:
    image, weight, bias = normal(3, 5, 4, 4), normal(5, 5 // groups, 3, 3), normal(5)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    out = aten.convolution(image, weight, bias, *settings)
    assert check(aten.convolution.default, (image, weight, bias, *settings), sizes=(2, 3, 4)) == []
    backward = (normal(*out.shape), image, weight, [5], *settings, [True, True, True])
    assert check(aten.convolution_backward.default, backward, sizes=(2, 3, 4)) == []
