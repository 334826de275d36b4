"""Extreme values with their places: sharded dims agree on both, as torch has it for equal values and for nan."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 12, 6)
EQUAL = torch.randint(0, 3, (4, 12, 6), generator=torch.Generator().manual_seed(0))
NANS = X.clone()
NANS[1, 3, 2] = NANS[1, 9, 2] = math.nan
NANS[2, 5] = math.inf
ALL = "d0 d1 d2"

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
