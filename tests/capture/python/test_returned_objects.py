from __future__ import annotations

import dataclasses
import enum
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from autoshard.capture._torch import pytree
from autoshard.capture.joint import capture
from autoshard.capture.python.returned_objects import OpaqueOutputs
from tests import models
from tests.capture.interpret import run_joint


class Keyless(OrderedDict[str, Any]):
    """A mapping registered as diffusers registers its outputs: without keys."""


pytree.register_pytree_node(
    Keyless,
    lambda keyless: (list(keyless.values()), list(keyless)),
    lambda values, keys: Keyless(zip(keys, values, strict=True)),
)


@dataclasses.dataclass(frozen=True)
class Inner:
    tensor: torch.Tensor
    note: str = "none"


@dataclasses.dataclass
class Output:
    sample: torch.Tensor
    inner: list[Inner]
    absent: torch.Tensor | None = None
    later: int = dataclasses.field(init=False, default=3)


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        if self.kind == "keyless":
            return Keyless(sample=y, inner=(y.sum(), 2))
        return Output(y, [Inner(y.sum(), "sum")])


@pytest.mark.parametrize("kind", ["keyless", "dataclass"])
def test_outputs_of_types_that_export_does_not_know(kind: str) -> None:
    module, x = Returning(kind), torch.randn(2, 4)
    graph = capture(module, (x,), {})
    output, expected = run_joint(graph, module, (x,)).output, module(x)
    assert type(output) is type(expected)
    if kind == "keyless":
        assert graph.result.names == ("sample", "inner[0]")
        assert torch.equal(output["sample"], expected["sample"])
        assert output["inner"][1] == 2
    else:
        assert graph.result.names == ("sample", "inner[0].tensor")
        assert torch.equal(output.sample, expected.sample)
        assert torch.equal(output.inner[0].tensor, expected.inner[0].tensor)
        assert (type(output.inner[0]), output.inner[0].note, output.absent, output.later) == (Inner, "sum", None, 3)


class Store:
    """An object of a type that torch.utils._pytree does not know."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"loss": y.sum(), "stores": (Store(y), 3, "text")}


def test_an_object_is_left_out_with_a_warning_that_names_it() -> None:
    module, x = Storing(), torch.randn(2, 4)
    with pytest.warns(UserWarning, match=r"Storing returns what no graph can hold: stores\[0\] \(Store\)"):
        graph = capture(module, (x,), {})
    output = run_joint(graph, module, (x,)).output
    assert torch.equal(output["loss"], module(x)["loss"])
    assert output["stores"] == (None, 3, "text")


class Kind(enum.Enum):
    FIRST = "first"


class Count(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    ONE = "one"


CONSTANTS: dict[str, Any] = {
    "complex": 2j,
    "bytes": b"text",
    "dtype": torch.float64,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "memory format": torch.channels_last,
    "member of an enumeration": Kind.FIRST,
    "member that is a number": Count.ONE,
    "member that is a text": Word.ONE,
    "type": Kind,
    "range": range(3),
    "slice": slice(1, None),
    "ellipsis": ...,
    "set": frozenset({1, "a"}),
    "number of NumPy": np.float32(0.5),
    "number of NumPy that is one of Python's": np.float64(0.5),
    "number of a dtype": np.int64(3),
}


class Describing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "constants": CONSTANTS, "size": y.shape, "rest": (y[:1].size(), y.dtype), "stride": y.stride()}


def test_what_cannot_change_is_returned_as_it_is() -> None:
    module, x = Describing(), torch.randn(2, 4)
    with warnings.catch_warnings(action="error"):
        graph = capture(module, (x,), {})
    output, expected = run_joint(graph, module, (x,)).output, module(x)
    for name in ("constants", "size", "rest", "stride"):
        assert output[name] == expected[name]
    assert type(output["size"]) is type(output["rest"][0]) is torch.Size
    assert {name: type(value) for name, value in output["constants"].items()} == {
        name: type(value) for name, value in CONSTANTS.items()
    }


@pytest.mark.parametrize("kind", [slice, lambda tensor: frozenset({tensor}), lambda tensor: tensor.sum])
def test_what_holds_a_tensor_is_left_out(kind: Callable[[Tensor], Any]) -> None:
    class Holding(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[Tensor, Any]:
            y = x * 2
            return y, kind(y)

    with pytest.warns(UserWarning, match=r"Holding returns what no graph can hold: output\[1\]"):
        graph = capture(Holding(), (torch.randn(2),), {})
    assert run_joint(graph, Holding(), (torch.randn(2),)).output[1] is None


def test_a_language_model_that_returns_its_cache() -> None:
    module, inputs = models.hf_qwen3()
    module.config.use_cache = True
    assert isinstance(module(**inputs).past_key_values, transformers.DynamicCache)
    with pytest.warns(UserWarning, match=r"past_key_values \(DynamicCache\).*use_cache=False"):
        graph = capture(module, (), inputs)
    assert graph.result.names == ("loss", "logits")
    output = run_joint(graph, module, (), inputs).output
    assert output.past_key_values is None
    torch.testing.assert_close(output.loss, module(**inputs).loss)


def test_what_graphs_can_hold_is_not_touched() -> None:
    hook = OpaqueOutputs()
    output = (torch.ones(2), {"a": [1, 2.0, None, "b", True]})
    assert hook.replace(output, {}) is output
    assert hook.replaced == {}
    hook.warn("nothing")


def test_an_output_without_any_tensor_is_left_to_torch() -> None:
    hook = OpaqueOutputs()
    output = Store(torch.ones(2))
    assert hook.replace(output, {}) is output
    assert hook.replaced == {}


@dataclasses.dataclass
class Rows:
    """Rows that a call may add to."""

    rows: Tensor


pytree.register_pytree_node(
    Rows,
    lambda held: ([held.rows], None),
    lambda rows, _: Rows(*rows),
    serialized_type_name="tests.capture.python.test_returned_objects.Rows",
    flatten_with_keys_fn=lambda held: ([(pytree.GetAttrKey("rows"), held.rows)], None),
)


class Adding(nn.Module):
    """Returns its argument, in a dict: with the tensor that it had, or with another one."""

    def forward(self, x: Tensor, held: Rows, replaces: bool) -> dict[str, Any]:
        if replaces:
            held.rows = held.rows + x
        else:
            held.rows.add_(x)
        return {"sum": held.rows.sum(), "held": held}


def test_an_argument_that_is_returned_is_that_of_the_call() -> None:
    module, x, held = Adding(), torch.ones(2), Rows(torch.zeros(2))
    graph = capture(module, (x, held, False), {}, grad=False)
    assert graph.result.names == ("sum",)
    call = (x, Rows(torch.ones(2)), False), dict[str, Any]()
    returned = graph.result.unflatten([x.sum()], call)
    assert returned["held"] is call[0][1]
    # The caller of one with another tensor finds that in the result.
    graph = capture(module, (x, held, True), {}, grad=False)
    assert graph.result.names == ("sum", "held.rows")
    assert graph.result.unflatten([x.sum(), x])["held"].rows is x
