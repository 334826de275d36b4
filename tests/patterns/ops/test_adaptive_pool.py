from __future__ import annotations

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, normal


@pytest.mark.parametrize(("size", "shards"), [([4, 8], "b0 b1 x2 x3"), ([3, 4], "b0 b1 x3"), ([1, 1], "b0 b1")])
def test_mean(size: list[int], shards: str) -> None:
    x = normal(4, 6, 8, 8)
    assert_sound(aten._adaptive_avg_pool2d.default, x, size, shards=shards)
    assert_sound(aten._adaptive_avg_pool2d_backward.default, normal(4, 6, *size), x, shards=shards)


def test_mean_of_volumes() -> None:
    x = normal(4, 6, 4, 4, 4)
    assert_sound(aten._adaptive_avg_pool3d.default, x, [2, 2, 2], shards="b0 b1 x2 x3 x4")
    assert_sound(aten._adaptive_avg_pool3d_backward.default, normal(4, 6, 2, 2, 2), x)


@pytest.mark.parametrize("spatial", [2, 3])
def test_maximum(spatial: int) -> None:
    x = normal(4, 6, *[6] * spatial)
    forward, backward = (getattr(aten, f"adaptive_max_pool{spatial}d{end}").default for end in ("", "_backward"))
    assert_sound(forward, x, [3] * spatial, shards="dim0 dim1")
    result, indices = forward(x, [3] * spatial)
    assert_sound(backward, result + 1, x, indices, shards="dim0 dim1")
    unpooled = [[6] * spatial] if spatial == 2 else [[6] * spatial, [2] * spatial, [0] * spatial]
    assert_sound(getattr(aten, f"max_unpool{spatial}d").default, result, indices, *unpooled, shards="dim0 dim1")


@pytest.mark.parametrize("spatial", [2, 3])
def test_random_windows(spatial: int) -> None:
    x, samples = normal(4, 6, *[6] * spatial), torch.rand(4, 6, spatial, dtype=torch.float64)
    forward, backward = (getattr(aten, f"fractional_max_pool{spatial}d{end}").default for end in ("", "_backward"))
    sizes = ([2] * spatial, [3] * spatial)
    assert_sound(forward, x, *sizes, samples, shards="dim0 dim1")
    result, indices = forward(x, *sizes, samples)
    assert_sound(backward, result + 1, x, *sizes, indices, shards="dim0 dim1")
