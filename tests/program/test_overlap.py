"""Collectives joined and ordered by torch's passes: the same numbers, at the cluster's prices."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.planner.planning_problem import Constraints
from autoshard.program import overlap
from autoshard.program.localize import localize
from autoshard.program.overlap import TorchArrangement
from autoshard.program.program_replay import KernelPrices
from autoshard.program.split import Halves, split
from autoshard.runtime.step import Ranks
from autoshard.specs.emitter import collectives
from tests import models
from tests.memory_tracker import first_rank
from tests.planner.steps import every_parameter, flow_of, joint_graph, planner_of
from tests.training import fast_links
from tests.workers import Workers

WAIT = collectives.wait_tensor.default
GATHER = collectives.all_gather_into_tensor.default


def _arranged(dynamic: bool) -> tuple[Halves, TorchArrangement]:
    """The program of a small Llama with all parameters in shards, as torch arranges it."""
    graph = joint_graph("hf_llama")
    pinned = {name: (Shard(0),) for name in every_parameter(graph)}
    planner = planner_of(graph, {"x": 2}, Constraints(pinned=pinned), cluster=Cluster.preset("h100"))
    with first_rank({"x": 2}) as mesh:
        groups = Ranks(mesh, torch.device("cpu")).groups
        step = localize(flow_of(planner, planner.plan()), planner.resharder, groups)
        arrange = TorchArrangement(KernelPrices(planner.cost), groups, dynamic)
        return split(step, compile=False, arrange=arrange), arrange


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if "all_gather_into_tensor" in str(node.target)]


def test_torch_joins_gathers_and_starts_them_early() -> None:
    halves, _ = _arranged(dynamic=False)
    joined = [node for node in _gathers(halves.forward.graph) if node.target is not GATHER]
    assert joined
    alone, _ = _arranged(dynamic=True)
    gathers = _gathers(alone.forward.graph)
    assert {node.target for node in gathers} == {GATHER}
    assert len(gathers) > len(_gathers(halves.forward.graph))
    order = {node: place for place, node in enumerate(alone.forward.graph.nodes)}
    waits = [order[next(iter(node.users))] - order[node] for node in gathers]
    assert max(waits) > 10


def test_calls_cost_what_they_cost_in_the_replay() -> None:
    halves, arrange = _arranged(dynamic=True)
    for node in halves.forward.graph.nodes:
        if node.target is GATHER:
            size = node.args[0].meta["val"].nbytes
            assert arrange.seconds(node, None) == arrange.prices.cost.collective("all_gather", size, 0)
            assert arrange.seconds(node, 2 * size) == arrange.prices.cost.collective("all_gather", 2 * size, 0)
        elif node.target in (WAIT, operator.getitem):
            assert arrange.seconds(node, None) == 0
        elif node.op == "call_function":
            assert arrange.seconds(node, None) == arrange.prices.seconds(node)


def _trains_as_one_device(options: dict[str, Any], layers: int = 2) -> int:
    """A step and an evaluation beside one device's; how many collectives the program has."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    (alone, kwargs), (model, _) = (models.gpt(dtype=torch.float64, layers=layers) for _ in range(2))
    hints = {"*": {"x": Shard(0)}}
    autoshard.parallelize(model, mesh, (), kwargs, hints=hints, cluster=fast_links(), **options)
    for _ in range(2):
        alone.zero_grad(), model.zero_grad()
        loss, expected = model(**kwargs)[1], alone(**kwargs)[1]
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        loss.backward(), expected.backward()
        for name, parameter in alone.named_parameters():
            found = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
    halves = next(iter(model.__dict__["_autoshard_runtime"]._programs.values())).program.halves
    graphs = [getattr(half, "_orig_mod", half).graph for half in (halves.forward, halves.backward)]
    return sum(len(_gathers(graph)) for graph in graphs)


def test_torch_overlap_gives_the_numbers_of_one_device(two: Workers) -> None:
    ours, joined = (two.run(_trains_as_one_device, {"overlap": name})[0] for name in overlap.OVERLAPS)
    assert ours
    assert joined


def test_torch_overlap_with_recomputation_gives_the_numbers_of_one_device(two: Workers) -> None:
    two.run(_trains_as_one_device, {"overlap": "torch", "recompute": "full"})


@pytest.mark.slow
def test_compiled_programs_give_the_numbers_of_one_device(two: Workers) -> None:
    two.run(_trains_as_one_device, {"overlap": "torch", "compile": True}, 1)


def test_an_unknown_overlap_is_refused() -> None:
    with pytest.raises(PlanError, match="overlap='none' is unknown: choose one of own, torch"):
        overlap.check_overlap("none")


def test_a_torch_without_the_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "has_overlap_pass", lambda: False)
    overlap.check_overlap("own")
    with pytest.raises(PlanError, match='leave overlap="own"'):
        overlap.check_overlap("torch")
