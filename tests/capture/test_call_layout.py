from __future__ import annotations

from typing import Any

import pytest

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import ResultLayout, result_names
from autoshard.capture.python.returned_objects import Constant


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (0, ["output"]),
        ((0, 1), ["output[0]", "output[1]"]),
        ({"loss": 0, "hidden": (1, 2)}, ["loss", "hidden[0]", "hidden[1]"]),
        ([{"a": 0}], ["output[0]['a']"]),
    ],
)
def test_result_names(value: Any, names: list[str]) -> None:
    assert result_names(pytree.tree_flatten(value)[1]) == names


def test_unflatten_puts_plain_values_back() -> None:
    _, structure = pytree.tree_flatten({"loss": 0, "count": 0, "rest": [0, 0]})
    layout = ResultLayout(structure, ("loss", Constant(3), "rest[0]", Constant(None)))
    assert layout.unflatten(["a", "b"]) == {"loss": "a", "count": 3, "rest": ["b", None]}
