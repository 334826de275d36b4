"""The program as operations: what runs on which stream, at which price, and what it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import fx

from autoshard.cluster.cost import CostModel
from autoshard.partition.operations import Sending, operations, sendings
from autoshard.partition.split import Halves, split
from autoshard.patterns.local import collectives
from autoshard.planner.problem import Wishes
from autoshard.planner.schedule import timeline
from autoshard.simulate.events import COMPUTE, replay
from autoshard.specs.axes import MeshShape
from tests.cluster.test_measured import measured_cluster
from tests.planner.steps import (
    account_of,
    captured,
    collectives_of,
    every_parameter,
    halves_of,
    links,
    planner_of,
    program_of,
)

aten = torch.ops.aten


def hand_written() -> Halves:
    """Gathers a vector of 64 floats, adds to another meanwhile, and uses both."""
    graph = fx.Graph()
    shard, other = graph.placeholder("shard"), graph.placeholder("other")
    gathered = graph.call_function(collectives.all_gather_into_tensor.default, (shard, 2, "x"))
    beside = graph.call_function(aten.add.Tensor, (other, other))
    awaited = graph.call_function(collectives.wait_tensor.default, (gathered,))
    whole = graph.call_function(aten.view.default, (awaited, [128]))
    graph.output((graph.call_function(aten.add.Tensor, (whole, beside)),))
    shard.meta["val"], other.meta["val"] = torch.empty(64, device="meta"), torch.empty(128, device="meta")
    return Halves(fx.GraphModule(torch.nn.Module(), graph), None, 0, False)


def test_a_program_by_hand() -> None:
    cost = CostModel(measured_cluster(), MeshShape.of({"y": 2, "x": 2}))
    issued = operations(hand_written(), ("y", "x"), cost)
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
    assert replayed.disturbed(0.9) == pytest.approx(replayed.seconds + 0.9)
    assert sendings(hand_written(), ("y", "x")) == [Sending("all_gather", 256, 1)]


@pytest.mark.parametrize(("name", "mesh"), [("gpt", {"x": 2}), ("mlp", {"x": 2, "y": 2})])
def test_every_collective_of_the_program_is_there_once(name: str, mesh: Mapping[str, int]) -> None:
    graph = captured(name)
    planner = planner_of(graph, mesh, Wishes(forced=every_parameter(graph)))
    halves = split(program_of(planner, planner.plan()), compile=False)
    issued = operations(halves, planner.mesh.names, planner.cost)
    sent = sendings(halves, planner.mesh.names)
    assert sum(one.stream != COMPUTE for one in issued) == len(sent) > 0
    gathers = Counter((one.kind, planner.mesh.names[one.axis], one.bytes) for one in sent if one.kind == "all_gather")
    assert halves.backward is not None
    written = collectives_of(*halves_of(program_of(planner, planner.plan())))
    assert gathers == Counter({key: count for key, count in written.items() if key[0] == "all_gather"})


def test_joined_reductions_have_their_bytes() -> None:
    planner = planner_of(captured("gpt"), {"x": 2}, cluster=links(1e12, 0.0))
    plan = planner.plan()
    halves = split(program_of(planner, plan), compile=False)
    reduced = [one.bytes for one in sendings(halves, ("x",)) if one.kind == "all_reduce"]
    planned = [one.bytes * one.count for one in plan.collectives if one.kind == "all_reduce"]
    assert sum(reduced) == sum(planned) > 0
    assert len(reduced) < sum(one.count for one in plan.collectives if one.kind == "all_reduce")


def test_the_plan_s_timeline_computes_no_more_than_the_program() -> None:
    """The program adds copies that the plan does not count, and never leaves out what it counts."""
    planner = planner_of(captured("gpt"), {"x": 2})
    plan = planner.plan()
    halves = split(program_of(planner, plan), compile=False)
    issued = operations(halves, planner.mesh.names, planner.cost)
    run = sum(one.seconds for one in issued if one.stream == COMPUTE)
    replayed = timeline(account_of(planner, plan))
    assert run >= (replayed.seconds - replayed.exposed) * (1 - 1e-9)
