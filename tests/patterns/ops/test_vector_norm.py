"""Norms of vectors over sharded dims."""

from __future__ import annotations

import math

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 12, 6)
ORDERS = [0, 1, 2, 3.5, -1, math.inf, -math.inf]
ALL = "d0 d1 d2"


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_sound_over_sharded_dims(order: float) -> None:
    assert_sound(aten.linalg_vector_norm.default, X, order, [1], True, shards=ALL)
    assert_sound(aten.linalg_vector_norm.default, X, order, shards=ALL)
    assert_sound(aten.norm.ScalarOpt_dim, X, order, [0, 2], shards=ALL)
    assert_sound(aten.norm.Scalar, X, order, shards=ALL)
    assert_sound(aten.dist.default, X, normal(6), order, shards="dim0 dim1 dim2")


def test_dtypes() -> None:
    assert_sound(aten.linalg_vector_norm.default, X.bfloat16(), 2, [1], shards=ALL)
    assert_sound(aten.linalg_vector_norm.default, X.float(), 2, [1], dtype=torch.float64, shards=ALL)
    assert_sound(aten.linalg_vector_norm.default, torch.view_as_complex(normal(4, 6, 2)), 2, [1], shards="d0 d1")
    assert_sound(aten.norm.ScalarOpt_dtype, X.bfloat16(), 2, dtype=torch.float32, shards=ALL)


@pytest.mark.parametrize(
    ("order", "kind"), [(0, "sum"), (1, "sum"), (math.inf, "max"), (-math.inf, "min"), (2, None), (3, None)]
)
def test_what_shards_of_a_norm_are(order: float, kind: str | None) -> None:
    _, rule = bound(aten.linalg_vector_norm.default, X, order, [1])
    assert rule.factors[1].reduction(0) == kind
