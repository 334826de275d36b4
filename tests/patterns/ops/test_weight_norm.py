"""Rules of weight normalisation and of rows scaled down to a largest norm, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, normal


@pytest.mark.parametrize(("shape", "dim", "shards"), [((12, 6, 4), 0, "d1 d2 o"), ((4, 6, 12), 2, "d0 d1 o")])
def test_weight_norm(shape: tuple[int, ...], dim: int, shards: str) -> None:
    v = normal(*shape)
    g = normal(*(size if place == dim else 1 for place, size in enumerate(shape))).abs() + 1
    assert_sound(aten._weight_norm_interface.default, v, g, dim, shards=shards)
    _, lengths = aten._weight_norm_interface(v, g, dim)
    assert_sound(aten._weight_norm_interface_backward.default, v + 1, v, g, lengths, dim, shards=shards)


# Rows scaled down to a largest norm, against torch.


@pytest.mark.parametrize(("dim", "shards"), [(0, "d0"), (-2, "d1")])
def test_slices_along_one_dim(dim: int, shards: str) -> None:
    assert_sound(aten.renorm.default, normal(12, 6, 4), 2, dim, 1.0, shards=shards)


def test_rows_of_a_table() -> None:
    indices = torch.tensor([[0, 7, 7], [11, 3, 4]])
    assert_sound(aten.embedding_renorm.default, normal(12, 6), indices, 0.5, 2.0, shards="v")
