from __future__ import annotations

import itertools
from collections.abc import Hashable

import torch
from torch import fx

from autoshard.capture import capture
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.repeated_modules import repeated_modules
from autoshard.patterns.registry import op_call
from tests import models


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
