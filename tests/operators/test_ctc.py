"""The loss of connectionist temporal classification as an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.library import opcheck

from autoshard.capture import capture
from autoshard.operators.ctc import losses
from tests.capture.interpret import run_joint

LENGTHS = (torch.tensor([8, 8, 7, 6]), torch.tensor([3, 2, 3, 1]))
ROWS = torch.tensor([[1, 2, 3], [4, 4, 0], [2, 2, 2], [6, 0, 0]])
JOINED = torch.tensor([1, 2, 3, 4, 4, 2, 2, 2, 6])


class Recognizer(nn.Module):
    """A linear layer and the loss of what it reads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7, dtype=torch.float64)
        self.options = options

    def forward(self, x: torch.Tensor, targets: torch.Tensor, lengths: Any, sizes: Any) -> torch.Tensor:
        scores = self.linear(x).log_softmax(-1)
        return nn.functional.ctc_loss(scores, targets, lengths, sizes, **self.options)


def _assert_same_loss(module: nn.Module, *args: Any) -> None:
    expected = module(*args)
    tangent = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    expected.backward(tangent)
    graph = capture(module, args, {})
    step = run_joint(graph, module, args, tangents=dict.fromkeys(graph.tangent_outputs, tangent))
    torch.testing.assert_close(step.output, expected)
    torch.testing.assert_close(step.gradients["linear.weight"], module.linear.weight.grad)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("targets", [ROWS, JOINED])
@pytest.mark.parametrize("lists", [True, False])
def test_the_graph_is_the_loss(reduction: str, targets: torch.Tensor, lists: bool) -> None:
    lengths = [value.tolist() for value in LENGTHS] if lists else LENGTHS
    module = Recognizer(reduction=reduction, blank=5, zero_infinity=True)
    _assert_same_loss(module, torch.randn(8, 4, 5, dtype=torch.float64), targets, *lengths)


def test_a_target_that_does_not_fit_counts_nothing_or_infinity() -> None:
    x, sizes = torch.randn(8, 4, 5, dtype=torch.float64), torch.tensor([3, 2, 3, 1])
    _assert_same_loss(Recognizer(zero_infinity=True), x, ROWS, torch.tensor([8, 1, 7, 6]), sizes)
    infinite = Recognizer(reduction="none")
    graph = capture(infinite, (x, ROWS, torch.tensor([8, 1, 7, 6]), sizes), {})
    assert run_joint(graph, infinite, (x, ROWS, torch.tensor([8, 1, 7, 6]), sizes)).output[1].isinf()


def test_one_sample_without_a_batch_dim() -> None:
    x = torch.randn(8, 5, dtype=torch.float64)
    _assert_same_loss(Recognizer(), x, ROWS[0], torch.tensor(8), torch.tensor(3))
    _assert_same_loss(Recognizer(reduction="none"), x, ROWS[0], [8], [3])


def test_the_operator_keeps_torchs_contract() -> None:
    scores = torch.randn(8, 4, 7, dtype=torch.float64).log_softmax(-1).requires_grad_()
    opcheck(losses.ctc_loss.default, (scores, ROWS, *LENGTHS, 0, False))
