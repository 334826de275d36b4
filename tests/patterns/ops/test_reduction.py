"""Rules of reductions against the operators themselves."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

# Extreme values with their places: sharded dims agree on both, as torch has it for equal values and for nan.

# Norms of vectors over sharded dims.

X = normal(4, 12, 6)
MASK = X > 1
INFINITE = torch.full((4, 12), -torch.inf, dtype=torch.float64)
ALL = "d0 d1 d2"

CASES = {
    "sum": partial(assert_sound, aten.sum.dim_IntList, X, [1, -1], shards=ALL),
    "sum keeping dims": partial(assert_sound, aten.sum.dim_IntList, X, [1], True, shards=ALL),
    "sum of everything": partial(assert_sound, aten.sum.default, X, shards=ALL),
    "sum over no dims": partial(assert_sound, aten.sum.dim_IntList, X, [], shards=ALL),
    "sum of a number": partial(assert_sound, aten.sum.dim_IntList, normal(), [0], shards=""),
    "sum of integers": partial(assert_sound, aten.sum.default, torch.arange(12).reshape(6, 2), shards="d0 d1"),
    "nansum": partial(assert_sound, aten.nansum.default, X.where(X > -2, torch.nan), [1], shards=ALL),
    "mean": partial(assert_sound, aten.mean.dim, X, [0, 2], shards=ALL),
    "mean keeping dims": partial(assert_sound, aten.mean.dim, X, [-1], True, shards=ALL),
    "mean of everything": partial(assert_sound, aten.mean.default, X, shards=ALL),
    "amax": partial(assert_sound, aten.amax.default, X, [1], True, shards=ALL),
    "amin": partial(assert_sound, aten.amin.default, X, [0], shards=ALL),
    "max of everything": partial(assert_sound, aten.max.default, X, shards=ALL),
    "min of everything": partial(assert_sound, aten.min.default, X, shards=ALL),
    "aminmax": partial(assert_sound, aten.aminmax.default, X, dim=1, shards=ALL),
    "aminmax of everything": partial(assert_sound, aten.aminmax.default, X, keepdim=True, shards=ALL),
    "prod": partial(assert_sound, aten.prod.dim_int, X, 1, shards=ALL),
    "prod of everything": partial(assert_sound, aten.prod.default, X, shards=ALL),
    "count_nonzero": partial(assert_sound, aten.count_nonzero.dim_IntList, X, [1], shards=ALL),
    "any along a dim": partial(assert_sound, aten.any.dim, MASK, 1, True, shards=ALL),
    "any along dims": partial(assert_sound, aten.any.dims, MASK, [0, 2], shards=ALL),
    "any along no dims": partial(assert_sound, aten.any.dims, MASK, [], shards=ALL),
    "any of bytes": partial(assert_sound, aten.any.default, MASK.to(torch.uint8), shards=ALL),
    "any of numbers": partial(assert_sound, aten.any.dims, X, None, shards=ALL),
    "all along a dim": partial(assert_sound, aten.all.dim, X > -2, 1, shards=ALL),
    "all": partial(assert_sound, aten.all.default, X > -9, shards=ALL),
    "all of bytes": partial(assert_sound, aten.all.default, MASK.to(torch.uint8), shards=ALL),
    "_is_all_true": partial(assert_sound, aten._is_all_true.default, X > -9, shards=ALL),
    "_is_any_true": partial(assert_sound, aten._is_any_true.default, MASK, shards=ALL),
    "median": partial(assert_sound, aten.median.dim, X, 1, shards="d0 d2"),
    "nanmedian": partial(assert_sound, aten.nanmedian.dim, X, 1, shards="d0 d2"),
    "median of everything": partial(assert_sound, aten.median.default, X, shards=""),
    "mode": partial(assert_sound, aten.mode.default, X.round(), 1, shards="d0 d2"),
    "kthvalue": partial(assert_sound, aten.kthvalue.default, X, 3, 1, shards="d0 d2"),
    "logsumexp": partial(assert_sound, aten.logsumexp.default, X, [1, 2], shards=ALL),
    "logsumexp keeping dims": partial(assert_sound, aten.logsumexp.default, X, [0], True, shards=ALL),
    "logsumexp of infinities": partial(assert_sound, aten.logsumexp.default, INFINITE, [1], shards="d0 d1"),
    "logsumexp of integers": partial(assert_sound, aten.logsumexp.default, torch.arange(12), [0], shards="d0"),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


@pytest.mark.parametrize(
    ("op", "args", "placements"),
    [
        (aten.sum.default, (X,), ["P(sum)"]),
        (aten.mean.default, (X,), ["P(sum)"]),
        (aten.amax.default, (X, [0, 1]), ["P(max)"]),
        (aten.prod.default, (X,), ["P(product)"]),
        (aten.aminmax.default, (X,), ["P(min)", "P(max)"]),
        (aten.any.default, (MASK,), ["R"]),
        (aten.logsumexp.default, (X, [0, 1]), ["R"]),
    ],
)
def test_what_shards_of_a_reduced_dim_leave(op: Any, args: tuple[Any, ...], placements: list[str]) -> None:
    _, rule = bound(op, *args)
    mesh = MeshShape.of({"x": 2})
    specs = [result_spec(rule, rule.indices("d1"), mesh, result) for result in range(len(placements))]
    assert [str(spec) for spec in specs] == placements


def test_logsumexp_says_what_it_exchanges() -> None:
    _, rule = bound(aten.logsumexp.default, X, [1])
    assert rule.factors[1].exchanges == (("all_reduce", 2 * 4 * 6 * 8),)


EQUAL = torch.randint(0, 3, (4, 12, 6), generator=torch.Generator().manual_seed(0))
NANS = X.clone()
NANS[1, 3, 2] = NANS[1, 9, 2] = math.nan
NANS[2, 5] = math.inf

VALUES = {"numbers": X, "equal numbers": EQUAL.double(), "nan": NANS, "integers": EQUAL, "truths": EQUAL > 1}


@pytest.mark.parametrize("x", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("op", [aten.max.dim, aten.min.dim])
@pytest.mark.parametrize(("dim", "keepdim"), [(0, False), (1, True), (-1, False)])
def test_value_and_place_along_a_dim(op: Any, x: torch.Tensor, dim: int, keepdim: bool) -> None:
    assert_sound(op, x, dim, keepdim, shards=ALL)


@pytest.mark.parametrize("x", [X, EQUAL.double(), NANS, EQUAL])
@pytest.mark.parametrize("op", [aten.argmax.default, aten.argmin.default])
@pytest.mark.parametrize(("dim", "keepdim"), [(1, False), (-1, True), (None, False), (None, True)])
def test_place_alone(op: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> None:
    assert_sound(op, x, dim, keepdim, shards=ALL)


def test_a_number_is_its_own_extreme() -> None:
    assert_sound(aten.max.dim, normal(), 0, shards="")


def test_only_stretches_are_taken_of_the_dim_that_is_searched() -> None:
    _, rule = bound(aten.argmax.default, X, 1)
    assert [factor.contiguous for factor in rule.factors] == [False, True, False]


BACKWARDS = {
    "without the dim": partial(
        assert_sound,
        aten.value_selecting_reduction_backward.default,
        normal(4, 6),
        1,
        EQUAL[:, 0] * 5,
        [4, 12, 6],
        False,
        shards=ALL,
    ),
    "with the dim": partial(
        assert_sound,
        aten.value_selecting_reduction_backward.default,
        normal(4, 1, 6),
        -2,
        EQUAL[:, :1] * 5,
        [4, 12, 6],
        True,
        shards=ALL,
    ),
}


@pytest.mark.parametrize("sound", BACKWARDS.values(), ids=BACKWARDS)
def test_gradient_goes_to_the_place(sound: partial[None]) -> None:
    sound()


ORDERS = [0, 1, 2, 3.5, -1, math.inf, -math.inf]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_sound_over_sharded_dims(order: float) -> None:
    assert_sound(aten.linalg_vector_norm.default, X, order, [1], True, shards=ALL)
    assert_sound(aten.linalg_vector_norm.default, X, order, shards=ALL)
    assert_sound(aten.norm.ScalarOpt_dim, X, order, [0, 2], shards=ALL)
    assert_sound(aten.norm.Scalar, X, order, shards=ALL)
    assert_sound(aten.dist.default, X, normal(6), order, shards="dim0 dim1 dim2")


def test_dtypes() -> None:
    assert_sound(aten.linalg_vector_norm.default, X.bfloat16(), 2, [1], shards=ALL)
    assert_sound(aten.linalg_vector_norm.default, X.float(), 2, [1], dtype=torch.float64, shards=ALL)
    assert_sound(aten.linalg_vector_norm.default, torch.view_as_complex(normal(4, 6, 2)), 2, [1], shards="d0 d1")
    assert_sound(aten.norm.ScalarOpt_dtype, X.bfloat16(), 2, dtype=torch.float32, shards=ALL)


@pytest.mark.parametrize(
    ("order", "kind"), [(0, "sum"), (1, "sum"), (math.inf, "max"), (-math.inf, "min"), (2, None), (3, None)]
)
def test_what_shards_of_a_norm_are(order: float, kind: str | None) -> None:
    _, rule = bound(aten.linalg_vector_norm.default, X, order, [1])
    assert rule.factors[1].reduction(0) == kind
