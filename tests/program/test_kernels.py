"""Prices of kernels as a compiler fuses them: a chain of pointwise operators is one kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autoshard.cluster import Cluster, CostModel
from autoshard.cluster.device import Device
from autoshard.program.kernels import is_written, memory_operands
from autoshard.program.program_replay import KernelPrices, operations
from autoshard.simulate.events import replay
from autoshard.specs.axes import MeshShape

aten = torch.ops.aten
MESH = MeshShape.of({"x": 1})
ROWS = 1000
BYTES = 4 * ROWS * ROWS
PLAIN = Device("plain", 1, {"float32": 1e12, "bfloat16": 1e12, "float64": 1e12}, 1e9, 1e-6)


def traced(build: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]) -> fx.Graph:
    """A graph of two square matrices."""
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    graph.output(build(graph, first, second))
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(ROWS, ROWS, device="meta")
    return graph


def seconds(graph: fx.Graph, *, compiled: bool, device: Device = PLAIN) -> float:
    cluster = dataclasses.replace(Cluster.preset("cpu"), device=device)
    costs = CostModel(cluster.with_compiler if compiled else cluster, MESH)
    return replay(operations([graph], ("x",), KernelPrices(costs))).seconds


def chain(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node:
    node = graph.call_function(aten.add.Tensor, (first, second))
    for op in (aten.exp.default, aten.neg.default, aten._to_copy.default):
        node = graph.call_function(op, (node,))
    return node


def test_a_chain_of_pointwise_operators_counts_once() -> None:
    graph = traced(chain)
    assert seconds(graph, compiled=False) == pytest.approx((3 + 2 + 2 + 2) * BYTES / 1e9 + 4e-6)
    assert seconds(graph, compiled=True) == pytest.approx((2 + 1) * BYTES / 1e9 + 1e-6)


def test_what_a_product_reads_is_written() -> None:
    def build(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node:
        summed = graph.call_function(aten.add.Tensor, (first, second))
        product = graph.call_function(aten.mm.default, (summed, second))
        return graph.call_function(aten.exp.default, (product,))

    graph = traced(build)
    assert seconds(graph, compiled=True) == pytest.approx(seconds(graph, compiled=False))


def test_chains_go_through_views_and_into_reductions() -> None:
    def build(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node:
        squared = graph.call_function(aten.mul.Tensor, (first, first))
        viewed = graph.call_function(aten.view.default, (squared, [ROWS, ROWS]))
        return graph.call_function(aten.sum.dim_IntList, (viewed, [0]))

    graph = traced(build)
    squared, viewed, summed = (node for node in graph.nodes if node.op == "call_function")
    assert not is_written(squared)
    assert memory_operands(summed) == []
    assert is_written(summed)
    assert memory_operands(viewed) is None


def test_a_result_that_is_handed_back_is_written() -> None:
    def build(graph: fx.Graph, first: fx.Node, second: fx.Node) -> Any:
        summed = graph.call_function(aten.add.Tensor, (first, second))
        return summed, graph.call_function(aten.exp.default, (summed,))

    summed = next(iter(traced(build).find_nodes(op="call_function", target=aten.add.Tensor)))
    assert is_written(summed)


@pytest.mark.parametrize("name", [name for name in Cluster.presets() if name != "cpu"])
def test_compiled_programs_are_never_slower(name: str) -> None:
    device = Cluster.preset(name).device
    graph = traced(chain)
    assert seconds(graph, compiled=True, device=device) < seconds(graph, compiled=False, device=device)
