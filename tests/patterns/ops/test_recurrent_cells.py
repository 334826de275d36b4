"""Fused cells: the references are what torch's cells compute, and every strategy gives what the references give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autoshard.capture.recurrent_cell_operators import operators
from tests.kernels import cells
from tests.patterns.ops.soundness import assert_sound, aten, normal

SAMPLES, UNITS = 4, 6


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with cells.cells_on_cpu():
        yield


def _gates(gates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(SAMPLES, gates * UNITS), normal(SAMPLES, gates * UNITS).flip(0), normal(SAMPLES, UNITS)


def _products(cell: nn.RNNCellBase, x: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
    return [x @ cell.weight_ih.t(), h @ cell.weight_hh.t()]


@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_of_lstm_is_torchs_cell(bias: bool) -> None:
    cell = nn.LSTMCell(5, UNITS, bias).double()
    x, h, c = normal(SAMPLES, 5), normal(SAMPLES, UNITS), normal(SAMPLES, UNITS) + 1
    products = [one.detach().requires_grad_() for one in _products(cell, x, h)]
    c.requires_grad_()
    biases = [cell.bias_ih, cell.bias_hh] if bias else []
    hy, cy, kept = cells.lstm(*products, c, *biases)
    for ours, theirs in zip((hy, cy), cell(x, (h, c)), strict=True):
        torch.testing.assert_close(ours, theirs)
    grads = normal(SAMPLES, UNITS), normal(SAMPLES, UNITS) * 2
    expected = torch.autograd.grad([hy, cy], [products[0], c, *biases[:1]], grads)
    made = cells.lstm_backward(*grads, c.detach(), cy.detach(), kept.detach(), bias)
    for ours, wanted in zip(made, expected, strict=False):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_of_gru_is_torchs_cell(bias: bool) -> None:
    cell, x, h = nn.GRUCell(5, UNITS, bias).double(), normal(SAMPLES, 5), normal(SAMPLES, UNITS)
    products = [one.detach().requires_grad_() for one in _products(cell, x, h)]
    h.requires_grad_()
    biases = [cell.bias_ih, cell.bias_hh] if bias else []
    hy, kept = cells.gru(*products, h, *biases)
    torch.testing.assert_close(hy, cell(x, h))
    gradient = normal(SAMPLES, UNITS)
    expected = torch.autograd.grad(hy, [*products, h, *biases], gradient)
    made = cells.gru_backward(gradient, kept.detach(), bias)
    for ours, wanted in zip(made, expected, strict=False):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("bias", [False, True])
def test_lstm_cells(bias: bool) -> None:
    biases = [normal(4 * UNITS), normal(4 * UNITS).flip(0)] if bias else []
    assert_sound(aten._thnn_fused_lstm_cell.default, *_gates(4), *biases, shards="b h")


@pytest.mark.parametrize("name", ["_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_lstm_cell_backward"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("missing", [None, 0, 1])
def test_gradients_of_lstm_cells(name: str, bias: bool, missing: int | None) -> None:
    grads = [None if place == missing else normal(SAMPLES, UNITS) + place for place in range(2)]
    _, cy, kept = cells.lstm(*_gates(4))
    with torch.no_grad():  # which the second name asks for
        assert_sound(getattr(aten, name).default, *grads, normal(SAMPLES, UNITS), cy, kept, bias, shards="b h")


@pytest.mark.parametrize("bias", [False, True])
def test_gru_cells(bias: bool) -> None:
    biases = [normal(3 * UNITS), normal(3 * UNITS).flip(0)] if bias else []
    assert_sound(aten._thnn_fused_gru_cell.default, *_gates(3), *biases, shards="b h")


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_gru_cells(bias: bool) -> None:
    _, kept = cells.gru(*_gates(3))
    op = aten._thnn_fused_gru_cell_backward.default
    assert_sound(op, normal(SAMPLES, UNITS) + 1, kept, bias, shards="b h")


def test_steps_of_lstm() -> None:
    h, c = normal(SAMPLES, UNITS), normal(SAMPLES, UNITS) + 1
    gates = _gates(4)
    assert_sound(operators.lstm_cell.default, *gates, shards="b h")
    _, cy, workspace = operators.lstm_cell(*gates)
    for grads in ((h, c), (h, None), (None, c)):
        assert_sound(operators.lstm_cell_backward.default, *grads, gates[2], cy, workspace, shards="b h")


def test_steps_of_gru() -> None:
    gates = _gates(3)
    assert_sound(operators.gru_cell.default, *gates, shards="b h")
    _, workspace = operators.gru_cell(*gates)
    assert_sound(operators.gru_cell_backward.default, normal(SAMPLES, UNITS) + 1, workspace, shards="b h")
