from __future__ import annotations

import pytest
import torch

from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal


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
