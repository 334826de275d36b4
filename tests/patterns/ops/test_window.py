"""Windows over a dim, and the way back."""

from __future__ import annotations

from functools import partial

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal

CASES = {
    "overlapping": partial(assert_sound, aten.unfold.default, normal(12, 8), 1, 4, 2, shards="d0"),
    "side by side": partial(assert_sound, aten.unfold.default, normal(12, 24), 1, 4, 4, shards="d0 windows window"),
    "one of all": partial(assert_sound, aten.unfold.default, normal(12, 24), 0, 12, 12, shards="d1 window"),
    "with a rest": partial(assert_sound, aten.unfold.default, normal(12, 25), 1, 4, 4, shards="d0"),
    "of a number": partial(assert_sound, aten.unfold.default, normal(), 0, 1, 1, shards=""),
    "overlapping, back": partial(
        assert_sound, aten.unfold_backward.default, normal(12, 3, 4), [12, 8], 1, 4, 2, shards="d0"
    ),
    "side by side, back": partial(
        assert_sound, aten.unfold_backward.default, normal(12, 6, 4), [12, 24], 1, 4, 4, shards="d0 windows window"
    ),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()
