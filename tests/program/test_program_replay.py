"""The program as operations: what runs on which stream, at which price, and what it waits for.

Prices of kernels as a compiler fuses them: a chain of pointwise operators is one kernel.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx

from autoshard.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.cluster.device import Device
from autoshard.planner.planning_problem import Constraints
from autoshard.program.program_replay import (
    CollectiveCall,
    KernelPrices,
    collective_calls,
    is_written,
    memory_operands,
    operations,
)
from autoshard.program.split import split
from autoshard.simulate.events import COMPUTE, replay
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from tests.cluster.test_measurements import measured_cluster
from tests.planner.steps import (
    collectives_of,
    every_parameter,
    halves_of,
    joint_graph,
    links,
    planner_of,
    program_of,
)

aten = torch.ops.aten


def hand_written() -> fx.Graph:
    """Gathers a vector of 64 floats, adds to another meanwhile, and uses both."""
    graph = fx.Graph()

    def tensor(node: fx.Node, length: int) -> fx.Node:
        node.meta["val"] = torch.empty(length, device="meta")
        return node

    shard, other = tensor(graph.placeholder("shard"), 64), tensor(graph.placeholder("other"), 128)
    gathered = tensor(graph.call_function(collectives.all_gather_into_tensor.default, (shard, 2, "x")), 128)
    beside = tensor(graph.call_function(aten.add.Tensor, (other, other)), 128)
    awaited = tensor(graph.call_function(collectives.wait_tensor.default, (gathered,)), 128)
    whole = tensor(graph.call_function(aten.view.default, (awaited, [128])), 128)
    graph.output((tensor(graph.call_function(aten.add.Tensor, (whole, beside)), 128),))
    return graph


def test_a_program_by_hand() -> None:
    cost = CostModel(measured_cluster(), MeshShape.of({"y": 2, "x": 2}))
    issued = operations([hand_written()], ("y", "x"), KernelPrices(cost))
    # 256 bytes gathered in 1 s; 1024 and 1536 bytes added at 10 bytes a second; a view in a quarter of a second.
    assert [(one.stream == COMPUTE, one.seconds, one.needs) for one in issued] == [
        (False, 1.0, ()),
        (True, pytest.approx(102.4), ()),
        (True, 0.0, (0, 1)),
        (True, 0.25, (2,)),
        (True, pytest.approx(153.6), (3,)),
    ]
    replayed = replay(issued)
    assert replayed.seconds == pytest.approx(102.4 + 153.6 + 0.25)
    assert (replayed.hidden, replayed.exposed) == pytest.approx((1.0, 0.0))
    assert replayed.seconds_with_contention(0.9) == pytest.approx(replayed.seconds + 0.9)
    assert collective_calls([hand_written()], ("y", "x")) == [CollectiveCall("all_gather", 256, 1)]


def test_a_joined_gather_is_one_collective_of_all_its_bytes() -> None:
    graph = fx.Graph()
    shards = [graph.placeholder("first"), graph.placeholder("second")]
    values = [torch.empty(8 * (place + 1), device="meta") for place in range(2)]
    for shard, value in zip(shards, values, strict=True):
        shard.meta["val"] = value
    joined = graph.call_function(collectives.all_gather_into_tensor_coalesced.default, (shards, 2, "x"))
    joined.meta["val"] = [torch.empty(2 * value.numel(), device="meta") for value in values]
    parts = [graph.call_function(operator.getitem, (joined, place)) for place in range(2)]
    graph.output(tuple(graph.call_function(collectives.wait_tensor.default, (part,)) for part in parts))
    cost = CostModel(measured_cluster(), MeshShape.of({"y": 2, "x": 2}))
    assert collective_calls([graph], ("y", "x")) == [CollectiveCall("all_gather", 4 * (8 + 16), 1)]
    start, *waits = operations([graph], ("y", "x"), KernelPrices(cost))
    assert start.seconds == cost.collective("all_gather", 96, 1)
    assert [0 in wait.needs for wait in waits] == [True, True]


@pytest.mark.parametrize(("name", "mesh"), [("gpt", {"x": 2}), ("mlp", {"x": 2, "y": 2})])
def test_every_collective_of_the_program_is_there_once(name: str, mesh: Mapping[str, int]) -> None:
    graph = joint_graph(name)
    planner = planner_of(graph, mesh, Constraints(forced=every_parameter(graph)))
    halves = split(program_of(planner, planner.plan()), compile=False)
    issued = operations(halves.graphs, planner.mesh.names, planner.prices)
    sent = collective_calls(halves.graphs, planner.mesh.names)
    assert sum(one.stream != COMPUTE for one in issued) == len(sent) > 0
    gathered = Counter[str]()  # those of a layer are joined
    for one in sent:
        gathered[planner.mesh.names[one.axis]] += one.bytes * (one.kind == "all_gather")
    assert halves.backward is not None
    for (kind, axis, size), count in collectives_of(*halves_of(program_of(planner, planner.plan()))).items():
        gathered[axis] -= size * count * (kind == "all_gather")
    assert set(gathered.values()) == {0}


def test_joined_reductions_have_their_bytes() -> None:
    planner = planner_of(joint_graph("gpt"), {"x": 2}, cluster=links(1e12, 0.0))
    plan = planner.plan()
    halves = split(program_of(planner, plan), compile=False)
    reduced = [one.bytes for one in collective_calls(halves.graphs, ("x",)) if one.kind == "all_reduce"]
    planned = [one.bytes * one.count for one in plan.collectives if one.kind == "all_reduce"]
    assert sum(reduced) == sum(planned) > 0
    assert len(reduced) < sum(one.count for one in plan.collectives if one.kind == "all_reduce")


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
