"""Triangles and diagonals: rows and columns that follow from where a rank's stretch begins."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 12, 6)


@pytest.mark.parametrize("op", [aten.tril.default, aten.triu.default])
@pytest.mark.parametrize("diagonal", [-3, 0, 2, 7])
def test_rows_and_columns_may_be_sharded(op: Any, diagonal: int) -> None:
    assert_sound(op, X, diagonal, shards="d0 d1 d2")


@pytest.mark.parametrize("op", [aten.tril.default, aten.triu.default])
def test_what_is_cut_off_is_zero_whatever_it_was(op: Any) -> None:
    x = normal(12, 12)
    x[3, 5], x[9, 1] = math.nan, math.inf
    assert_sound(op, x, shards="d0 d1")
    assert_sound(op, x > 0, 1, shards="d0 d1")


CASES = {
    "trace": partial(assert_sound, aten.trace.default, normal(12, 8), shards="d0 d1"),
    "trace of integers": partial(assert_sound, aten.trace.default, torch.arange(24).reshape(4, 6), shards="d0 d1"),
    "diagonal": partial(assert_sound, aten.diagonal.default, normal(12, 4, 6), 1, 2, 1, shards="d0"),
    "diagonal_backward": partial(
        assert_sound, aten.diagonal_backward.default, normal(12, 4), [12, 4, 6], 1, 1, 2, shards="d0"
    ),
    "diagonal_scatter": partial(
        assert_sound, aten.diagonal_scatter.default, normal(12, 4, 6), normal(12, 4), 1, 1, 2, shards="d0"
    ),
    "diag_embed": partial(assert_sound, aten.diag_embed.default, normal(12, 4), 1, 0, 2, shards="d1"),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_only_stretches_of_rows_and_columns_are_taken() -> None:
    _, rule = bound(aten.tril.default, X)
    assert [factor.contiguous for factor in rule.factors] == [False, True, True]
