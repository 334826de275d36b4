from __future__ import annotations

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_and_its_gradient(name: str, dim: int) -> None:
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward_data")
    x = 5 * normal(4, 6, 12)
    assert_sound(forward.default, x, dim, False)
    assert_sound(backward.default, normal(4, 6, 12) + 1, forward(x, dim, False), dim, torch.float64)


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_classes_that_one_rank_holds_may_all_be_masked(name: str) -> None:
    x = normal(4, 12)
    x[:, :7] = -torch.inf
    x[1] = 1e4
    assert_sound(getattr(aten, name).default, x, -1, False, shards="b0 d")


def test_scalar() -> None:
    assert_sound(aten._softmax.default, torch.tensor(2.0), -1, False)


def test_single_precision_is_not_widened() -> None:
    assert_sound(aten._log_softmax.default, normal(4, 12).bfloat16(), -1, False)


def test_safe_softmax_gives_zeros_for_rows_that_are_masked_out() -> None:
    x = normal(4, 12)
    x[2] = -torch.inf
    x[1, :7] = -torch.inf
    assert_sound(aten._safe_softmax.default, x, -1, shards="b0 d")
    assert_sound(aten._safe_softmax.default, x.float(), 1, torch.float64)


def test_exchange_is_two_numbers_per_row() -> None:
    _, rule = bound(aten._log_softmax.default, normal(4, 12), -1, False)
    assert rule.factors[rule.indices("d")[0]].exchanges == (("all_reduce", 2 * 8 * 4),)
