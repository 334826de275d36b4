"""Rules of slices, selections, padding and windows, against torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from autoshard.patterns.ops.slicing import CUT
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.soundness import check
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


CALLS = {
    "slice": (aten.slice.Tensor, (_x(4, 36), 1, 12, 24)),
    "slice from the end": (aten.slice.Tensor, (_x(4, 36), -1, -12, 9223372036854775807)),
    "slice of everything": (aten.slice.Tensor, (_x(4, 36), 1)),
    "slice of nothing": (aten.slice.Tensor, (_x(4, 36), 1, 24, 12)),
    "slice by a step that does not divide": (aten.slice.Tensor, (_x(4, 35), 1, 0, 35, 2)),
    "slice by a step, not of everything": (aten.slice.Tensor, (_x(4, 36), 1, 2, 36, 2)),
    "slice of nothing by a step": (aten.slice.Tensor, (_x(4, 36), 1, 0, 0, 2)),
    "slice at odd places": (aten.slice.Tensor, (_x(4, 36), 1, 1, 8)),
    "slice_backward": (aten.slice_backward.default, (_x(4, 12), [4, 36], 1, 12, 24, 1)),
    "slice_scatter": (aten.slice_scatter.default, (_x(4, 36), _x(4, 12), 1, 12, 24)),
    "narrow": (aten.narrow.default, (_x(4, 36), 1, -24, 12)),
    "split": (aten.split.Tensor, (_x(4, 36), 12, -1)),
    "split with a rest": (aten.split.Tensor, (_x(36, 4), 16)),
    "split_with_sizes": (aten.split_with_sizes.default, (_x(4, 48), [24, 12, 12], 1)),
    "chunk": (aten.chunk.default, (_x(4, 36), 3, 1)),
    "cat": (aten.cat.default, ([_x(4, 12), _x(4, 24)], 1)),
}


@pytest.mark.parametrize(("op", "args"), CALLS.values(), ids=CALLS)
def test_a_slice_is_sound(op: Any, args: tuple[Any, ...]) -> None:
    assert check(op, args) == []


@pytest.mark.parametrize(
    ("op", "args", "inner"),
    [
        (aten.slice.Tensor, (_x(4, 36), 1, 12, 24), 12),
        (aten.split.Tensor, (_x(4, 36), 12, 1), 12),
        (aten.split_with_sizes.default, (_x(4, 48), [24, 12, 12], 1), 12),
        (aten.chunk.default, (_x(4, 36), 3, 1), 12),
        (aten.cat.default, ([_x(4, 12), _x(4, 24)], 1), 12),
    ],
)
def test_the_factor_inside_the_pieces_may_be_sharded(op: Any, args: tuple[Any, ...], inner: int | None) -> None:
    rule = rule_for(call_of(op, args, {}, op(*args)))
    assert rule is not None
    inside = [factor for factor in rule.factors if factor.name == CUT]
    assert [(factor.size, factor.shardable) for factor in inside] == ([(inner, True)] if inner else [])


def test_cat_with_an_empty_tensor_of_one_dim_has_no_rule() -> None:
    tensors = [_x(4, 6), _x(0)]
    assert rule_for(call_of(aten.cat.default, (tensors, 0), {}, torch.cat(tensors))) is None


@pytest.mark.parametrize(("step", "start"), [(2, 0), (2, 1), (3, 2), (4, 1)])
def test_groups_of_which_one_element_is_taken_may_be_sharded(step: int, start: int) -> None:
    count = 24 // step
    assert_sound(aten.slice.Tensor, normal(4, 24), 1, start, 2**63 - 1, step, shards="d0 cut")
    assert_sound(aten.slice_scatter.default, normal(4, 24), normal(4, count), 1, start, 24, step, shards="d0 cut")
    assert_sound(aten.slice_backward.default, normal(4, count), [4, 24], 1, start, 24, step, shards="d0 cut")


# One element of a dim: taken out of, and put back into, a dim that may be sharded.

X = normal(4, 12, 6)
ALL = "d0 d1 d2"


@pytest.mark.parametrize(("dim", "index"), [(0, 0), (1, -1), (1, 7), (-1, 3)])
def test_any_dim_may_be_sharded(dim: int, index: int) -> None:
    taken = X.select(dim, 0).clone()
    assert_sound(aten.select.int, X, dim, index, shards=ALL)
    assert_sound(aten.select_backward.default, taken, [4, 12, 6], dim, index, shards=ALL)
    assert_sound(aten.select_scatter.default, X, taken, dim, index, shards=ALL)


SELECTIONS = {
    "select of integers": partial(assert_sound, aten.select.int, torch.arange(12), 0, 5, shards="d0"),
    "select of truths": partial(assert_sound, aten.select.int, X > 0, 1, 3, shards="d0 d2"),
    "unbind": partial(assert_sound, aten.unbind.int, normal(4, 3, 12), 1, shards="d0 d2"),
    "stack": partial(assert_sound, aten.stack.default, [normal(4, 6), normal(6, 4).t()], -1, shards="d0 d1"),
}


@pytest.mark.parametrize("sound", SELECTIONS.values(), ids=SELECTIONS)
def test_a_selection_is_sound(sound: partial[None]) -> None:
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


PADDINGS = {
    "zeros": partial(assert_sound, aten.constant_pad_nd.default, normal(12, 12, 12), [12, 0, 6, 6], shards="d0 d1 d2"),
    "ones at odd places": partial(assert_sound, aten.constant_pad_nd.default, normal(12, 6), [1, 1], 1.0, shards="d0"),
    "cutting": partial(assert_sound, aten.constant_pad_nd.default, normal(12, 12), [-4, 0], shards="d0 d1"),
}


@pytest.mark.parametrize("sound", PADDINGS.values(), ids=PADDINGS)
def test_padding_by_constants_is_sound(sound: partial[None]) -> None:
    sound()


def test_only_zeros_may_be_put_off() -> None:
    assert bound(aten.constant_pad_nd.default, normal(12), [1, 1])[1].linear == (frozenset({0}),)
    assert bound(aten.constant_pad_nd.default, normal(12), [1, 1], 2.0)[1].linear == ()


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_dims_that_are_not_padded_may_be_sharded(kind: str, spatial: int) -> None:
    shape = (2, 3, 4, 6, 8)[: 2 + spatial]
    padding = [1, 2, 0, 0, 2, 1][: 2 * spatial]
    free = {1: "d0 d1", 2: "d0 d1 d2", 3: "d0 d1 d3"}[spatial]
    forward, backward = (getattr(aten, f"{kind}_pad{spatial}d{end}").default for end in ("", "_backward"))
    x = normal(*shape)
    assert_sound(forward, x, padding, shards=free)
    assert_sound(backward, forward(x, padding) + 1, x, padding, shards=free)
    assert_sound(forward, x[0], padding, shards=" ".join(f"d{int(name[1]) - 1}" for name in free.split()[1:]))


WINDOWS = {
    "overlapping": partial(assert_sound, aten.unfold.default, normal(12, 8), 1, 4, 2, shards="d0"),
    "side by side": partial(assert_sound, aten.unfold.default, normal(12, 24), 1, 4, 4, shards="d0 windows window"),
    "one of all": partial(assert_sound, aten.unfold.default, normal(12, 24), 0, 12, 12, shards="d1 window"),
    "with a rest": partial(assert_sound, aten.unfold.default, normal(12, 25), 1, 4, 4, shards="d0"),
    "of a number": partial(assert_sound, aten.unfold.default, normal(), 0, 1, 1, shards=""),
    "overlapping, back": partial(
        assert_sound, aten.unfold_backward.default, normal(12, 3, 4), [12, 8], 1, 4, 2, shards="d0"
    ),
    "side by side, back": partial(
        assert_sound, aten.unfold_backward.default, normal(12, 6, 4), [12, 24], 1, 4, 4, shards="d0 windows window"
    ),
}


@pytest.mark.parametrize("sound", WINDOWS.values(), ids=WINDOWS)
def test_a_window_is_sound(sound: partial[None]) -> None:
    sound()
