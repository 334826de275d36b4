"""Rules of pooling and of operators that move positions of images, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

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


# Images at other positions.


SMOOTH = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"]
SMOOTH += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]


def _image(name: str) -> tuple[int, ...]:
    spatial = next(int(letter) for letter in name if letter.isdigit())
    return (4, 6, 8, 4, 12)[: 2 + spatial]


@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("name", SMOOTH)
def test_interpolation(name: str, corners: bool) -> None:
    shape = _image(name)
    size = [2 * extent - 1 for extent in shape[2:]]
    assert_sound(getattr(aten, name).default, normal(*shape), size, corners, shards="n c")
    backward = getattr(aten, f"{name}_backward").default
    assert_sound(backward, normal(4, 6, *size), size, list(shape), corners, shards="n c")


@pytest.mark.parametrize("exact", ["upsample_nearest", "_upsample_nearest_exact"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize(("size", "shards"), [((16, 12, 12), "x0 x1 x2"), ((7, 2, 5), "x1"), ((4, 4, 24), "x0 x1 x2")])
def test_copies(exact: str, spatial: int, size: tuple[int, ...], shards: str) -> None:
    name, shape = f"{exact}{spatial}d", (2, 3, 8, 4, 12)[: 2 + spatial]
    wanted = " ".join(["n", "c", *(each for each in shards.split() if int(each[1]) < spatial)])
    assert_sound(getattr(aten, name).default, normal(*shape), list(size[:spatial]), shards=wanted)
    backward = getattr(aten, f"{name}_backward").default
    assert_sound(backward, normal(2, 3, *size[:spatial]), list(size[:spatial]), list(shape), shards=wanted)


def test_a_scale_that_is_named_must_be_that_of_the_sizes() -> None:
    x = normal(2, 3, 8, 4)
    assert_sound(aten.upsample_nearest2d.default, x, [16, 8], 2.0, 2.0, shards="n c x0 x1")
    assert_sound(aten.upsample_nearest2d.default, x, [16, 8], 2.05, None, shards="n c x1")


@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic"])
def test_with_scales_alone(kind: str) -> None:
    corners = () if kind == "nearest" else (False,)
    assert_sound(getattr(aten, f"upsample_{kind}2d").vec, normal(4, 6, 8, 8), None, *corners, [2.0, 2.0])


@pytest.mark.parametrize("spatial", [2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_grid_sample(spatial: int, padding: int) -> None:
    image, grid = normal(4, 3, *[5] * spatial), normal(4, *[6, 4, 3][:spatial], spatial)
    points = " ".join(f"x{place}" for place in range(spatial))
    forward = getattr(aten, f"grid_sampler_{spatial}d").default
    assert_sound(forward, image, grid, 0, padding, False, shards=f"n c {points}")
    backward = getattr(aten, f"grid_sampler_{spatial}d_backward").default
    gradient = forward(image, grid, 0, padding, False) + 1
    for mask in ([True, True], [False, True]):
        assert_sound(backward, gradient, image, grid, 0, padding, False, mask, shards=f"n c {points}")


def test_the_image_is_partial_over_points_and_the_grid_over_channels() -> None:
    image, grid, gradient = normal(4, 4, 5, 5), normal(4, 6, 4, 2), normal(4, 4, 6, 4)
    args = (gradient, image, grid, 0, 0, False, [True, True])
    _, rule = bound(aten.grid_sampler_2d_backward.default, *args)
    mesh = MeshShape.of({"x": 2})
    for name, expected in (("x0", ["P(sum)", "S(1)"]), ("c", ["S(1)", "P(sum)"])):
        assert [str(result_spec(rule, rule.indices(name), mesh, result)) for result in range(2)] == expected


@pytest.mark.parametrize("size", [[4, 3, 5, 6], [4, 3, 5, 6, 2]])
def test_affine_grid(size: list[int]) -> None:
    spatial = len(size) - 2
    theta = torch.randn(4, spatial, spatial + 1, dtype=torch.float64)
    assert_sound(aten.affine_grid_generator.default, theta, size, False, shards="n")
