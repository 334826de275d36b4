"""Rules of the `prims` namespace but for the pointwise ones, which are tested with those that torch tags so."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, bound, normal

prims = torch.ops.prims
X = normal(4, 12, 6)
MASK = X > 0
ALL, DOTS = "d0 d1 d2", "dim0 dim1 dim2"

CASES = {
    "sum": partial(assert_sound, prims.sum.default, X, [0, 2], shards=ALL),
    "amax": partial(assert_sound, prims.amax.default, X, [1], shards=ALL),
    "amin": partial(assert_sound, prims.amin.default, X, [1], shards=ALL),
    "prod": partial(assert_sound, prims.prod.default, X, [2], shards=ALL),
    "transpose": partial(assert_sound, prims.transpose.default, X, [2, 0, 1], shards=ALL),
    "broadcast_in_dim": partial(
        assert_sound, prims.broadcast_in_dim.default, normal(12, 1), [4, 12, 6], [1, 2], shards=ALL
    ),
    "rev": partial(assert_sound, prims.rev.default, X, [1], shards="d0 d2"),
    "squeeze": partial(assert_sound, prims.squeeze.default, normal(4, 1, 6), [1], shards="d0 d1"),
    "split_dim": partial(assert_sound, prims.split_dim.default, X, 1, 3, shards="d0 d1 d2 d3"),
    "collapse_view": partial(assert_sound, prims.collapse_view.default, X, 0, 1, shards=ALL),
    "reshape": partial(assert_sound, prims.reshape.default, X, [48, 6], shards=ALL),
    "view_of": partial(assert_sound, prims.view_of.default, X, shards=DOTS),
    "where": partial(assert_sound, prims.where.default, MASK, X, X + 1, shards=DOTS),
    "add": partial(assert_sound, prims.add.default, X, X + 1, shards=DOTS),
    "mul": partial(assert_sound, prims.mul.default, X, X + 1, shards=DOTS),
    "div": partial(assert_sound, prims.div.default, X, X.abs() + 1, shards=DOTS),
    "fma": partial(assert_sound, prims.fma.default, X, X + 1, X + 2, shards=DOTS),
    "exp": partial(assert_sound, prims.exp.default, X, shards=DOTS),
    "eq": partial(assert_sound, prims.eq.default, X, X, shards=DOTS),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_linear_sets() -> None:
    assert bound(prims.add.default, X, X)[1].linear == (frozenset({0, 1}),)
    assert bound(prims.mul.default, X, X)[1].linear == (frozenset({0}), frozenset({1}))
    assert bound(prims.exp.default, X)[1].linear == ()
