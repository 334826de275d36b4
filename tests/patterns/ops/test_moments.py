"""Variance and deviation over sharded dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 12, 6)
OPS = [aten.var, aten.std, aten.var_mean, aten.std_mean]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x", [X, X + 1e6, X.float(), X.bfloat16()], ids=["plain", "large mean", "float", "bfloat16"])
@pytest.mark.parametrize("dims", [[1], [0, 2], None])
def test_all_dims_may_be_sharded(op: Any, x: torch.Tensor, dims: list[int] | None) -> None:
    assert_sound(op.correction, x, dims, shards="d0 d1 d2")


@pytest.mark.parametrize("op", OPS)
def test_arguments_of_all_overloads(op: Any) -> None:
    assert_sound(op.correction, X, [1], correction=0, keepdim=True, shards="d0 d1 d2")
    assert_sound(op.correction, X, [1], correction=2.5, shards="d0 d1 d2")
    assert_sound(op.dim, X, [1], False, shards="d0 d1 d2")
    assert_sound(op.default, X, True, shards="d0 d1 d2")


def test_no_degree_of_freedom_gives_what_torch_gives() -> None:
    assert_sound(aten.var.correction, normal(12), [0], correction=12, shards="d0")


def test_reduced_dims_of_complex_numbers_stay_whole() -> None:
    assert_sound(aten.var.correction, torch.view_as_complex(normal(4, 6, 2)), [1], shards="d0")


def test_large_means_cost_no_digits() -> None:
    """Two passes: the sum of squares alone would leave nothing of a variance of 1 beside a mean of 1e9."""
    assert_sound(aten.var.correction, normal(12) + 1e9, [0], shards="d0")


def test_the_exchange_is_priced_in_the_dtype_that_is_exchanged() -> None:
    _, rule = bound(aten.var.correction, X.bfloat16(), [1])
    (exchange,) = rule.factors[1].exchanges
    assert exchange == ("all_reduce", 2 * 4 * 6 * 4)
