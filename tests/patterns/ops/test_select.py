"""One element of a dim: taken out of, and put back into, a dim that may be sharded."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 12, 6)
ALL = "d0 d1 d2"


@pytest.mark.parametrize(("dim", "index"), [(0, 0), (1, -1), (1, 7), (-1, 3)])
def test_any_dim_may_be_sharded(dim: int, index: int) -> None:
    taken = X.select(dim, 0).clone()
    assert_sound(aten.select.int, X, dim, index, shards=ALL)
    assert_sound(aten.select_backward.default, taken, [4, 12, 6], dim, index, shards=ALL)
    assert_sound(aten.select_scatter.default, X, taken, dim, index, shards=ALL)


CASES = {
    "select of integers": partial(assert_sound, aten.select.int, torch.arange(12), 0, 5, shards="d0"),
    "select of truths": partial(assert_sound, aten.select.int, X > 0, 1, 3, shards="d0 d2"),
    "unbind": partial(assert_sound, aten.unbind.int, normal(4, 3, 12), 1, shards="d0 d2"),
    "stack": partial(assert_sound, aten.stack.default, [normal(4, 6), normal(6, 4).t()], -1, shards="d0 d1"),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_what_the_other_ranks_hold_does_not_leak() -> None:
    x = normal(12)
    x[3], x[8] = torch.inf, torch.nan
    assert_sound(aten.select.int, x, 0, 5, shards="d0")


def test_taking_out_is_a_view_that_leaves_a_partial_sum() -> None:
    _, rule = bound(aten.select.int, X, 1, 7)
    assert rule.free
    assert rule.factors[1].contiguous
    assert rule.factors[1].reduction(0) == "sum"
