"""Sorting, and looking up in what is sorted."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

# Scans over sharded dims.

X = normal(4, 12, 6)
SORTED = torch.linspace(-1, 1, 12, dtype=torch.float64)
ROWS = normal(4, 12)
COUNT = torch.arange(12)

CASES = {
    "sort": partial(assert_sound, aten.sort.default, X, 1, shards="d0 d2"),
    "stable sort": partial(assert_sound, aten.sort.stable, X, stable=True, dim=0, shards="d1 d2"),
    "sort of a number": partial(assert_sound, aten.sort.default, normal(), 0, shards=""),
    "argsort": partial(assert_sound, aten.argsort.default, X, -1, shards="d0 d1"),
    "topk over the last dim": partial(assert_sound, aten.topk.default, X, 2, shards="d0 d1 d2"),
    "topk of everything": partial(assert_sound, aten.topk.default, X, 12, 1, shards="d0 d1 d2"),
    "topk of more than a shard": partial(assert_sound, aten.topk.default, X, 5, 1, shards="d0 d1 d2"),
    "smallest": partial(assert_sound, aten.topk.default, X, 3, 0, False, shards="d0 d1 d2"),
    "topk of a number": partial(assert_sound, aten.topk.default, normal(), 1, shards=""),
    "bucketize": partial(assert_sound, aten.bucketize.Tensor, X, SORTED, shards="dim0 dim1 dim2 sorted"),
    "bucketize of a number": partial(assert_sound, aten.bucketize.Scalar, 0.3, SORTED, shards="sorted"),
    "searchsorted": partial(
        assert_sound, aten.searchsorted.Tensor, SORTED, X, right=True, shards="dim0 dim1 dim2 sorted"
    ),
    "searchsorted by rows": partial(
        assert_sound, aten.searchsorted.Tensor, ROWS.sort().values, normal(4, 6), shards="dim0 sorted values"
    ),
    "searchsorted of a number": partial(assert_sound, aten.searchsorted.Scalar, SORTED, 0.2, shards="sorted"),
    "searchsorted with a sorter": partial(
        assert_sound, aten.searchsorted.Tensor, ROWS, normal(4, 6), sorter=ROWS.argsort(), shards="dim0 values"
    ),
    "searchsorted of a number with a sorter": partial(
        assert_sound, aten.searchsorted.Scalar, SORTED, 0.2, sorter=COUNT, shards=""
    ),
    "isin": partial(
        assert_sound,
        aten.isin.Tensor_Tensor,
        COUNT.reshape(4, 3),
        torch.tensor([[3, 4], [7, 9]]),
        shards="dim0 dim1 t0 t1",
    ),
    "isin inverted": partial(
        assert_sound, aten.isin.Tensor_Tensor, COUNT, torch.tensor([3, 4, 7, 9]), invert=True, shards="dim0 t0"
    ),
    "isin of a number": partial(assert_sound, aten.isin.Tensor_Scalar, COUNT, 3, shards="dim0"),
    "a number isin": partial(assert_sound, aten.isin.Scalar_Tensor, 3, COUNT, shards="t0"),
    "histc": partial(assert_sound, aten.histc.default, X, 10, -2, 2, shards="dim0 dim1 dim2"),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_bins_that_follow_from_the_elements_have_no_rule() -> None:
    assert rule_for(call_of(aten.histc.default, (X, 10), {}, aten.histc.default(X, 10))) is None


def test_what_topk_exchanges_is_priced() -> None:
    _, rule = bound(aten.topk.default, X, 2, 1)
    assert rule.factors[1].exchanges == (("gather_of_each", 4 * 2 * 6 * 8),) * 2


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
