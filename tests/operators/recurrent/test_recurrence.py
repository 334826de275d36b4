"""Recurrent layers are one operator for each layer and direction, whatever the length of the sequence."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.library import opcheck

from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.operators.recurrent.recurrence import steps
from tests.capture.interpret import run_joint

F64 = torch.float64
LAYERS = {
    "lstm": lambda: nn.LSTM(6, 8, dtype=F64),
    "lstm of two layers": lambda: nn.LSTM(6, 8, 2, batch_first=True, dtype=F64),
    "lstm both ways": lambda: nn.LSTM(6, 8, 2, bidirectional=True, dtype=F64),
    "lstm without biases": lambda: nn.LSTM(6, 8, bias=False, dtype=F64),
    "lstm that projects": lambda: nn.LSTM(6, 8, 2, bidirectional=True, proj_size=3, dtype=F64),
    "gru": lambda: nn.GRU(6, 8, 2, bidirectional=True, batch_first=True, dtype=F64),
    "gru without biases": lambda: nn.GRU(6, 8, bias=False, dtype=F64),
    "rnn": lambda: nn.RNN(6, 8, 2, bidirectional=True, dtype=F64),
    "rnn of relu": lambda: nn.RNN(6, 8, nonlinearity="relu", bias=False, dtype=F64),
}


class Weighted(nn.Module):
    """A recurrent layer and a loss that weighs every output and last state differently."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        given = () if not states else (states,) if len(states) == 2 else states
        output, last = self.layer(x, *given)
        last = last if isinstance(last, tuple) else (last,)
        weighted = [value * torch.linspace(-1, 2, value.numel(), dtype=F64).view_as(value) for value in (output, *last)]
        return sum(value.square().sum() for value in weighted)


def _states(layer: nn.Module, samples: int) -> tuple[torch.Tensor, ...]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.randn(count, samples, layer.proj_size or layer.hidden_size, dtype=F64)
    return (h, torch.randn(count, samples, layer.hidden_size, dtype=F64)) if isinstance(layer, nn.LSTM) else (h,)


class AllLayers(nn.Module):
    """Every layer beside the others, each with an input and states of its own: losses by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Weighted(make()) for name, make in LAYERS.items()})

    def forward(self, args: dict[str, tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
        return {name: layer(*args[name]) for name, layer in self.layers.items()}


@pytest.mark.parametrize("given", [False, True])
def test_the_graph_is_the_layer(given: bool) -> None:
    module, args = AllLayers(), {}
    for name, weighted in module.layers.items():
        samples = 4 if weighted.layer.batch_first else 5
        states = _states(weighted.layer, samples) if given else ()
        args[name] = tuple(value.requires_grad_() for value in (torch.randn(4, 5, 6, dtype=F64), *states))
    step = run_joint(capture(module, (args,), {}), module, (args,))
    losses = module(args)
    torch.autograd.backward([*losses.values()])
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    of_inputs = iter(value for key, value in step.gradients.items() if key not in expected)
    wrong = {}
    for name in LAYERS:
        ours = {key: value for key, value in step.gradients.items() if key.startswith(f"layers.{name}.")}
        found = [step.output[name], ours, [next(of_inputs) for _ in args[name]]]
        wanted = [losses[name], {key: expected[key] for key in ours}, [value.grad for value in args[name]]]
        try:
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong
    assert step.gradients.keys() >= expected.keys()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_parameters_that_a_layer_lists_are_no_outputs(kind: type[nn.RNNBase]) -> None:
    """A layer makes its list of parameters anew when these are others, as they are in a capture."""
    graph = capture(Weighted(kind(6, 8, dtype=F64)), (torch.randn(4, 5, 6, dtype=F64),), {})
    assert [output.name for output in graph.outputs if output.kind == "output"] == ["output"]
    assert not graph.state.mutations


def test_a_sequence_without_a_batch_dim_and_inference() -> None:
    module, x = nn.LSTM(6, 8), torch.randn(5, 6)
    output, (h, c) = run_joint(capture(module, (x,), {}, grad=False), module, (x,)).output
    expected, (last_h, last_c) = module(x)
    for ours, theirs in ((output, expected), (h, last_h), (c, last_c)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_dropout_between_layers_is_captured(kind: type[nn.RNNBase]) -> None:
    x = torch.randn(4, 5, 6)
    for training in (True, False):
        graph = capture(kind(6, 8, 3, dropout=0.5).train(training), (x,), {})
        drops = [node for node in graph.graph.nodes if "dropout" in str(node.target) and graph.phase(node) == "forward"]
        assert len(drops) == (2 if training else 0)


def test_the_graph_does_not_grow_with_the_sequence() -> None:
    sizes = {len(capture(nn.LSTM(6, 8), (torch.randn(length, 2, 6),), {}).graph.nodes) for length in (4, 4000)}
    assert len(sizes) == 1


class Packed(nn.Module):
    """A recurrent layer that is given sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths))[1]


def test_packed_sequences_are_refused_with_advice() -> None:
    with pytest.raises(CaptureError, match=r"pack_padded_sequence.*padded batch"):
        capture(Packed(), (torch.randn(4, 3, 6), torch.tensor([4, 3, 1])), {})


def test_the_operators_keep_torchs_contract() -> None:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=F64, requires_grad=True)

    opcheck(steps.lstm_steps.default, (made(3, 2, 16), made(2, 4), made(2, 4), made(16, 4), None))
    opcheck(steps.lstm_steps.default, (made(3, 2, 16), made(2, 3), made(2, 4), made(16, 3), made(3, 4)))
    opcheck(steps.gru_steps.default, (made(3, 2, 12), made(2, 4), made(12, 4), made(12)))
    opcheck(steps.rnn_steps.default, (made(3, 2, 4), made(2, 4), made(4, 4), True))
