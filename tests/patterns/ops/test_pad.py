"""Padding by constants, which pad local stretches where they can be split."""

from __future__ import annotations

from functools import partial

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

CASES = {
    "zeros": partial(assert_sound, aten.constant_pad_nd.default, normal(12, 12, 12), [12, 0, 6, 6], shards="d0 d1 d2"),
    "ones at odd places": partial(assert_sound, aten.constant_pad_nd.default, normal(12, 6), [1, 1], 1.0, shards="d0"),
    "cutting": partial(assert_sound, aten.constant_pad_nd.default, normal(12, 12), [-4, 0], shards="d0 d1"),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_padding_by_constants_is_sound(sound: partial[None]) -> None:
    sound()


def test_only_zeros_may_be_put_off() -> None:
    assert bound(aten.constant_pad_nd.default, normal(12), [1, 1])[1].linear == (frozenset({0}),)
    assert bound(aten.constant_pad_nd.default, normal(12), [1, 1], 2.0)[1].linear == ()
