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
