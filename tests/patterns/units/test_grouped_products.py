from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the operators)

from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, bound, normal

ENDS = [[3, 3, 9, 12, 20, 24], [0, 0, 0, 24, 24, 24], [4, 8, 12, 16, 18, 20], [24] * 6]


@pytest.mark.parametrize("ends", ENDS)
def test_forward_and_backward(ends: list[int]) -> None:
    """Groups of several sizes, empty ones, rows that belong to none."""
    rows, weights, gradient = normal(24, 8), normal(6, 8, 12), normal(24, 12)
    offs = torch.tensor(ends, dtype=torch.int32)
    op = torch.ops.transformers.grouped_mm_fallback.default
    assert_sound(op, rows, weights, offs, shards="i k g j")
    backward = torch.ops.transformers.grouped_mm_fallback_backward.default
    assert_sound(backward, rows, weights, offs, gradient, shards="i k g j")


def test_results_are_partial_over_groups() -> None:
    args = (normal(24, 8), normal(6, 8, 12), torch.tensor(ENDS[0], dtype=torch.int32), normal(24, 12))
    mesh = MeshShape.of({"x": 2})
    _, rule = bound(torch.ops.transformers.grouped_mm_fallback.default, *args[:3])
    assert str(result_spec(rule, rule.indices("g"), mesh, 0)) == "P(sum)"
    _, rule = bound(torch.ops.transformers.grouped_mm_fallback_backward.default, *args)
    assert [str(result_spec(rule, rule.indices("g"), mesh, result)) for result in (0, 1)] == ["P(sum)", "S(0)"]
    assert [str(result_spec(rule, rule.indices("j"), mesh, result)) for result in (0, 1)] == ["P(sum)", "S(2)"]
