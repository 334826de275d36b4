"""Sparse, nested and quantized tensors are refused by name, wherever a module meets them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import BoundCall, capture
from autoshard.errors import AutoshardError


class Layer(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute, self.linear = compute, nn.Linear(4, 4)

    def forward(self, x: Tensor, *further: Tensor) -> Tensor:
        return self.compute(self, self.linear(x), *further)


def _holding(name: str, value: Tensor) -> Layer:
    module = Layer(lambda layer, y: getattr(layer, name) @ y)
    if name == "buffer":
        module.register_buffer(name, value)
    else:
        setattr(module, name, nn.Parameter(value) if name == "parameter" else value)
    return module


def _take_inputs(layer: Layer, y: Tensor, further: Tensor) -> Tensor:
    return y + 1


X = torch.ones(3, 4)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls sparse rows and quantized tensors a beta
    COO, CSR = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    RAGGED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    QUANTIZED = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)

CASES: dict[str, tuple[Callable[[], Layer], tuple[Tensor, ...], str]] = {
    "an input": (lambda: Layer(_take_inputs), (X, COO), r"an argument .* is sparse \(torch.sparse_coo\).*to_dense"),
    "rows": (lambda: Layer(_take_inputs), (X, CSR), r"an argument .* is sparse \(torch.sparse_csr\)"),
    "a nested input": (lambda: Layer(_take_inputs), (X, RAGGED), r"an argument .* is nested .*pad it"),
    "a quantized input": (lambda: Layer(_take_inputs), (X, QUANTIZED), r"an argument .* is quantized.*dequantize"),
    "a buffer": (lambda: _holding("buffer", COO), (X,), "buffer buffer is sparse"),
    "a parameter": (lambda: _holding("parameter", COO.clone()), (X,), "parameter parameter is sparse"),
    "a constant": (lambda: _holding("constant", COO), (X,), r"test_dense.py:\d+ .* reads a tensor that is sparse"),
    "constant rows": (lambda: _holding("constant", CSR), (X,), "the attribute constant is sparse"),
    "made": (lambda: Layer(lambda _, y: y.to_sparse()), (X,), r"test_dense.py:\d+ .* makes a tensor that is sparse"),
    "made anew": (
        lambda: Layer(lambda _, y: torch.sparse_coo_tensor([[0], [1]], [1.0], (3, 3)) @ y),
        (X,),
        r"test_dense.py:\d+ .* makes a tensor that is sparse",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_is_not_dense_is_refused_by_name(case: str) -> None:
    make, args, told = CASES[case]
    with pytest.raises(AutoshardError, match=told):
        capture(make(), args, {})


def test_a_later_call_is_refused_too() -> None:
    call = BoundCall.of(nn.Linear(3, 3), (COO,), {})
    with pytest.raises(AutoshardError, match="is sparse"):
        _ = call.signature
