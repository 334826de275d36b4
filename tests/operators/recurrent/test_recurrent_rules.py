"""Rules of recurrent layers and cells, against torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autoshard
from autoshard.operators.recurrent.recurrence import steps
from autoshard.operators.recurrent.time_loops import operators
from tests.kernels import cells
from tests.patterns.ops.soundness import assert_sound, aten, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

STEPS, SAMPLES = 3, 4
LAYERS = {
    "lstm, two layers both ways": lambda: nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True),
    "lstm that projects": lambda: nn.LSTM(6, 8, proj_size=4, batch_first=True),
    "gru": lambda: nn.GRU(6, 8, 2, batch_first=True),
    "rnn": lambda: nn.RNN(6, 8, bidirectional=True),
}
CELLS = {
    "lstm cell": lambda: nn.LSTMCell(6, 8),
    "gru cell": lambda: nn.GRUCell(6, 8),
    "rnn cell": lambda: nn.RNNCell(6, 8),
}


@pytest.mark.parametrize("hidden", [12, 6])  # four ranks have two of six units each, and the last one none
def test_lstm_steps(hidden: int) -> None:
    c, weight = normal(SAMPLES, hidden), normal(4 * hidden, hidden)
    args = normal(STEPS, SAMPLES, 4 * hidden), normal(SAMPLES, hidden) - 1, c, weight, None
    assert_sound(steps.lstm_steps.default, *args, shards="b h")
    output, cells, active = steps.lstm_steps(*args)
    for gradients in ((normal(*output.shape), normal(*cells.shape)), (None, normal(*cells.shape))):
        assert_sound(steps.lstm_steps_backward.default, *gradients, c, weight, None, cells, active, shards="b h")


def test_lstm_steps_with_a_projection() -> None:
    """Only samples are independent."""
    c, weight, projection = normal(SAMPLES, 4), normal(16, 3), normal(3, 4)
    args = normal(STEPS, SAMPLES, 16), normal(SAMPLES, 3), c, weight, projection
    assert_sound(steps.lstm_steps.default, *args, shards="b")
    output, cells, active = steps.lstm_steps(*args)
    gradients = normal(*output.shape), normal(*cells.shape)
    assert_sound(steps.lstm_steps_backward.default, *gradients, c, weight, projection, cells, active, shards="b")


@pytest.mark.parametrize("hidden", [12, 6])
def test_gru_steps(hidden: int) -> None:
    h, weight = normal(SAMPLES, hidden), normal(3 * hidden, hidden)
    args = normal(STEPS, SAMPLES, 3 * hidden), h, weight, normal(3 * hidden)
    assert_sound(steps.gru_steps.default, *args, shards="b h")
    results = steps.gru_steps(*args)
    assert_sound(steps.gru_steps_backward.default, normal(*results[0].shape), h, weight, *results, shards="b h")


@pytest.mark.parametrize("hidden", [12, 6])
@pytest.mark.parametrize("relu", [False, True])
def test_rnn_steps(hidden: int, relu: bool) -> None:
    args = normal(STEPS, SAMPLES, hidden), normal(SAMPLES, hidden), normal(hidden, hidden), relu
    assert_sound(steps.rnn_steps.default, *args, shards="b h")
    output = steps.rnn_steps(*args)
    assert_sound(steps.rnn_steps_backward.default, normal(*output.shape), args[2], output, relu, shards="b h")


class _Reader(nn.Module):
    """A recurrent layer, or a cell run step by step, between two linear layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.first, self.last = nn.Linear(6, 6), nn.LazyLinear(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if isinstance(self.layer, nn.RNNCellBase):
            state = None
            for step in x:
                state = self.layer(step, state)
            output = state[0] if isinstance(state, tuple) else state
        else:
            output, _ = self.layer(x)
        return self.last(output).square().mean()


def _reader(make: object) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    module, inputs = _Reader(make()), {"x": torch.randn(6, 4, 6)}
    module(**inputs)
    return module, inputs


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("lstm, two layers both ways", {"dp": 2, "tp": 2}),
        ("lstm that projects", {"dp": 2}),
        ("gru", {"dp": 2, "tp": 2}),
        ("rnn", {"dp": 2}),
        *((name, {"dp": 2}) for name in CELLS),
    ],
)
def test_training_on_a_mesh_is_training_on_one_device(name: str, sizes: dict[str, int]) -> None:
    make = (LAYERS | CELLS)[name]
    reference = train(*_reader(make))
    module, inputs = _reader(make)
    with simulated_mesh(**sizes) as mesh:
        search = autoshard.Search(effort="fast")
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=search)
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
    assert trace.collectives


# Fused cells: the references are what torch's cells compute, and every strategy gives what the references give.

CELL_SAMPLES, UNITS = 4, 6


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with cells.cells_on_cpu():
        yield


def _gates(gates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(CELL_SAMPLES, gates * UNITS), normal(CELL_SAMPLES, gates * UNITS).flip(0), normal(CELL_SAMPLES, UNITS)


def _products(cell: nn.RNNCellBase, x: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
    return [x @ cell.weight_ih.t(), h @ cell.weight_hh.t()]


@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_of_lstm_is_torchs_cell(bias: bool) -> None:
    cell = nn.LSTMCell(5, UNITS, bias).double()
    x, h, c = normal(CELL_SAMPLES, 5), normal(CELL_SAMPLES, UNITS), normal(CELL_SAMPLES, UNITS) + 1
    products = [one.detach().requires_grad_() for one in _products(cell, x, h)]
    c.requires_grad_()
    biases = [cell.bias_ih, cell.bias_hh] if bias else []
    hy, cy, kept = cells.lstm(*products, c, *biases)
    for ours, theirs in zip((hy, cy), cell(x, (h, c)), strict=True):
        torch.testing.assert_close(ours, theirs)
    grads = normal(CELL_SAMPLES, UNITS), normal(CELL_SAMPLES, UNITS) * 2
    expected = torch.autograd.grad([hy, cy], [products[0], c, *biases[:1]], grads)
    made = cells.lstm_backward(*grads, c.detach(), cy.detach(), kept.detach(), bias)
    for ours, wanted in zip(made, expected, strict=False):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_of_gru_is_torchs_cell(bias: bool) -> None:
    cell, x, h = nn.GRUCell(5, UNITS, bias).double(), normal(CELL_SAMPLES, 5), normal(CELL_SAMPLES, UNITS)
    products = [one.detach().requires_grad_() for one in _products(cell, x, h)]
    h.requires_grad_()
    biases = [cell.bias_ih, cell.bias_hh] if bias else []
    hy, kept = cells.gru(*products, h, *biases)
    torch.testing.assert_close(hy, cell(x, h))
    gradient = normal(CELL_SAMPLES, UNITS)
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
    grads = [None if place == missing else normal(CELL_SAMPLES, UNITS) + place for place in range(2)]
    _, cy, kept = cells.lstm(*_gates(4))
    with torch.no_grad():  # which the second name asks for
        assert_sound(getattr(aten, name).default, *grads, normal(CELL_SAMPLES, UNITS), cy, kept, bias, shards="b h")


@pytest.mark.parametrize("bias", [False, True])
def test_gru_cells(bias: bool) -> None:
    biases = [normal(3 * UNITS), normal(3 * UNITS).flip(0)] if bias else []
    assert_sound(aten._thnn_fused_gru_cell.default, *_gates(3), *biases, shards="b h")


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_gru_cells(bias: bool) -> None:
    _, kept = cells.gru(*_gates(3))
    op = aten._thnn_fused_gru_cell_backward.default
    assert_sound(op, normal(CELL_SAMPLES, UNITS) + 1, kept, bias, shards="b h")


def test_steps_of_lstm() -> None:
    h, c = normal(CELL_SAMPLES, UNITS), normal(CELL_SAMPLES, UNITS) + 1
    gates = _gates(4)
    assert_sound(operators.lstm_cell.default, *gates, shards="b h")
    _, cy, workspace = operators.lstm_cell(*gates)
    for grads in ((h, c), (h, None), (None, c)):
        assert_sound(operators.lstm_cell_backward.default, *grads, gates[2], cy, workspace, shards="b h")


def test_steps_of_gru() -> None:
    gates = _gates(3)
    assert_sound(operators.gru_cell.default, *gates, shards="b h")
    _, workspace = operators.gru_cell(*gates)
    assert_sound(operators.gru_cell_backward.default, normal(CELL_SAMPLES, UNITS) + 1, workspace, shards="b h")
