from __future__ import annotations

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

INDICES = torch.tensor([[3, 0, 11, 5, 3, 3], [1, 2, 10, 9, 8, 7], [6, 6, 6, 4, 0, 11], [3, 2, 1, 0, 5, 6]])


def test_forward() -> None:
    assert_sound(aten.embedding.default, normal(12, 6), INDICES, shards="v d dim0 dim1")
    assert_sound(aten.embedding.default, normal(12, 6), torch.tensor(7))


def test_rows_of_other_ranks_do_not_leak() -> None:
    table = normal(12, 6)
    table[0] = torch.inf  # looked up in place of rows that lie elsewhere, if anything is
    assert_sound(aten.embedding.default, table, torch.tensor([3, 7, 11, 5]))


@pytest.mark.parametrize("padding", [-1, 3])
def test_backward(padding: int) -> None:
    op, gradient = aten.embedding_dense_backward.default, normal(4, 6, 6)
    assert_sound(op, gradient, INDICES, 12, padding, False, shards="v d dim0 dim1")
    assert_sound(op, gradient, INDICES, 12, padding, True, shards="d")


def test_vocabulary_is_taken_in_whole_stretches() -> None:
    for rule in (
        bound(aten.embedding.default, normal(12, 6), INDICES)[1],
        bound(aten.embedding_dense_backward.default, normal(4, 6, 6), INDICES, 12, -1, False)[1],
    ):
        assert [factor.name for factor in rule.factors if factor.contiguous] == ["v"]
