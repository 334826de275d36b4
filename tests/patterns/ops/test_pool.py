"""Rules of pooling and of operators that move positions of images, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, normal

WINDOWS = [  # kernel, stride, padding, further settings, what may be sharded besides batch and channels
    ([3, 3], [2, 2], [1, 1], (), "x0 x1"),
    ([2, 2], [2, 2], [0, 0], (), "x0 x1"),
    ([3, 2], [1, 2], [1, 0], (), "x0 x1"),
    ([3, 3], [2, 2], [1, 1], (True,), ""),
    ([3, 3], [1, 1], [0, 0], (), ""),
]


def _mean(settings: tuple[Any, ...], *rest: Any) -> tuple[Any, ...]:
    """Settings of a mean pool in which nothing is left to its default."""
    return (*settings, *(False, True, None)[len(settings) - 3 :], *rest)


@pytest.mark.parametrize(("kernel", "stride", "padding", "more", "shards"), WINDOWS)
def test_mean_pool(kernel: list[int], stride: list[int], padding: list[int], more: tuple, shards: str) -> None:
    x = normal(2, 3, 12, 8)
    settings = _mean((kernel, stride, padding, *more))
    assert_sound(aten.avg_pool2d.default, x, *settings, shards=f"b0 b1 {shards}")
    gradient = normal(*aten.avg_pool2d(x, *settings).shape) + 1
    assert_sound(aten.avg_pool2d_backward.default, gradient, x, *settings, shards=f"b0 b1 {shards}")


def test_padding_that_counts_nothing_keeps_positions_whole() -> None:
    x = normal(2, 3, 12, 8)
    assert_sound(aten.avg_pool2d.default, x, [3, 2], [1, 2], [1, 0], False, False, shards="b0 b1 x1")
    assert_sound(aten.avg_pool2d.default, x, [3, 3], [1, 1], [1, 1], False, False, 4, shards="b0 b1 x0 x1")


@pytest.mark.parametrize(("kernel", "stride", "padding", "more", "shards"), WINDOWS)
def test_max_pool(kernel: list[int], stride: list[int], padding: list[int], more: tuple, shards: str) -> None:
    x = normal(2, 3, 12, 8)
    settings = (kernel, stride, padding, [1, 1], bool(more))
    result, indices = aten.max_pool2d_with_indices(x, *settings)
    assert_sound(aten.max_pool2d_with_indices.default, x, *settings, shards=f"b0 b1 {shards}")
    backward = aten.max_pool2d_with_indices_backward.default
    assert_sound(backward, result + 1, x, *settings, indices, shards=f"b0 b1 {shards}")


def test_images_without_a_batch_dim_and_numbers_infinitely_small() -> None:
    x = normal(2, 16, 8)
    x[0, 3:12] = -torch.inf
    window = ([3, 3], [2, 2], [1, 1])
    assert_sound(aten.max_pool2d_with_indices.default, x, *window, shards="b0 x0 x1")
    x[:] = -torch.inf
    result, indices = aten.max_pool2d_with_indices(x, *window)
    assert_sound(aten.max_pool2d_with_indices_backward.default, result * 0 + 1, x, *window, [1, 1], False, indices)


@pytest.mark.parametrize(("kernel", "padding", "dilation"), [(2, 0, 1), (3, 1, 1), (2, 1, 2)])
def test_volumes(kernel: int, padding: int, dilation: int) -> None:
    x = normal(1, 2, 4, 4, 8)
    window = ([kernel] * 3, [2] * 3, [padding] * 3)
    result, indices = aten.max_pool3d_with_indices(x, *window, [dilation] * 3)
    assert_sound(aten.max_pool3d_with_indices.default, x, *window, [dilation] * 3)
    backward = aten.max_pool3d_with_indices_backward.default
    assert_sound(backward, result + 1, x, *window, [dilation] * 3, False, indices)
    assert_sound(aten.avg_pool3d.default, x, *window)
    gradient = normal(*aten.avg_pool3d(x, *window).shape)
    assert_sound(aten.avg_pool3d_backward.default, gradient, x, *window, False, True, None)


def test_two_dims_of_positions_at_once() -> None:
    """A mesh of two axes shards both; 3 x 3 windows then reach a neighbour's corner."""
    x = normal(8, 8).view(1, 1, 8, 8)
    assert_sound(aten.avg_pool2d.default, x, [3, 3], [1, 1], [1, 1], shards="x0 x1")
    assert_sound(aten.max_pool2d_with_indices.default, x, [3, 3], [1, 1], [1, 1], shards="x0 x1")


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


WINDOW = ([2, 3], [1, 1], [1, 0], [2, 1])


def test_patches() -> None:
    x = normal(2, 6, 8, 4)
    columns = aten.im2col(x, *WINDOW)
    assert_sound(aten.im2col.default, x, *WINDOW, shards="dim0 c")
    assert_sound(aten.im2col.default, x[0], *WINDOW, shards="c")
    assert_sound(aten.col2im.default, columns + 1, [8, 4], *WINDOW, shards="dim0 c")


def test_pixels_from_channels_and_back() -> None:
    assert_sound(aten.pixel_shuffle.default, normal(2, 12, 4, 6), 2, shards="dim0 c h w")
    assert_sound(aten.pixel_unshuffle.default, normal(2, 3, 8, 12), 2, shards="dim0 c h w")


@pytest.mark.parametrize("groups", [2, 4])
def test_channels_in_another_order(groups: int) -> None:
    assert_sound(aten.channel_shuffle.default, normal(2, 24, 4), groups, shards="n g c s2")


def test_gradient_of_windows() -> None:
    x = normal(4, 12, 6)
    windows = x.unfold(1, 4, 2)
    assert_sound(aten.unfold_backward.default, windows + 1, [4, 12, 6], 1, 4, 2, shards="d0 d2")
    assert_sound(aten.unfold_backward.default, windows + 1, [4, 12, 6], -2, 4, 2)
