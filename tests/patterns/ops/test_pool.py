from __future__ import annotations

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal

IMAGES = (4, 6, 8, 8)


def test_max_pool() -> None:
    x = normal(*IMAGES)
    window = ([3, 3], [2, 2], [1, 1])
    assert_sound(aten.max_pool2d_with_indices.default, x, *window, shards="dim0 dim1")
    assert_sound(aten.max_pool2d_with_indices.default, x[0], *window, shards="dim0")
    result, indices = aten.max_pool2d_with_indices(x, *window)
    assert_sound(
        aten.max_pool2d_with_indices_backward.default, normal(*result.shape), x, *window, [1, 1], False, indices
    )
    result, indices = aten.adaptive_max_pool2d(x, [3, 3])
    assert_sound(aten.adaptive_max_pool2d.default, x, [3, 3])
    assert_sound(aten.adaptive_max_pool2d_backward.default, normal(*result.shape), x, indices)


def test_max_pool_of_volumes() -> None:
    x = normal(4, 6, 4, 4, 4)
    result, indices = aten.max_pool3d_with_indices(x, [2, 2, 2])
    assert_sound(aten.max_pool3d_with_indices.default, x, [2, 2, 2])
    assert_sound(
        aten.max_pool3d_with_indices_backward.default,
        *(normal(*result.shape), x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, indices),
    )


def test_mean_pool() -> None:
    x = normal(*IMAGES)
    assert_sound(aten.avg_pool2d.default, x, [2, 2], [2, 2])
    assert_sound(aten.avg_pool2d_backward.default, normal(4, 6, 4, 4), x, [2, 2], [2, 2], [0, 0], False, True, None)
    assert_sound(aten._adaptive_avg_pool2d.default, x, [3, 3])
    assert_sound(aten._adaptive_avg_pool2d_backward.default, normal(4, 6, 3, 3), x)


def test_mean_pool_of_volumes() -> None:
    x, pooled = normal(4, 6, 4, 4, 4), normal(4, 6, 2, 2, 2)
    assert_sound(aten.avg_pool3d.default, x, [2, 2, 2])
    assert_sound(aten.avg_pool3d_backward.default, pooled, x, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None)
    assert_sound(aten._adaptive_avg_pool3d.default, x, [2, 2, 2])
    assert_sound(aten._adaptive_avg_pool3d_backward.default, pooled, x)


@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic"])
def test_upsample(kind: str) -> None:
    corners = () if kind == "nearest" else (False,)
    forward, backward = getattr(aten, f"upsample_{kind}2d"), getattr(aten, f"upsample_{kind}2d_backward")
    assert_sound(forward.default, normal(*IMAGES), [16, 16], *corners)
    assert_sound(forward.vec, normal(*IMAGES), None, *corners, [2.0, 2.0])
    assert_sound(backward.default, normal(4, 6, 16, 16), [16, 16], list(IMAGES), *corners)


def test_reflection_pad() -> None:
    assert_sound(aten.reflection_pad2d.default, normal(*IMAGES), [1, 1, 1, 1])
    assert_sound(aten.reflection_pad2d_backward.default, normal(4, 6, 10, 10), normal(*IMAGES), [1, 1, 1, 1])
