"""Rules of upsampling and of sampling at the points of a grid, against torch."""

from __future__ import annotations

import pytest
import torch

from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

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
