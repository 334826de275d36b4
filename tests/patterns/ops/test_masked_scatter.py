"""Elements that fill the places of a mask one after the other."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, normal

X = normal(4, 12, 6)
MASK = X > 0.3
COUNT = int(MASK.sum())
ALL = "d0 d1 d2"

CASES = {
    "masked_scatter": partial(assert_sound, aten.masked_scatter.default, X, MASK, normal(300), shards=ALL),
    "of just as many": partial(assert_sound, aten.masked_scatter.default, X, MASK, normal(COUNT), shards=ALL),
    "from a matrix": partial(assert_sound, aten.masked_scatter.default, X, MASK, normal(20, 15), shards=ALL),
    "by a mask that is broadcast": partial(
        assert_sound, aten.masked_scatter.default, X, MASK[:, :, :1], normal(300), shards=ALL
    ),
    "by nothing": partial(assert_sound, aten.masked_scatter.default, X, X > 99, normal(3), shards=ALL),
    "gradient": partial(assert_sound, aten.masked_scatter_backward.default, X, MASK, [300], shards=ALL),
    "gradient of just as many": partial(
        assert_sound, aten.masked_scatter_backward.default, X, MASK, [COUNT], shards=ALL
    ),
    "gradient of a matrix": partial(assert_sound, aten.masked_scatter_backward.default, X, MASK, [12, 24], shards=ALL),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_sizes_that_depend_on_the_mask_have_no_rule() -> None:
    assert rule_for(call_of(aten.masked_select.default, (X, MASK), {}, X[MASK])) is None
    assert rule_for(call_of(aten.nonzero.default, (MASK,), {}, torch.nonzero(MASK))) is None
