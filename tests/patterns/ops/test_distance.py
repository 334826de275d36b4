"""Distances between the points of two sets."""

from __future__ import annotations

import math

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal

LEFT, RIGHT = normal(4, 12, 6), normal(4, 8, 6)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, math.inf])
def test_points_may_be_sharded(p: float) -> None:
    assert_sound(aten._cdist_forward.default, LEFT, RIGHT, p, None, shards="dim0 i j")


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_gradients_are_summed_over_the_other_points(p: float) -> None:
    distances = aten._cdist_forward(LEFT, RIGHT, p, None)
    args = (normal(4, 12, 8), LEFT, RIGHT, p, distances)
    assert_sound(aten._cdist_backward.default, *args, shards="dim0 i j k")


def test_euclidean_distances_by_products() -> None:
    assert_sound(aten._euclidean_dist.default, LEFT, RIGHT, shards="dim0 i j")
