"""Rules, their check against shapes, and their refinement."""

from __future__ import annotations

import pytest
import torch

from autoshard.errors import RuleError
from autoshard.patterns.notation import bind
from autoshard.patterns.registry import call_of
from autoshard.patterns.rule import Factor, Rule, refine

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
