from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.library import opcheck
from torch.nn import functional

from autoshard.capture import capture
from autoshard.capture.operators import MEAN, SUM, bags, losses, operators, rms_norm
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


F64 = torch.float64
INDICES = torch.tensor([[1, 2, 3], [4, 4, 0], [2, 2, 2], [9, 0, 2]])


class Bags(nn.Module):
    """A table of embeddings that are read in bags."""

    def __init__(self, weighted: bool, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 6, dtype=F64, **options)
        self.weights = nn.Parameter(torch.rand(4, 3, dtype=F64)) if weighted else None

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.table(*args, per_sample_weights=self.weights)


def _assert_same_bags(module: nn.Module, *args: torch.Tensor) -> set[str]:
    expected = module(*args)
    tangent = torch.linspace(1, 2, expected.numel(), dtype=F64).view_as(expected)
    expected.backward(tangent)
    graph = capture(module, args, {})
    step = run_joint(graph, module, args, tangents={"output": tangent})
    torch.testing.assert_close(step.output, expected)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad)
    return {str(node.target) for node in graph.graph.nodes}


@pytest.mark.parametrize("padding", [None, 2, -10])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
def test_bags_of_one_size(padding: int | None, mode: str, weighted: bool) -> None:
    targets = _assert_same_bags(Bags(weighted, mode=mode, padding_idx=padding), INDICES)
    assert {"autoshard.bags.default", "autoshard.bags_backward.default"} <= targets


def test_other_bags_are_left_to_torch() -> None:
    assert "aten._embedding_bag.default" in _assert_same_bags(Bags(False, mode="max"), INDICES)
    offsets = torch.tensor([0, 3, 3, 9])
    assert "aten._embedding_bag.default" in _assert_same_bags(Bags(False, mode="mean"), INDICES.flatten(), offsets)


def test_the_operators_keep_torchs_contract() -> None:
    table, weights = (torch.rand(size, dtype=F64, requires_grad=True) for size in ((10, 6), (4, 3)))
    opcheck(bags.bags.default, (table, INDICES, weights, SUM, 2))
    opcheck(bags.bags.default, (table, INDICES, None, MEAN, -1))


DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_it_is_the_norm_of_torch(dtype: torch.dtype, weight_dtype: torch.dtype, eps: float | None) -> None:
    x, weight = torch.randn(4, 6, 8).to(dtype).requires_grad_(), torch.randn(8).to(weight_dtype).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that element types differ
        expected = functional.rms_norm(x, [8], weight, eps)
    found = rms_norm(x, [8], weight, eps, dtype=dtype)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    for own, other in zip(
        torch.autograd.grad(found, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_it_tells_without_numbers_is_what_it_gives(weight: bool, dtype: torch.dtype) -> None:
    x, scale = torch.randn(4, 6, 8).to(dtype), torch.randn(6, 8).to(dtype) if weight else None
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.rms_norm.default, (x, [6, 8], scale, 1e-5), test_utils=checks)
    rstd = operators.rms_norm(x, [6, 8], scale, 1e-5)[1]
    for mask in ([True, weight], [not weight, weight]):
        args = (x, x, [6, 8], rstd, scale, mask)
        torch.library.opcheck(operators.rms_norm_backward.default, args, test_utils=checks)


def test_a_graph_has_one_operator_for_it() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)).double(), torch.randn(4, 8, dtype=torch.float64)
    graph = capture(module, (x,), {})
    targets = [str(node.target) for node in graph.graph_module.graph.nodes]
    assert targets.count("autoshard.rms_norm.default") == 1
    assert targets.count("autoshard.rms_norm_backward.default") == 1
    output = module(x)
    output.backward(torch.ones_like(output))
    run = run_joint(graph, module, (x,))
    torch.testing.assert_close(run.output, output)
    torch.testing.assert_close(run.gradients["1.weight"], module[1].weight.grad)
