from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import signature_of
from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import ResultLayout, result_names
from autoshard.capture.python.returned_objects import Constant
from autoshard.errors import InputError
from tests import models

MODULE = nn.Sequential(nn.Linear(4, 4), nn.Dropout())


def key(*args: Any, grad: bool = True, **kwargs: Any) -> Any:
    return signature_of(MODULE, args, kwargs, grad)


def test_equal_calls_have_equal_keys() -> None:
    x = torch.ones(2, 3)
    assert key(x, scale=2, flag=None) == key(torch.zeros(2, 3), flag=None, scale=2)
    assert key(x.to("meta")) == key(x)
    assert key(x, float("nan")) == key(x, float("nan"))
    assert hash(key([x, {"a": x}])) == hash(key([x, {"a": x + 1}]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (((torch.ones(2, 3),), {}), ((torch.ones(3, 2),), {})),
        (((torch.ones(2),), {}), ((torch.ones(2, dtype=torch.float64),), {})),
        (((torch.ones(2),), {}), ((torch.ones(2, requires_grad=True),), {})),
        (((1,), {}), ((1.0,), {})),
        (((0.0,), {}), ((-0.0,), {})),
        (((1,), {}), ((True,), {})),
        (((1,), {}), (((1,),), {})),
        ((([1],), {}), (((1,),), {})),
        (((), {"a": 1}), ((), {"b": 1})),
        (((1,), {}), ((), {"a": 1})),
        (((), {"a": {"x": 1}}), ((), {"a": {"y": 1}})),
        (((torch.float32,), {}), ((torch.float64,), {})),
        (((), {"grad": True}), ((), {"grad": False})),
    ],
)
def test_different_calls_have_different_keys(first: Any, second: Any) -> None:
    assert key(*first[0], **first[1]) != key(*second[0], **second[1])


def test_module_state_counts() -> None:
    module, kwargs = models.resnet18()
    keys = {signature_of(module, (), kwargs, True)}
    module.stages[0].eval()
    keys.add(signature_of(module, (), kwargs, True))
    module.classifier.bias.requires_grad_(False)
    keys.add(signature_of(module, (), kwargs, True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.add(signature_of(module, (), kwargs, True))
    assert len(keys) == 4
    module.classifier.bias.requires_grad_(True)
    assert signature_of(module.train(), (), kwargs, True) in keys


def test_the_default_dtype_counts() -> None:
    """Integers are divided in it, and tensors made in it: the graph of one is not that of the other."""
    narrow = key(torch.ones(2, dtype=torch.int64))
    torch.set_default_dtype(torch.float64)
    assert key(torch.ones(2, dtype=torch.int64)) != narrow


def test_unhashable_argument() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(InputError, match="an argument of type Unhashable is neither a tensor, nor a plain value"):
        key(Unhashable())


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
