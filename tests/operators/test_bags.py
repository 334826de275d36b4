"""Bags of embeddings of one size as operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.library import opcheck

from autoshard.capture import capture
from autoshard.operators.bags import MEAN, SUM, bags
from tests.capture.interpret import run_joint

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
