"""Scans over sharded dims."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 12, 6)
SPLIT = [aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default]
WHOLE = [aten.cummax.default, aten.cummin.default]


@pytest.mark.parametrize("op", SPLIT)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_scanned_dim_may_be_sharded(op: Any, dim: int) -> None:
    assert_sound(op, X, dim, shards="d0 d1 d2")


@pytest.mark.parametrize("op", WHOLE)
def test_the_scanned_dim_is_whole(op: Any) -> None:
    assert_sound(op, X, 1, shards="d0 d2")


@pytest.mark.parametrize("op", [*SPLIT, *WHOLE])
def test_a_number(op: Any) -> None:
    assert_sound(op, normal(), 0, shards="")


@pytest.mark.parametrize("x", [torch.arange(12), torch.arange(12) > 3, torch.arange(12, dtype=torch.int32)])
def test_integers_and_truths(x: torch.Tensor) -> None:
    assert_sound(aten.cumsum.default, x, 0, shards="d0")
    assert_sound(aten.cumsum.default, x, 0, dtype=torch.int32, shards="d0")


def test_what_is_infinite_reaches_what_follows_alone() -> None:
    x = normal(12)
    x[1], x[6], x[11] = math.inf, -math.inf, math.nan
    assert_sound(aten.cumsum.default, x, 0, shards="d0")
    assert_sound(aten.logcumsumexp.default, torch.full((12,), -math.inf, dtype=torch.float64), 0, shards="d0")


def test_complex_logarithms_stay_whole() -> None:
    assert_sound(aten.logcumsumexp.default, torch.view_as_complex(normal(4, 6, 2)), 1, shards="d0")


def test_sums_of_partial_sums_are_linear() -> None:
    assert bound(aten.cumsum.default, X, 1)[1].linear == (frozenset({0}),)
    assert bound(aten.cumprod.default, X, 1)[1].linear == ()
