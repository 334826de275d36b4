"""Rules, their check against shapes, and their refinement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.errors import RuleError
from autoshard.patterns.notation import bind
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import Factor, OpCall, Rule, refine, specialize

aten = torch.ops.aten
LEFT, RIGHT = torch.randn(4, 12), torch.randn(12, 6)
CALL = call_of(aten.mm.default, (LEFT, RIGHT), {}, LEFT @ RIGHT)
MM = bind("i k, k j -> i j", CALL)


def test_arguments_by_name_and_by_default() -> None:
    call = call_of(aten.sum.dim_IntList, (LEFT, [1]), {"dtype": None}, LEFT.sum(1))
    assert call.arg("dim") == (1,)
    assert call.arg("keepdim") is False
    assert call.arg("dtype") is None
    with pytest.raises(RuleError, match="has no argument 'axis'"):
        call.arg("axis")


def test_check_names_the_tensor_that_does_not_fit() -> None:
    wrong = Rule((Factor("i", 5),), (((0,), ()), ((), ())), (((), ()),))
    with pytest.raises(RuleError, match=r"operand 0 has shape \[4, 12\], but the rule's factors make \[5, 1\]"):
        wrong.check(CALL)
    MM.check(CALL)


def test_refine_splits_a_factor_everywhere() -> None:
    refined = refine(MM, {1: (3, 6)})
    assert [(factor.name, factor.size) for factor in refined.factors] == [
        ("i", 4),
        ("k.0", 3),
        ("k.1", 2),
        ("k.2", 2),
        ("j", 6),
    ]
    assert refined.operands == (((0,), (1, 2, 3)), ((1, 2, 3), (4,)))
    assert refined.indices("k") == (1, 2, 3)
    assert refined.indices("k.1") == (2,)
    refined.check(CALL)


def test_refine_without_cuts_is_the_rule_itself() -> None:
    assert refine(MM, {}) is MM


def test_reductions_are_sums_unless_said_otherwise() -> None:
    assert Factor("k", 4).reduction(0) == "sum"
    assert Factor("k", 4, reductions=("max", None)).reduction(1) is None
    assert Factor("k.0", 4).base == "k"


def _call(op: Any, *args: Any) -> OpCall:
    return call_of(op, args, {}, op(*args))


def test_a_rule_whose_factors_do_not_make_the_shapes_is_refused() -> None:
    call = _call(aten.mm.default, torch.randn(2, 3), torch.randn(3, 4))
    with pytest.raises(RuleError, match="the rule has 1 operands, the call 2"):
        specialize(Rule((), (((), ()),), (((), ()),)), call)


def test_truth_values_and_indices_are_no_partial_sums() -> None:
    x = torch.randn(4)
    for other in (x > 0, torch.arange(4)):
        rule = rule_for(_call(aten.mul.Tensor, x, other))
        assert rule is not None
        assert rule.linear == (frozenset({0}),)


def test_truth_values_are_not_added_up() -> None:
    numbers, index = torch.zeros(4, 6), torch.tensor([0, 3])
    shardable = [
        {factor.name for factor in rule.factors if factor.shardable}
        for value in (numbers, numbers.bool())
        for rule in (rule_for(_call(aten.index_add.default, value, 0, index, value[:2])),)
        if rule is not None
    ]
    assert shardable == [{"d0", "d1", "index"}, {"d0", "d1"}]
