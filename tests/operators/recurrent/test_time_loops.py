from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.library import opcheck

from autoshard.capture import capture
from autoshard.operators.recurrent import time_loops
from autoshard.operators.recurrent.recurrence import steps
from autoshard.operators.recurrent.time_loops import operators
from tests.capture.interpret import run_joint
from tests.kernels.cells import cells_on_cpu

F64 = torch.float64
SAMPLES, INPUTS, UNITS = 4, 5, 6
KINDS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}


@pytest.fixture(params=[False, True], ids=["formulas", "kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Without and with the kernels of GPUs, for which references stand."""
    if not request.param:
        yield False
        return
    monkeypatch.setattr(time_loops, "_has_kernel", lambda tensor: True)
    with cells_on_cpu():
        yield True


class Cells(nn.Module):
    """A cell run over the rows of the input, and a loss that weighs what it gives."""

    def __init__(self, kind: str, bias: bool, last_alone: bool = False) -> None:
        super().__init__()
        self.cell = KINDS[kind](INPUTS, UNITS, bias, dtype=F64)
        self.last_alone = last_alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, seen = None, []
        for row in x:
            state = self.cell(row, state)
            seen += state if isinstance(state, tuple) else (state,)
        seen = seen[-1:] if self.last_alone else seen
        return sum((value * torch.linspace(-1, 2, value.numel(), dtype=F64).view_as(value)).sum() for value in seen)


def _targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("last_alone", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_has_one_operator_for_a_step(kind: str, bias: bool, last_alone: bool, kernels: bool) -> None:
    module, x = Cells(kind, bias, last_alone), torch.randn(3, SAMPLES, INPUTS, dtype=F64, requires_grad=True)
    graph = capture(module, (x,), {})
    targets = _targets(graph.graph_module.graph)
    assert targets.count(f"autoshard.{kind}_cell.default") == 3
    assert targets.count(f"autoshard.{kind}_cell_backward.default") == 3
    assert not any("sigmoid" in target or "tanh" in target for target in targets)
    run = run_joint(graph, module, (x,))
    loss = module(x)
    loss.backward()
    assert run.output.item() == pytest.approx(loss.item(), rel=1e-12)
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, gradient in expected.items():
        torch.testing.assert_close(run.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    (of_input,) = (value for name, value in run.gradients.items() if name not in expected)
    torch.testing.assert_close(of_input, x.grad, rtol=1e-10, atol=1e-12)


def _made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, requires_grad=True)


def test_the_operators_keep_torchs_contract() -> None:
    opcheck(operators.lstm_cell.default, (_made(3, 16), _made(3, 16), _made(3, 4)))
    opcheck(operators.lstm_cell.default, (_made(3, 16), _made(3, 16), _made(4, 3).t()))
    opcheck(operators.gru_cell.default, (_made(3, 12), _made(3, 12), _made(3, 4)))
    opcheck(operators.gru_cell.default, (_made(3, 12), _made(3, 12), _made(4, 3).t()))
    states = [torch.randn(3, 4, dtype=F64) for _ in range(4)]
    checks = ("test_schema", "test_faketensor")
    for grads in (states[:2], [None, states[0].t().contiguous().t()], [states[0], None]):
        arguments = (*grads, *states[2:], torch.rand(3, 16, dtype=F64))
        opcheck(operators.lstm_cell_backward.default, arguments, test_utils=checks)
    opcheck(operators.gru_cell_backward.default, (states[0], torch.rand(3, 20, dtype=F64)), test_utils=checks)


def _loops() -> list[torch.Tensor]:
    """Results and gradients of loops over time, one of them with a projection."""
    torch.manual_seed(0)
    h, c, gates = _made(SAMPLES, UNITS), _made(SAMPLES, UNITS), _made(3, SAMPLES, 4 * UNITS)
    calls = [
        (steps.lstm_steps, (gates, h, c, _made(4 * UNITS, UNITS), None)),
        (steps.lstm_steps, (gates, _made(SAMPLES, 3), c, _made(4 * UNITS, 3), _made(3, UNITS))),
        (steps.gru_steps, (_made(3, SAMPLES, 3 * UNITS), h, _made(3 * UNITS, UNITS), None)),
    ]
    found = []
    for operator, operands in calls:
        results = operator(*operands)
        loss = sum(result.square().sum() for result in results if result.requires_grad)
        found += [*results, *torch.autograd.grad(loss, [operand for operand in operands if operand is not None])]
    return found


def test_loops_over_time_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the formulas, from kernels that refuse what those of GPUs refuse."""
    expected = _loops()
    monkeypatch.setattr(time_loops, "_has_kernel", lambda tensor: True)
    with cells_on_cpu():
        found = _loops()
    for kernel, formula in zip(found, expected, strict=True):
        torch.testing.assert_close(kernel, formula, rtol=1e-12, atol=1e-13)


class Penalised(nn.Module):
    """A loss that has the gradient of a cell in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = KINDS[kind](INPUTS, UNITS, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        state = self.cell(x)
        y = sum(each.square().sum() for each in state) if isinstance(state, tuple) else state.square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y + gradient.square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind: str) -> None:
    module, x = Penalised(kind), torch.randn(SAMPLES, INPUTS, dtype=F64)
    run = run_joint(capture(module, (x,), {}), module, (x,))
    loss = module(x.clone())
    loss.backward()
    assert run.output.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(run.gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


class Autocast(nn.Module):
    """A cell under autocast."""

    def __init__(self, kind: str, device: str) -> None:
        super().__init__()
        self.cell, self.device = KINDS[kind](INPUTS, UNITS), device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            state = self.cell(x)
        return (state[0] + state[1] if isinstance(state, tuple) else state).float().square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_of_gpus_makes_states_of_its_type(kind: str) -> None:
    module, x = Autocast(kind, "cuda"), torch.randn(SAMPLES, INPUTS)
    graph = capture(module, (x,), {})
    (cell,) = (node for node in graph.graph_module.graph.nodes if str(node.target) == f"autoshard.{kind}_cell.default")
    assert {value.dtype for value in cell.meta["val"]} == {torch.bfloat16}
    assert run_joint(graph, module, (x,)).output.item() == pytest.approx(_without_autocast(module, x), rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_of_cpus_keeps_states_in_float32(kind: str) -> None:
    module, x = Autocast(kind, "cpu"), torch.randn(SAMPLES, INPUTS)
    run = run_joint(capture(module, (x,), {}), module, (x,))
    loss = module(x)
    loss.backward()
    assert run.output.item() == loss.item()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(run.gradients[name], parameter.grad, rtol=2e-2, atol=1e-2)


def _without_autocast(module: Autocast, x: torch.Tensor) -> float:
    state = module.cell(x)
    return (state[0] + state[1] if isinstance(state, tuple) else state).square().sum().item()
