from __future__ import annotations

import torch

from autoshard.capture import capture
from autoshard.capture.repeats import repeats
from tests import models


def test_layers_repeat_and_correspond() -> None:
    module, kwargs = models.gpt(layers=3)
    graph = capture(module, (), kwargs)
    found = repeats(graph)
    layers = found.modules[0]
    assert layers.pattern == "layers.*"
    assert layers.paths == ("layers.0", "layers.1", "layers.2")
    for nodes in zip(*layers.nodes, strict=True):
        assert len({(found.key[node], node.target, graph.phase(node)) for node in nodes}) == 1
    assert {graph.phase(node) for node in layers.nodes[0]} == {"forward", "backward"}


def test_classes_cover_the_graph_once() -> None:
    module, kwargs = models.hf_gpt2()
    graph = capture(module, (), kwargs)
    found = repeats(graph)
    members = [node for nodes in found.classes.values() for node in nodes]
    assert sorted(members) == sorted(node for node in graph.graph.nodes if node.op != "output")
    for nodes in found.classes.values():
        shapes = {str(node.meta["val"]) for node in nodes if isinstance(node.meta["val"], torch.Tensor)}
        assert len(shapes) <= 1
        assert len({node.target for node in nodes if node.op == "call_function"}) <= 1
    assert len(found.classes) < len(members) / 2


def test_keys_are_equal_between_captures() -> None:
    first, second = (repeats(capture(module, (), kwargs)) for module, kwargs in (models.mlp(), models.mlp(seed=1)))
    assert list(first.key.values()) == list(second.key.values())


def test_other_shapes_are_other_work() -> None:
    module, kwargs = models.mlp()
    other, others = models.mlp(batch=6)
    keys = {
        key
        for node, key in repeats(capture(module, (), kwargs)).key.items()
        if node.target == torch.ops.aten.mm.default
    }
    assert keys.isdisjoint(repeats(capture(other, (), others)).classes)
