from __future__ import annotations

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal

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
