"""Rows scaled down to a largest norm, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, normal


@pytest.mark.parametrize(("dim", "shards"), [(0, "d0"), (-2, "d1")])
def test_slices_along_one_dim(dim: int, shards: str) -> None:
    assert_sound(aten.renorm.default, normal(12, 6, 4), 2, dim, 1.0, shards=shards)


def test_rows_of_a_table() -> None:
    indices = torch.tensor([[0, 7, 7], [11, 3, 4]])
    assert_sound(aten.embedding_renorm.default, normal(12, 6), indices, 0.5, 2.0, shards="v")
