"""Convolution along time, against torch."""

from __future__ import annotations

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal


@pytest.mark.parametrize("pad", [0, 1])
def test_forward_and_backward(pad: int) -> None:
    x, weight, bias = normal(7, 6, 12), normal(3, 12, 8), normal(8)
    assert_sound(aten.conv_tbc.default, x, weight, bias, pad, shards="b i o")
    gradient = normal(7 - 2 + 2 * pad, 6, 8)
    assert_sound(aten.conv_tbc_backward.default, gradient, x, weight, bias, pad, shards="b i o")
