"""Stages are flat graphs already: captured without another export, they are what they are with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture.flat_modules import is_flat
from autoshard.capture.joint import JointGraph, capture
from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.graph.stage_modules import cut
from tests import models


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
