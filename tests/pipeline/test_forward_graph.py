"""Reading exported graphs: gradients, saved bytes, what cannot be parted, and what can be made once more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.memory.optimizer import optimizer_memory
from autoshard.pipeline.graph.forward_graph import read_stage_graph
from autoshard.pipeline.graph.stage_graph import StageGraph, StageNode, StageValue
from tests.models.basic import mlp
from tests.pipeline.exporting import cost_model, export_forward


class Tied(nn.Module):
    """An embedding tied to the head, a frozen projection, and a table that needs inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        table = torch.arange(ids.shape[1], dtype=torch.float32).cos()[:, None]
        hidden = self.tokens(ids) * table
        hidden = self.frozen(hidden).relu() + torch.rand(8)
        return self.head(hidden * table)


class InPlace(nn.Module):
    """Writes into a tensor that it reads before and after, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x + 1
        before = shifted.exp()
        shifted[:, 0] = 0
        return self.norm(shifted.sin()) + before


def _of(graph: StageGraph, name: str) -> StageNode:
    return next(node for node in graph.nodes if name in node.members)


def test_tied_frozen_and_constant() -> None:
    graph = read_stage_graph(export_forward(Tied(), {"ids": torch.zeros(2, 4, dtype=torch.long)}), cost_model())
    readers = [node.name for node in graph.nodes if "tokens.weight" in node.at_rest]
    assert readers == ["embedding", "linear_1"]
    state = optimizer_memory(None, None, foreach=False).state_bytes((16, 8), (16, 8), 4)
    assert graph.at_rest == {"tokens.weight": 2 * 16 * 8 * 4 + state, "frozen.weight": 8 * 8 * 4}
    values = {value.name: value for value in graph.values}
    assert values["unsqueeze"].recompute_seconds is not None
    assert values["unsqueeze"].gradient_bytes == 0
    assert values["rand"].recompute_seconds is None
    assert values["embedding"].recompute_seconds is None
    assert values["embedding"].gradient_bytes == values["embedding"].bytes == 2 * 4 * 8 * 4
    assert values["linear_1"].output
    assert _of(graph, "linear").backward_seconds < _of(graph, "linear_1").backward_seconds


def test_what_is_changed_in_place_stays_together_up_to_the_change() -> None:
    graph = read_stage_graph(export_forward(InPlace(), {"x": torch.randn(6, 4)}), cost_model())
    changed = next(node for node in graph.nodes if any("_" in name and len(node.members) > 2 for name in node.members))
    assert {"add", "exp"} <= set(changed.members)
    assert "sin" not in changed.members
    norm = next(node for node in graph.nodes if "norm.running_mean" in node.at_rest)
    assert "norm.num_batches_tracked" in norm.at_rest


def test_saved_bytes_are_those_of_autograd() -> None:
    module, inputs = mlp()
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(**inputs)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *inputs.values())}
    expected = sum(size for key, size in saved.items() if key not in given)
    graph = read_stage_graph(export_forward(module, inputs), cost_model())
    assert sum(node.saved_bytes for node in graph.nodes) == expected


def test_nodes_must_be_in_order() -> None:
    node = StageNode("n", 1.0, 1.0, 0, (), ("n",))
    with pytest.raises(ValueError, match="topological order"):
        StageGraph((node, node), (StageValue("n", 1, (0,), 1),), {})
