"""What nodes of exported graphs share, change and differentiate.

Stages are flat graphs already: captured without another export, they are what they are with one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture.export import Exported
from autoshard.capture.flat_modules import Effects, is_flat
from autoshard.capture.joint import JointGraph, capture, capture_forward
from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.graph.stage_modules import cut
from tests import models


def _effects(module: nn.Module) -> tuple[Exported, Effects]:
    return capture_forward(module, (torch.randn(4, 3),), {})


def _by_operator(exported: Exported, text: str) -> torch.fx.Node:
    (found,) = (
        node for node in exported.graph_module.graph.nodes if node.op == "call_function" and text in str(node.target)
    )
    return found


class _InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y[:, 0].mul_(2)
        return y.sin()


def test_changes_of_views_are_changes_of_what_they_view() -> None:
    exported, effects = _effects(_InPlace())
    changer, made = _by_operator(exported, "mul_"), _by_operator(exported, "exp")
    assert list(effects.changed) == [changer]
    assert effects.changed[changer] == effects.memory[made] == effects.memory[_by_operator(exported, "select")]
    assert effects.memory[_by_operator(exported, "sin")].isdisjoint(effects.memory[made])


class _Normed(nn.Module):
    """A norm inside of a region without gradients, and a product behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.norm(x).relu()
        return self.linear(y) + y


def test_statistics_are_changed_in_training_alone() -> None:
    module = _Normed()
    for training in (True, False):
        exported, effects = _effects(module.train(training))
        placeholders = exported.graph_module.graph.find_nodes(op="placeholder")
        names = {item.name: node for node, item in zip(placeholders, exported.inputs, strict=True)}
        changed = {piece for pieces in effects.changed.values() for piece in pieces}
        for name in ("norm.running_mean", "norm.running_var"):
            assert (effects.memory[names[name]] <= changed) is training


def test_gradients_end_where_they_are_not_wanted() -> None:
    exported, effects = _effects(_Normed())
    region, product = _by_operator(exported, "wrap_with_set_grad"), _by_operator(exported, "linear")
    assert region not in effects.differentiable
    assert product in effects.differentiable


class _Masked(nn.Module):
    """A mask of petabytes, made of no input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(1 << 25)
        return x + (rows[:, None] >= rows).sum()


def test_what_depends_on_no_input_takes_no_memory() -> None:
    exported, effects = _effects(_Masked())
    assert not effects.changed
    assert _by_operator(exported, "aten.ge").meta["val"].shape == (1 << 25, 1 << 25)


def told(graph: JointGraph) -> Any:
    """All that a plan of a graph, and a call of it, depends on."""
    nodes = [(node.name, graph.phase(node)) for node in graph.graph.nodes]
    inputs = [(item.kind, item.name) for item in graph.inputs]
    outputs = [(item.kind, item.name, item.tangent) for item in graph.outputs]
    return graph.fingerprint, nodes, inputs, outputs, graph.aliases, graph.signature, graph.call, graph.result


@pytest.mark.parametrize("name", ["gpt", "hf_mixtral"])
def test_a_stage_is_captured_as_if_it_were_exported_again(name: str) -> None:
    module, inputs = models.ZOO[name]()
    graph = export_forward(module, (), inputs)
    count = len(graph.operators)
    half = {node.name: int(2 * place >= count) for place, node in enumerate(graph.operators)}
    for group in graph.together:
        half.update(dict.fromkeys(group, max(half[one] for one in group)))
    for stage in cut(graph, half, 2):
        assert is_flat(stage.module)
        flat = capture(stage.module, *stage.example)
        stage.module.meta.clear()
        assert not is_flat(stage.module)
        again = capture(stage.module, *stage.example)
        assert told(flat) == told(again)
        for one, other in zip(flat.graph.nodes, again.graph.nodes, strict=True):
            path = again.module_path(other)  # none of what is made contiguous to be sent
            assert path in ("", flat.module_path(one))


def test_names_of_parameters_may_begin_with_digits() -> None:
    graph = export_forward(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (torch.zeros(2, 4),), {})
    half = {node.name: place // 2 for place, node in enumerate(graph.operators)}
    names = [item.name for stage in cut(graph, half, 2) for item in capture(stage.module, *stage.example).inputs]
    assert {"0.weight", "2.weight"} <= set(names)
