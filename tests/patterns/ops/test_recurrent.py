from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.recurrence import steps
from tests.patterns.ops.soundness import assert_sound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

STEPS, SAMPLES = 3, 4
LAYERS = {
    "lstm": lambda: nn.LSTM(6, 8),
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
    ("name", "sizes"), [*((name, {"dp": 2, "tp": 2}) for name in LAYERS), *((name, {"dp": 2}) for name in CELLS)]
)
def test_training_on_a_mesh_is_training_on_one_device(name: str, sizes: dict[str, int]) -> None:
    make = (LAYERS | CELLS)[name]
    reference = train(*_reader(make))
    module, inputs = _reader(make)
    with simulated_mesh(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
    assert trace.collectives
