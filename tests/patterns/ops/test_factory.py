"""Rules of operators that make tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.check import check
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.strategy import axis_choices

aten = torch.ops.aten

X = torch.randn(4, 6, dtype=torch.float64)

CALLS = {
    "zeros": (aten.zeros.default, ([4, 6],)),
    "ones": (aten.ones.default, ([4, 1],)),
    "full": (aten.full.default, ([12], 2.5)),
    "full of no dims": (aten.full.default, ([], 2)),
    "scalar_tensor": (aten.scalar_tensor.default, (3.0,)),
    "zeros_like": (aten.zeros_like.default, (X,)),
    "full_like": (aten.full_like.default, (X, 2)),
    "new_zeros": (aten.new_zeros.default, (X, [4, 12, 6])),
    "new_zeros of equal shape": (aten.new_zeros.default, (X, [4, 6])),
    "new_ones": (aten.new_ones.default, (X, [6])),
    "new_full": (aten.new_full.default, (X, [12], 1)),
    "arange": (aten.arange.default, (12,)),
    "arange from and to": (aten.arange.start_step, (0, 12, 2)),
    "eye": (aten.eye.default, (4,)),
}


@pytest.mark.parametrize(("op", "args"), CALLS.values(), ids=CALLS)
def test_rule_is_sound(op: Any, args: tuple[Any, ...]) -> None:
    assert check(op, args) == []


def test_positions_are_made_whole() -> None:
    rule = rule_for(call_of(aten.arange.default, (12,), {}, torch.arange(12)))
    assert rule is not None
    assert axis_choices(rule, 2) == (-1,)


def test_empty_strided_is_made_at_its_local_size() -> None:
    strided = X.new_empty_strided((4, 12), (1, 4))
    rule = rule_for(call_of(aten.new_empty_strided.default, (X, [4, 12], [1, 4]), {}, strided))
    assert rule is not None
    assert len(rule.indices("d1")) == 1
