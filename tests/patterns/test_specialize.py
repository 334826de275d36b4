"""Rules are fitted to calls: checked against shapes, without what element types do not allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.errors import RuleError
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.specialize import specialize

aten = torch.ops.aten


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
