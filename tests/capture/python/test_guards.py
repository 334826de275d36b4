"""Guards: which values of a state count as the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.capture.python.guards import ValueGuard

OWNER = object()
MANY = dict.fromkeys(map(str, range(257)), 0)


@pytest.mark.parametrize(
    ("value", "now", "same"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ([1, {"a": 2}], [1, {"a": 2}], True),
        ([1, {"a": 2}], [1, {"a": 3}], False),
        ([1, 2], (1, 2), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),  # code may iterate over it
        ({1, 2}, {2, 1}, True),
        (torch.float32, torch.float64, False),
        (OWNER, OWNER, True),
        (OWNER, object(), False),
        (MANY, {**MANY, "0": 1}, True),  # too large to compare
        (MANY, {**MANY, "more": 1}, False),
    ],
)
def test_values_that_are_interchangeable(value: Any, now: Any, same: bool) -> None:
    table = {"x": value}
    guard = ValueGuard("self.x", table, "x")
    assert guard.holds()
    table["x"] = now
    assert guard.holds() is same
    del table["x"]
    assert not guard.holds()
