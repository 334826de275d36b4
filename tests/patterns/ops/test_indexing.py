"""Rules of gathering by index: the indexed dim may be sharded, too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 12, 6)
GENERATOR = torch.Generator().manual_seed(0)


def index(below: int, *shape: int) -> torch.Tensor:
    """Indices from zero to `below`."""
    return torch.randint(0, below, shape, generator=GENERATOR)


CASES = {
    "index_select": partial(assert_sound, aten.index_select.default, X, 1, index(12, 8), shards="d0 d1 d2 index"),
    "index_select by one": partial(assert_sound, aten.index_select.default, X, 0, torch.tensor(2), shards="d0 d1 d2"),
    "index_select of a number": partial(
        assert_sound, aten.index_select.default, normal(), 0, torch.tensor([0]), shards=""
    ),
    "index_select of integers": partial(
        assert_sound, aten.index_select.default, index(9, 12, 4), 0, index(12, 8), shards="d0 d1 index"
    ),
    "index_select of truths": partial(
        assert_sound, aten.index_select.default, X > 0, 1, index(12, 8), shards="d0 d2 index"
    ),
    "gather": partial(assert_sound, aten.gather.default, X, 1, index(12, 4, 8, 6), shards="d0 indexed index d2"),
    "gather of a part": partial(assert_sound, aten.gather.default, X, 1, index(12, 2, 8, 6), shards="indexed index d2"),
    "gather of one each": partial(assert_sound, aten.gather.default, X, -1, index(6, 4, 12, 1), shards="d0 d1 indexed"),
    "gather of truths": partial(assert_sound, aten.gather.default, X > 0, 1, index(12, 4, 8, 6), shards="d0 index d2"),
    "index": partial(assert_sound, aten.index.Tensor, normal(12, 4), [index(12, 8)], shards="d0 d1 index0"),
    "index from the end": partial(
        assert_sound, aten.index.Tensor, normal(12, 4), [index(24, 8) - 12], shards="d0 d1 index0"
    ),
    "index in the middle": partial(
        assert_sound, aten.index.Tensor, X, [None, index(12, 4, 2)], shards="d0 d1 d2 index0 index1"
    ),
    "index by two": partial(
        assert_sound, aten.index.Tensor, X, [index(4, 12, 1), index(12, 6)], shards="d0 d1 d2 index0 index1"
    ),
    "index by two apart": partial(
        assert_sound, aten.index.Tensor, X, [index(4, 12), None, index(6, 12) - 3], shards="d0 d1 d2 index0"
    ),
    "_unsafe_index": partial(
        assert_sound, aten._unsafe_index.Tensor, X, [None, None, index(6, 4)], shards="d0 d1 d2 index0"
    ),
    "index of truths": partial(
        assert_sound, aten.index.Tensor, X > 0, [None, index(12, 4, 1), index(6, 2)], shards="d0 index0 index1"
    ),
    "take": partial(assert_sound, aten.take.default, X, index(288, 4, 6) - 100, shards="d0 index0 index1"),
    "take of a number": partial(assert_sound, aten.take.default, normal(), torch.tensor([0, 0]), shards="index0"),
    "take of truths": partial(assert_sound, aten.take.default, X > 0, index(288, 4, 6), shards="index0 index1"),
    "one_hot": partial(assert_sound, aten.one_hot.default, index(12, 4, 6), 12, shards="d0 d1 classes"),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_indexing_by_a_mask_has_no_rule() -> None:
    assert rule_for(call_of(aten.index.Tensor, (X, [X > 0]), {}, X[X > 0])) is None


def test_a_sharded_table_leaves_a_partial_sum() -> None:
    _, rule = bound(aten.index.Tensor, normal(12, 4), [index(12, 8)])
    table = rule.factors[rule.indices("d0")[0]]
    assert table.contiguous
    assert table.reduction(0) == "sum"


def test_what_is_infinite_elsewhere_does_not_leak() -> None:
    table = normal(12, 4)
    table[3], table[7] = torch.inf, torch.nan
    assert_sound(aten.index_select.default, table, 0, torch.tensor([0, 1, 7, 11]), shards="d0 d1 index")


# Gathering and scattering by masked indices, against torch.

TABLE = normal(12, 6)
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
    assert_sound(aten._unsafe_masked_index.default, TABLE, mask, indices, fill, shards=shards)


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
    assert_sound(op, normal(12, 6) + 1, mask, indices, TABLE, shards=shards)


def test_truth_values_do_not_add_up() -> None:
    assert_sound(aten._unsafe_masked_index.default, MASK, MASK, [ROWS], 0, shards="d1 index0")


def test_indices_that_are_masks_are_left_whole() -> None:
    args = (TABLE, torch.ones(6, dtype=torch.bool), [TABLE[:, 0] > 0], 0)
    assert rule_for(call_of(aten._unsafe_masked_index.default, args, {}, TABLE[:6])) is None
