from __future__ import annotations

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal

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
