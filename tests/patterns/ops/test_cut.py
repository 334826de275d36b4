"""Rules of cutting and putting together, against the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.ops.slicing import CUT
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.soundness import check
from tests.patterns.ops.soundness import assert_sound, normal

aten = torch.ops.aten


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
