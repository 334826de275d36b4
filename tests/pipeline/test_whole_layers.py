"""Stages of whole layers: where they are taken, and where others are better."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.operator_costs import read_stage_graph
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.pipeline.graph.stage_problem import StageDevice
from autoshard.pipeline.graph.stages import assign_layers
from autoshard.specs.axes import MeshShape
from tests.pipeline.random_graphs import chain, held_bytes, imbalance

LAYERS = 126
PARTS = 3


def deep(head: float = 2.0, inside: int = 4, saved: int = 0) -> StageGraph:
    """Layers of three parts each, one behind the other, and a head; `inside` bytes go from part to part of a layer."""
    sizes = [inside if (place + 1) % PARTS else 4 for place in range(LAYERS * PARTS)]
    graph = chain([1.0] * LAYERS * PARTS + [head], sizes, saved)
    layers = [f"layers.{place // PARTS}" for place in range(LAYERS * PARTS)] + [""]
    return replace(graph, nodes=tuple(replace(one, layer=name) for one, name in zip(graph.nodes, layers, strict=True)))


def devices(count: int, memory: float = float("inf")) -> list[StageDevice]:
    return [StageDevice(1.0, memory=memory)] * count


def test_stages_are_as_many_whole_layers_and_a_few_less_where_the_head_is() -> None:
    stages = assign_layers(deep(), devices(16), [1] * 16, tolerance=0.02)
    assert stages is not None
    held = [sum(stage == one for stage in stages.stage_of.values()) for one in range(16)]
    assert sorted(held[:-1]) == [7 * PARTS] + [8 * PARTS] * 14
    assert held[-1] == 7 * PARTS + 1
    share = (LAYERS * PARTS + 2) / 16
    assert imbalance(deep(), devices(16), stages, less=True) == pytest.approx(8 * PARTS / share - 1)


def test_layers_are_parted_where_stages_are_unequal_otherwise() -> None:
    assert assign_layers(deep(head=20.0), devices(16), [1] * 16, tolerance=0.02) is None


def test_layers_are_parted_where_less_crosses_inside_of_them() -> None:
    assert assign_layers(deep(inside=1), devices(6), [1] * 6, tolerance=0.1) is None


def test_a_model_of_few_layers_has_no_stages_of_whole_ones() -> None:
    assert assign_layers(deep(), devices(64), [1] * 64, tolerance=0.5) is None


def test_what_is_saved_counts_unless_it_may_be_computed_again() -> None:
    graph, flights = deep(saved=1), [6, 5, 4, 3, 2, 1]
    tight = devices(6, memory=200.0)  # the first stage would save 6 x 21 x 3 bytes
    assert assign_layers(graph, tight, flights, tolerance=0.03) is None
    stages = assign_layers(graph, tight, flights, tolerance=0.03, keeping=False)
    assert stages is not None
    assert held_bytes(graph, tight, flights, stages)[0] == 6 * 21 * PARTS


def test_operators_know_their_layers() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    cost = CostModel(Cluster.of("h100"), MeshShape.of({"x": 1}))
    graph = read_stage_graph(capture_microbatch(module, (torch.empty(4, 8),), {}), cost)
    assert list(dict.fromkeys(node.layer for node in graph.nodes)) == ["0", "1", "2", "3"]
