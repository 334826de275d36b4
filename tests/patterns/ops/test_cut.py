"""Rules of cutting and putting together, against the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.check import check
from autoshard.patterns.ops.cut import CUT
from autoshard.patterns.registry import call_of, rule_for

aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


CALLS = {
    "slice": (aten.slice.Tensor, (_x(4, 36), 1, 12, 24)),
    "slice from the end": (aten.slice.Tensor, (_x(4, 36), -1, -12, 9223372036854775807)),
    "slice of everything": (aten.slice.Tensor, (_x(4, 36), 1)),
    "slice of nothing": (aten.slice.Tensor, (_x(4, 36), 1, 24, 12)),
    "slice by a step": (aten.slice.Tensor, (_x(4, 36), 1, 0, 36, 2)),
    "slice at odd places": (aten.slice.Tensor, (_x(4, 36), 1, 1, 8)),
    "slice_backward": (aten.slice_backward.default, (_x(4, 12), [4, 36], 1, 12, 24, 1)),
    "slice_backward by a step": (aten.slice_backward.default, (_x(4, 18), [4, 36], 1, 0, 36, 2)),
    "slice_scatter": (aten.slice_scatter.default, (_x(4, 36), _x(4, 12), 1, 12, 24)),
    "narrow": (aten.narrow.default, (_x(4, 36), 1, -24, 12)),
    "split": (aten.split.Tensor, (_x(4, 36), 12, -1)),
    "split with a rest": (aten.split.Tensor, (_x(36, 4), 16)),
    "split_with_sizes": (aten.split_with_sizes.default, (_x(4, 48), [24, 12, 12], 1)),
    "chunk": (aten.chunk.default, (_x(4, 36), 3, 1)),
    "cat": (aten.cat.default, ([_x(4, 12), _x(4, 24)], 1)),
    "stack": (aten.stack.default, ([_x(4, 6), _x(4, 6)], -1)),
    "select": (aten.select.int, (_x(4, 6, 12), 1, -1)),
    "unbind": (aten.unbind.int, (_x(4, 3, 12), 1)),
    "select_backward": (aten.select_backward.default, (_x(4, 12), [4, 6, 12], 1, 2)),
    "select_scatter": (aten.select_scatter.default, (_x(4, 6, 12), _x(4, 12), 1, 2)),
    "constant_pad_nd": (aten.constant_pad_nd.default, (_x(12, 12, 12), [12, 0, 6, 6])),
    "constant_pad_nd by ones": (aten.constant_pad_nd.default, (_x(12, 6), [1, 1], 1.0)),
    "constant_pad_nd that cuts": (aten.constant_pad_nd.default, (_x(12, 12), [-4, 0])),
}


@pytest.mark.parametrize(("op", "args"), CALLS.values(), ids=CALLS)
def test_rule_is_sound(op: Any, args: tuple[Any, ...]) -> None:
    assert check(op, args) == []


@pytest.mark.parametrize(
    ("op", "args", "inner"),
    [
        (aten.slice.Tensor, (_x(4, 36), 1, 12, 24), 12),
        (aten.split.Tensor, (_x(4, 36), 12, 1), 12),
        (aten.split_with_sizes.default, (_x(4, 48), [24, 12, 12], 1), 12),
        (aten.chunk.default, (_x(4, 36), 3, 1), 12),
        (aten.cat.default, ([_x(4, 12), _x(4, 24)], 1), 12),
        (aten.constant_pad_nd.default, (_x(4, 12), [8, 0]), None),
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
