"""Reductions of segments, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

LENGTHS = torch.tensor([3, 4, 0, 5])
CASES = [
    (normal(12, 6, 4), {"lengths": LENGTHS}, "d0 d1"),
    (normal(12, 6), {"offsets": torch.tensor([0, 3, 7, 12])}, "d0"),
    (normal(6, 12, 4), {"lengths": LENGTHS.expand(6, 4).contiguous(), "axis": 1}, "b0 d0"),
]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize(("data", "segments", "shards"), CASES, ids=["lengths", "offsets", "second dim"])
def test_segments_and_their_gradient(data: torch.Tensor, segments: dict[str, Any], shards: str, reduce: str) -> None:
    initial = {"initial": 1.0} if reduce in ("mean", "max", "min") else {}  # of what is empty
    assert_sound(aten.segment_reduce.default, data, reduce, **segments, **initial, shards=shards)
    output = aten.segment_reduce.default(data, reduce, **segments, **initial)
    gradient = normal(*output.shape)
    backward = aten._segment_reduce_backward.default
    assert_sound(backward, gradient, output, data, reduce, **segments, **initial, shards=shards)


def test_partial_sums_pass_where_nothing_is_added() -> None:
    data, segments, _ = CASES[0]
    for options, linear in (({}, (frozenset({0}),)), ({"initial": 1.0}, ())):
        _, rule = bound(aten.segment_reduce.default, data, "sum", **segments, **options)
        assert rule.linear == linear


def test_segments_by_index_are_left_whole() -> None:
    data, index = normal(12, 6), torch.zeros(12, dtype=torch.int64)
    assert rule_for(call_of(aten.segment_reduce.default, (data, "sum"), {"indices": index}, data)) is None
