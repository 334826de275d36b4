"""Sizes that stand for all: nothing is even, and nothing equal, that is not so everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from autoshard.capture import JointGraph, capture
from autoshard.errors import InputError
from autoshard.patterns.graph_rules import generic_sizes
from autoshard.size import symbol
from autoshard.specs.axes import MeshShape

BATCH, ROWS = symbol("batch"), symbol("rows")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def graph(dims: dict[int, Any], batch: int = 12, rows: int = 6) -> JointGraph:
    return capture(Layer(), (torch.zeros(batch, rows, 13),), {}, dynamic={"x": dims})


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 3, "tp": 2}, {"dp": 8}])
def test_no_axis_divides_them_and_nothing_equals_them(mesh: dict[str, int]) -> None:
    shape = MeshShape.of(mesh)
    found = generic_sizes(graph({0: "batch", 1: "rows"}), shape)
    assert all(math.gcd(size, shape.size) == 1 for size in found.values())
    assert len({*found.values(), 13, 17}) == 4
    assert all(size > shape.size for size in found.values())


def test_others_are_found_where_there_are_some() -> None:
    shape = MeshShape.of({"dp": 4})
    first = generic_sizes(graph({0: "batch"}), shape)
    assert generic_sizes(graph({0: "batch"}), shape, first)[BATCH] not in (first[BATCH], 13, 17)
    narrow = graph({0: Dim("batch", min=9, max=12)})
    (only,) = generic_sizes(narrow, shape).values()
    assert only in (9, 11)
    last = graph({0: Dim("batch", min=10, max=12)})
    assert generic_sizes(last, shape, {BATCH: 11}) == {BATCH: 11}


def test_a_range_without_any_is_refused() -> None:
    with pytest.raises(InputError, match=r'no size of "batch" from 12 to 14 can stand for all .* Leave "batch" out'):
        generic_sizes(graph({0: Dim("batch", min=12, max=14)}), MeshShape.of({"dp": 4}))
