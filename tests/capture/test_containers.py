from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.joint import capture
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
