"""Rules of scattering by index: what is added may be sharded along the index, and what is written to in any dim."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

# Elements that fill the places of a mask one after the other.

X = normal(4, 12, 6)
ROWS = normal(4, 8, 6)
SQUARE = normal(4, 12)
GENERATOR = torch.Generator().manual_seed(0)


def index(below: int, *shape: int) -> torch.Tensor:
    """Indices from zero to `below`."""
    return torch.randint(0, below, shape, generator=GENERATOR)


def places(below: int, count: int) -> torch.Tensor:
    """Indices that differ from each other, so that what is written does not depend on the order."""
    return torch.randperm(below, generator=GENERATOR)[:count]


UNIQUE = torch.stack([places(12, 4) for _ in range(4)])
ALL, ADDED = "d0 d1 d2", "d0 d1 d2 index"
ELEMENTS, ADDED_ELEMENTS = "d0 indexed d2", "d0 indexed index d2"

CASES = {
    "index_add": partial(assert_sound, aten.index_add.default, X, 1, index(12, 8), ROWS, shards=ADDED),
    "index_add scaled": partial(assert_sound, aten.index_add.default, X, 1, index(12, 8), ROWS, alpha=2, shards=ADDED),
    "index_add of integers": partial(
        assert_sound, aten.index_add.default, index(9, 12, 4), 0, index(12, 8), index(9, 8, 4), shards="d0 d1 index"
    ),
    "index_copy": partial(assert_sound, aten.index_copy.default, X, 1, places(12, 4), normal(4, 4, 6), shards=ALL),
    "index_fill": partial(assert_sound, aten.index_fill.int_Scalar, X, 1, index(12, 4), 2.5, shards=ALL),
    "index_fill of zero": partial(assert_sound, aten.index_fill.int_Scalar, X, 1, index(12, 4), 0, shards=ALL),
    "index_fill of truths": partial(assert_sound, aten.index_fill.int_Scalar, X > 0, 1, index(12, 4), True, shards=ALL),
    "index_fill by a tensor": partial(
        assert_sound, aten.index_fill.int_Tensor, X, 1, index(12, 4), normal(), shards=ALL
    ),
    "scatter_add": partial(
        assert_sound, aten.scatter_add.default, X, 1, index(12, 4, 8, 6), ROWS, shards=ADDED_ELEMENTS
    ),
    "scatter_add of a part": partial(
        assert_sound, aten.scatter_add.default, X, 1, index(12, 2, 4, 6), ROWS, shards="indexed d2"
    ),
    "scatter_add of a vector": partial(
        assert_sound, aten.scatter_add.default, index(9, 12), 0, index(12, 8), index(9, 8), shards="indexed index"
    ),
    "scatter": partial(assert_sound, aten.scatter.src, SQUARE, 1, UNIQUE, normal(4, 4), shards="d0 indexed"),
    "scatter of a part": partial(assert_sound, aten.scatter.src, SQUARE, 1, UNIQUE, normal(4, 6), shards="d0 indexed"),
    "scatter of a number": partial(assert_sound, aten.scatter.value, SQUARE, 1, UNIQUE, 2.0, shards="d0 indexed"),
    "scatter of zero": partial(assert_sound, aten.scatter.value, SQUARE, 1, UNIQUE, 0, shards="d0 indexed"),
    "scatter of truths": partial(assert_sound, aten.scatter.value, SQUARE > 0, 1, UNIQUE, True, shards="d0 indexed"),
    "scatter adding": partial(
        assert_sound, aten.scatter.reduce, X, 1, index(12, 4, 8, 6), ROWS, reduce="add", shards=ADDED_ELEMENTS
    ),
    "scatter multiplying": partial(
        assert_sound, aten.scatter.value_reduce, X, 1, index(12, 4, 8, 6), 2.0, reduce="multiply", shards=ELEMENTS
    ),
    "index_put": partial(
        assert_sound, aten.index_put.default, normal(12, 4), [places(12, 4) - 12], normal(4, 4), shards="d0 d1"
    ),
    "index_put in the middle": partial(
        assert_sound, aten.index_put.default, X, [None, places(12, 4)], normal(4, 4, 6), shards=ALL
    ),
    "index_put by two": partial(
        assert_sound, aten.index_put.default, X, [places(4, 4), places(12, 4)], normal(6), shards=ALL
    ),
    "index_put adding": partial(
        assert_sound, aten.index_put.default, normal(12, 4), [index(12, 8)], normal(8, 4), True, shards="d0 d1 index0"
    ),
    "index_put adding a row": partial(
        assert_sound, aten.index_put.default, normal(12, 4), [index(12, 8)], normal(4), True, shards="d0 d1 index0"
    ),
    "index_put adding a number": partial(
        assert_sound, aten.index_put.default, X, [None, index(12, 8)], normal(), True, shards="d0 d1 d2 index0"
    ),
    "index_put adding by two": partial(
        assert_sound,
        aten.index_put.default,
        X,
        [index(4, 12, 1), index(12, 6)],
        normal(12, 6, 6),
        True,
        shards="d0 d1 d2 index0 index1",
    ),
    "index_put adding by two apart": partial(
        assert_sound,
        aten.index_put.default,
        X,
        [index(4, 12), None, index(6, 12)],
        normal(12, 12),
        True,
        shards="d0 d1 d2 index0",
    ),
    "_unsafe_index_put of truths": partial(
        assert_sound, aten._unsafe_index_put.default, X > 0, [None, places(12, 4)], normal(4, 4, 6) > 0, shards=ALL
    ),
    "put": partial(assert_sound, aten.put.default, X, places(288, 12).reshape(4, 3) - 5, normal(4, 3), shards="d0"),
    "put adding": partial(
        assert_sound, aten.put.default, X, index(288, 4, 6), normal(4, 6), True, shards="d0 index0 index1"
    ),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(reduce: str, include_self: bool) -> None:
    shards = ADDED_ELEMENTS if include_self and reduce in ("sum", "amax", "amin") else ELEMENTS
    args = (X, 1, index(12, 4, 8, 6), ROWS, reduce)
    assert_sound(aten.scatter_reduce.two, *args, include_self=include_self, shards=shards)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce(reduce: str, include_self: bool) -> None:
    assert_sound(aten.index_reduce.default, X, 1, index(12, 8), ROWS, reduce, include_self=include_self, shards=ALL)


@pytest.mark.parametrize(("reduce", "kind"), [("sum", "sum"), ("amax", "max"), ("amin", "min")])
def test_what_shards_of_the_index_leave(reduce: str, kind: str) -> None:
    _, rule = bound(aten.scatter_reduce.two, X, 1, index(12, 4, 8, 6), ROWS, reduce)
    assert rule.factors[rule.indices("index")[0]].reduction(0) == kind


@pytest.mark.parametrize(
    ("op", "args", "linear"),
    [
        (aten.index_add.default, (X, 1, index(12, 8), ROWS), [{0, 2}]),
        (aten.scatter_add.default, (X, 1, index(12, 4, 8, 6), ROWS), [{0, 2}]),
        (aten.scatter.value, (SQUARE, 1, UNIQUE, 2.0), []),
        (aten.scatter.value, (SQUARE, 1, UNIQUE, 0), [{0}]),
        (aten.index_fill.int_Scalar, (X, 1, index(12, 4), 1), []),
        (aten.index_put.default, (normal(12, 4), [places(12, 4)], normal(4, 4)), [{0, 2}]),
    ],
)
def test_linear_sets(op: Any, args: tuple[Any, ...], linear: list[set[int]]) -> None:
    assert [set(operands) for operands in bound(op, *args)[1].linear] == linear


PUT = partial(assert_sound, aten.index_put.default)
SOME_ROWS, SOME_COLUMNS = torch.arange(X.shape[0]) % 3 > 0, torch.arange(X.shape[1]) % 3 > 0
PUT_BY_MASKS = {
    "a number": partial(PUT, X, [X > 0], torch.tensor(1.0), shards="d0 d1 d2"),
    "a number, added": partial(PUT, X, [X > 0], normal(1), True, shards="d0 d1 d2"),
    "one for all rows": partial(PUT, X, [SOME_ROWS], normal(1, *X.shape[1:]), shards="d0 d1 d2"),
    "a row": partial(PUT, X, [SOME_ROWS], normal(X.shape[2]), shards="d0 d1 d2"),
    "in the middle": partial(PUT, X, [None, SOME_COLUMNS], normal(X.shape[0], 1, X.shape[2]), True, shards="d0 d1 d2"),
    "first dims": partial(PUT, X, [X[:, :, 0] > 0], normal(X.shape[2]), shards="d0 d1 d2"),
    "nowhere": partial(PUT, X, [X > 99], torch.tensor(1.0), shards="d0 d1 d2"),
}


@pytest.mark.parametrize("name", PUT_BY_MASKS)
def test_the_same_values_put_by_a_mask(name: str) -> None:
    PUT_BY_MASKS[name]()


def test_other_values_put_by_masks_have_no_rule() -> None:
    """Which value a place gets depends on the places before it; two masks are paired."""
    count = int(SOME_COLUMNS.sum())
    assert count > 1
    for indices, values in (
        ([None, SOME_COLUMNS], normal(count, 1)),
        ([places(X.shape[0], count), SOME_COLUMNS], torch.tensor(1.0)),
    ):
        assert rule_for(call_of(aten.index_put.default, (X, indices, values), {}, X)) is None


MASK = X > 0.3
COUNT = int(MASK.sum())
EVERY_PLACE = "d0 d1 d2"

MASKED_CASES = {
    "masked_scatter": partial(assert_sound, aten.masked_scatter.default, X, MASK, normal(300), shards=EVERY_PLACE),
    "of just as many": partial(assert_sound, aten.masked_scatter.default, X, MASK, normal(COUNT), shards=EVERY_PLACE),
    "from a matrix": partial(assert_sound, aten.masked_scatter.default, X, MASK, normal(20, 15), shards=EVERY_PLACE),
    "by a mask that is broadcast": partial(
        assert_sound, aten.masked_scatter.default, X, MASK[:, :, :1], normal(300), shards=EVERY_PLACE
    ),
    "by nothing": partial(assert_sound, aten.masked_scatter.default, X, X > 99, normal(3), shards=EVERY_PLACE),
    "gradient": partial(assert_sound, aten.masked_scatter_backward.default, X, MASK, [300], shards=EVERY_PLACE),
    "gradient of just as many": partial(
        assert_sound, aten.masked_scatter_backward.default, X, MASK, [COUNT], shards=EVERY_PLACE
    ),
    "gradient by a mask that is broadcast": partial(
        assert_sound, aten.masked_scatter_backward.default, X, MASK[:, :, :1], [300], shards=EVERY_PLACE
    ),
    "gradient by a mask of fewer dims": partial(
        assert_sound, aten.masked_scatter_backward.default, X, MASK[0, 0], [300], shards=EVERY_PLACE
    ),
    "gradient of a matrix": partial(
        assert_sound, aten.masked_scatter_backward.default, X, MASK, [12, 24], shards=EVERY_PLACE
    ),
}


@pytest.mark.parametrize("sound", MASKED_CASES.values(), ids=MASKED_CASES)
def test_filling_a_mask_is_sound(sound: partial[None]) -> None:
    sound()


def test_sizes_that_depend_on_the_mask_have_no_rule() -> None:
    assert rule_for(call_of(aten.masked_select.default, (X, MASK), {}, X[MASK])) is None
    assert rule_for(call_of(aten.nonzero.default, (MASK,), {}, torch.nonzero(MASK))) is None
