from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import BoundCall, capture
from autoshard.errors import InputError
from tests import models

MODULE = nn.Sequential(nn.Linear(4, 4), nn.Dropout())


def key(*args: Any, grad: bool = True, **kwargs: Any) -> Any:
    return BoundCall.of(MODULE, args, kwargs, grad).signature


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
    keys = {BoundCall.of(module, (), kwargs).signature}
    module.stages[0].eval()
    keys.add(BoundCall.of(module, (), kwargs).signature)
    module.classifier.bias.requires_grad_(False)
    keys.add(BoundCall.of(module, (), kwargs).signature)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.add(BoundCall.of(module, (), kwargs).signature)
    assert len(keys) == 4
    module.classifier.bias.requires_grad_(True)
    assert BoundCall.of(module.train(), (), kwargs).signature in keys


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


class Nested(nn.Module):
    """Takes tensors in containers, and by any keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, batch: Any = None, scale: float = 1.0, **extra: torch.Tensor) -> torch.Tensor:
        tensors = [x, *extra.values(), *(pair for pair in (batch or {}).get("pairs", ()))]
        return self.linear(scale * sum(tensors))


def test_tensors_have_the_names_of_arguments_and_paths_in_them() -> None:
    x, y, z = (torch.full((2, 3), float(number)) for number in range(3))
    call = BoundCall.of(Nested(), (x,), {"batch": {"pairs": [y, None]}, "scale": 2.0, "more": z})
    assert {name: tensor.max().item() for name, tensor in call.tensors.items()} == {
        "x": 0.0,
        "batch['pairs'][0]": 1.0,
        "more": 2.0,
    }
    assert call.shapes == dict.fromkeys(call.tensors, (2, 3))
    by_keyword = BoundCall.of(Nested(), (), {"x": x, "batch": {"pairs": [y, None]}, "scale": 2.0, "more": z})
    assert list(by_keyword.tensors) == list(call.tensors)
    assert by_keyword.signature != call.signature  # a graph takes its arguments in one way


def test_gradients_are_wanted_where_something_requires_one() -> None:
    frozen, x = Nested().requires_grad_(False), torch.ones(2, 3)
    assert not BoundCall.of(frozen, (x,), {}).grad
    assert BoundCall.of(frozen, (), {"x": x, "batch": {"pairs": [x.clone().requires_grad_()]}}).grad
    assert BoundCall.of(Nested(), (x,), {}).grad
    with torch.no_grad():
        assert not BoundCall.of(Nested(), (x,), {}).grad
        assert BoundCall.of(Nested(), (x,), {}, grad=True).grad


def test_a_signature_without_dynamic_sizes_serves_other_sizes() -> None:
    module, x = Nested(), torch.ones(2, 3)
    dynamic = {"x": (-2,), "more": (0,)}
    calls = [BoundCall.of(module, (torch.ones(rows, 3),), {"more": torch.ones(rows, 3)}) for rows in (2, 5)]
    assert calls[0].signature != calls[1].signature
    assert calls[0].signature_of_dynamic(dynamic) == calls[1].signature_of_dynamic(dynamic)
    assert calls[0].signature_of_dynamic({"x": (0,)}) != calls[1].signature_of_dynamic({"x": (0,)})
    plain = BoundCall.of(module, (x,), {})
    assert plain.signature_of_dynamic({}) != plain.signature  # its program has dynamic sizes


def test_a_graph_takes_the_tensors_of_a_call_in_its_own_order() -> None:
    module, (x, y, z) = Nested(), torch.randn(3, 2, 3)
    graph = capture(module, (), {"x": x, "b": y, "a": z})
    for kwargs in ({"x": x, "b": y, "a": z}, {"a": z, "b": y, "x": x}):
        call = BoundCall.of(module, (), kwargs)
        assert call.signature == graph.signature
        assert all(map(torch.equal, call.tensors_of(graph.call), (x, y, z)))
    for other, told in (({"x": x}, "called with x"), ({"x": x, "b": y, "a": [z]}, "called with TreeSpec")):
        with pytest.raises(InputError, match=told):
            BoundCall.of(module, (), other).tensors_of(graph.call)


def test_calls_with_other_tensors_keep_their_structure() -> None:
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    call = BoundCall.of(Nested(), (x,), {"batch": {"pairs": [y, None]}, "scale": 2.0})
    meta = call.map_tensors(lambda tensor: tensor.to("meta"))
    assert meta.args[0].is_meta
    assert meta.kwargs["batch"]["pairs"][0].is_meta
    assert meta.kwargs["scale"] == 2.0
    assert meta.signature == call.signature
    other = call.with_tensors({"batch['pairs'][0]": x})
    assert other.args[0] is x is other.kwargs["batch"]["pairs"][0]
    assert call.kwargs["batch"]["pairs"][0] is y
