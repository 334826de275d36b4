"""Strided views of memory: most are plain views, and all are right however the local tensors lie."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autoshard.patterns.ops.view import memory_order, strided_view
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import TensorMeta
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 6, 12)
TURNED = X.transpose(1, 2)  # [4, 12, 6] in the same memory

CASES = {
    "the same": partial(assert_sound, aten.as_strided.default, X, [4, 6, 12], [72, 12, 1], shards="f0 f1 f2 "),
    "cut in two": partial(
        assert_sound, aten.as_strided.default, X, [4, 3, 2, 12], [72, 24, 12, 1], shards="f0 f1 f2 f3"
    ),
    "in another order": partial(assert_sound, aten.as_strided.default, X, [12, 4, 6], [1, 72, 12], shards="f0 f1 f2"),
    "of a transpose": partial(assert_sound, aten.as_strided.default, TURNED, [24, 12], [12, 1], shards="f0 f1 f2"),
    "a part": partial(assert_sound, aten.as_strided.default, X, [4, 6, 4], [72, 12, 1], 5, shards="f0 f1"),
    "every third": partial(assert_sound, aten.as_strided.default, X, [4, 6, 4], [72, 12, 3], 1, shards="f0 f1 f2"),
    "one row": partial(assert_sound, aten.as_strided.default, X, [12], [1], 24, shards=""),
    "repeated": partial(
        assert_sound, aten.as_strided.default, X, [4, 12, 6, 12], [72, 0, 12, 1], shards="f0 f1 f2 repeated1"
    ),
    "with dims of one": partial(
        assert_sound, aten.as_strided.default, X, [4, 1, 72, 1], [72, 7, 1, 1], shards="f0 f1 f2"
    ),
    "windows that overlap": partial(assert_sound, aten.as_strided.default, normal(12), [5, 4], [2, 1], shards=""),
    "windows of a transpose": partial(assert_sound, aten.as_strided.default, normal(4, 6).t(), [5, 4], [4, 1]),
    "scatter": partial(
        assert_sound,
        aten.as_strided_scatter.default,
        normal(288),
        normal(4, 12, 6),
        [4, 12, 6],
        [72, 1, 12],
        shards="f0 f1 f2",
    ),
    "scatter into a transpose": partial(
        assert_sound, aten.as_strided_scatter.default, TURNED, normal(24, 12), [24, 12], [12, 1], shards="f0 f1 f2"
    ),
    "scatter into a part": partial(
        assert_sound, aten.as_strided_scatter.default, X, normal(4, 6, 4), [4, 6, 4], [72, 12, 1], 5, shards=""
    ),
    "scatter into a part of a transpose": partial(
        assert_sound, aten.as_strided_scatter.default, TURNED, normal(4, 4), [4, 4], [72, 3], shards=""
    ),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_order_in_memory() -> None:
    def order(x: torch.Tensor) -> tuple[int, ...] | None:
        return memory_order(TensorMeta(tuple(x.shape), x.dtype, x.stride()))

    assert order(X) == (0, 1, 2)
    assert order(X.permute(2, 0, 1)) == (1, 2, 0)
    assert order(X[:, :, None].transpose(1, 3)) is not None
    assert order(X[:, ::2]) is None
    assert order(X[:, :1].expand(4, 6, 12)) is None
    assert memory_order(TensorMeta((4,), torch.float64)) is None


def test_what_is_no_cut_of_memory() -> None:
    assert strided_view(12, (5, 4), (2, 1), 0) is None  # overlapping windows
    assert strided_view(12, (2, 2), (5, 1), 0) is None  # strides that do not divide
    assert strided_view(12, (2, 3), (6, 2), 1) is not None


def test_gaps_in_memory_have_no_rule() -> None:
    x = normal(4, 12)[:, ::2]
    assert rule_for(call_of(aten.as_strided.default, (x, [2], [1]), {}, x.as_strided([2], [1]))) is None


def test_a_view_costs_nothing() -> None:
    assert bound(aten.as_strided.default, X, [24, 12], [12, 1])[1].free
