"""Gathering and scattering by masked indices, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, normal

X = normal(12, 6)
MASK = normal(12, 6) > 0.4
ROWS = torch.tensor([0, 3, 11, 5, 5, -2, 7, 9, 1, 0, 4, 8])
COLUMNS = torch.tensor([0, 5, 2, 2, 3, -6])


@pytest.mark.parametrize(
    ("mask", "indices", "fill", "shards"),
    [
        (MASK, [ROWS], 0, "d0 d1 index0"),
        (MASK[:, :1], [None, COLUMNS], 0, "d0 d1 index0"),
        (MASK, [ROWS[:, None], COLUMNS], 0, "d0 d1 index0 index1"),
        (MASK, [ROWS + 5, COLUMNS[[0, 1] * 6]], 0, "d0 d1 index0"),  # out of range: the end that is next
        (MASK, [ROWS], 1.5, "d1 index0"),  # would be added up over ranks
    ],
    ids=["rows", "columns", "both", "out of range", "another number"],
)
def test_masked_lookup(mask: torch.Tensor, indices: list[Any], fill: float, shards: str) -> None:
    mask = mask[:, 0] if len(indices) == 2 and None not in indices and indices[0].dim() == 1 else mask
    assert_sound(aten._unsafe_masked_index.default, X, mask, indices, fill, shards=shards)


@pytest.mark.parametrize(
    ("mask", "indices", "shards"),
    [
        (MASK, [ROWS], "d0 d1 index0"),
        (MASK[:, :1], [ROWS], "d0 d1 index0"),
        (MASK, [ROWS[:, None] + 5, COLUMNS - 3], "d0 d1 index0 index1"),
    ],
    ids=["rows", "rows masked as a whole", "both, out of range"],
)
def test_masked_sums(mask: torch.Tensor, indices: list[Any], shards: str) -> None:
    op = aten._unsafe_masked_index_put_accumulate.default
    assert_sound(op, normal(12, 6) + 1, mask, indices, X, shards=shards)


def test_truth_values_do_not_add_up() -> None:
    assert_sound(aten._unsafe_masked_index.default, MASK, MASK, [ROWS], 0, shards="d1 index0")


def test_indices_that_are_masks_are_left_whole() -> None:
    args = (X, torch.ones(6, dtype=torch.bool), [X[:, 0] > 0], 0)
    assert rule_for(call_of(aten._unsafe_masked_index.default, args, {}, X[:6])) is None
