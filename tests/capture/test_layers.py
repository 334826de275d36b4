from __future__ import annotations

import itertools
from collections.abc import Hashable

import torch
from torch import fx, nn

from autoshard.capture import capture
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.layers import layers, repeated_modules
from autoshard.capture.nodes import is_view
from autoshard.patterns.registry import op_call
from tests import models


def _names(module: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> list[str]:
    return [layer.name for layer in layers(capture(module, args, kwargs))]


class Stack(nn.Module):
    """Blocks one after the other, perhaps the same one again and again, perhaps below a wrapper."""

    def __init__(self, blocks: int, times: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(24, 2, "view", 0.0) for _ in range(blocks))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


X = torch.randn(2, 12, 24)


def test_the_elements_of_a_list_are_layers() -> None:
    assert _names(Stack(3), X) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_wrapper_around_all_is_no_layer() -> None:
    assert _names(nn.Sequential(Stack(3)), X) == ["0.blocks.0", "0.blocks.1", "0.blocks.2"]


def test_a_layer_that_is_called_many_times_is_cut_in_parts() -> None:
    names = _names(Stack(1, times=4), X)
    assert names == [f"part {number}" for number in range(len(names))]
    assert len(names) > 3


def test_a_sequence_of_single_operators_is_cut_in_parts() -> None:
    parts = [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(9)]
    modules = [module for part in parts for module in part]
    graph = capture(nn.Sequential(*modules), (X,), {})
    found = layers(graph)
    assert [layer.name for layer in found] == [f"part {number}" for number in range(4)]
    forward = [n for n in graph.graph.nodes if n.op == "call_function" and graph.phase(n) == "forward"]
    assert [node for layer in found for node in layer.nodes] == forward


def test_every_operator_is_in_one_layer_at_most_and_its_results_are_with_it() -> None:
    module, inputs = models.gpt()
    graph = capture(module, (), inputs)
    found = layers(graph)
    nodes = [node for layer in found for node in layer.nodes]
    assert len(nodes) == len(set(nodes))
    assert all(graph.phase(node) == "forward" for node in nodes)
    for layer in found:
        members = set(layer.nodes)
        for node in graph.graph.nodes:
            if "getitem" in node.name and graph.phase(node) == "forward":
                assert (node in members) == (node.all_input_nodes[0] in members)


def test_views_make_no_tensor() -> None:
    module, inputs = models.gpt()
    nodes = {node.name: node for node in capture(module, (), inputs).graph.nodes}
    assert is_view(nodes["view"])
    assert is_view(nodes["getitem"])
    assert not is_view(nodes["addmm"])


def _work(graph: JointGraph) -> dict[fx.Node, Hashable]:
    calls = [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {node: (op_call(node), graph.phase(node)) for node in calls}


def test_layers_repeat_and_correspond() -> None:
    module, kwargs = models.gpt(layers=3)
    graph = capture(module, (), kwargs)
    work = _work(graph)
    layers = repeated_modules(graph, work)[0]
    assert layers.pattern == "layers.*"
    assert layers.paths == ("layers.0", "layers.1", "layers.2")
    for nodes in zip(*layers.nodes, strict=True):
        assert len({(work[node], node.target, graph.phase(node)) for node in nodes}) == 1
    assert {graph.phase(node) for node in layers.nodes[0]} == {"forward", "backward"}


def test_layers_of_other_widths_do_not_repeat() -> None:
    class Widths(torch.nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            pairs = itertools.pairwise(widths)
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairs))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().sum()

    graph = capture(Widths(8, 8, 8, 8, 16), (torch.rand(2, 8),), {})
    [layers] = repeated_modules(graph, _work(graph))
    assert layers.pattern == "layers.*"
    assert layers.paths == ("layers.1", "layers.2")  # the first hands back no gradient of its input, the last is wider
