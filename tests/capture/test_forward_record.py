from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoshard.capture._torch import fake_mode
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.continuation import difference
from autoshard.capture.forward_record import ForwardRecord, record_forward
from autoshard.capture.python.fake_module import fake_copy
from autoshard.capture.repeated_layers import Repetition
from autoshard.errors import CaptureError

Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layers, x)


def both(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in layers.children():
        x = layer(x)
    return x


def record(run: Run) -> ForwardRecord:
    mode = fake_mode()
    twin = fake_copy(Model(run), mode)
    return record_forward(BoundCall.of(twin, (torch.zeros(3, 4),), {}), [Repetition("layers", 0, 1, 2, 2)], mode)


def test_operators_have_the_layer_that_calls_them() -> None:
    made = record(lambda layers, x: both(layers, x).sum())
    assert list(made.names.values()) == ["layers.0.weight", "layers.1.weight", "0"]
    calls = [node for node in made.graph.nodes if node.op == "call_function"]
    assert [node.meta["module_path"] for node in calls if "mm" in str(node.target)] == ["layers.0", "layers.1"]
    assert calls[-1].meta["module_path"] == ""
    assert made.graph.output_node().args[0] == (calls[-1],)


def without_gradients(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return both(layers, x)


@pytest.mark.parametrize(
    "other",
    [
        lambda layers, x: both(layers, x) * 2,
        lambda layers, x: both(layers, x).detach(),
        lambda layers, x: both(layers, both(layers, x)),
        lambda layers, x: both(layers, x + torch.tensor([2.0])),
        without_gradients,
    ],
)
def test_other_code_leaves_another_record(other: Run) -> None:
    plain, changed = record(lambda layers, x: both(layers, x + torch.tensor([1.0]))), record(other)
    assert difference(plain.graph, record(lambda layers, x: both(layers, x + torch.tensor([1.0]))).graph) is None
    assert difference(plain.graph, changed.graph) is not None


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def test_gradients_that_no_record_shows_are_refused() -> None:
    with pytest.raises(CaptureError, match="from layer to layer"):
        record(lambda layers, x: Identity.apply(both(layers, x)))  # type: ignore[no-untyped-call, no-any-return]
