"""Collectives joined and ordered by torch's passes: the same numbers, at the cluster's prices.

Products fused with gathers and reduce-scatters where groups have symmetric memory: the same numbers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard.capture import outside_modes
from autoshard.cluster.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.planner.planning_problem import Constraints
from autoshard.program import _torch, overlap
from autoshard.program.localize import localize
from autoshard.program.overlap import TorchArrangement, fuse
from autoshard.program.program_replay import KernelPrices
from autoshard.program.split import Halves, split
from autoshard.runtime.step import Ranks
from autoshard.specs.emitter import collectives
from tests import models
from tests.memory_tracker import first_rank
from tests.planner.steps import every_parameter, flow_of, joint_graph, planner_of
from tests.runtime.meshes import per_rank, simulated_mesh
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


aten = torch.ops.aten
FUSED_GATHER = torch.ops.symm_mem.fused_all_gather_matmul.default
FUSED_SCATTER = torch.ops.symm_mem.fused_matmul_reduce_scatter.default


@contextmanager
def symmetric_memory(monkeypatch: pytest.MonkeyPatch, *groups: str) -> Iterator[None]:
    """As if these groups had symmetric memory, and this build NCCL, without which the pass does nothing."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with symmetric._test_mode(set(groups)):
        yield


class _Fallback(fx.Interpreter):
    """Runs a graph on any device: fused operators as what they stand for."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is FUSED_GATHER:
            return symmetric._fused_all_gather_matmul_fallback(*args, **kwargs)
        if target is FUSED_SCATTER:
            return symmetric._fused_matmul_reduce_scatter_fallback(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return aten.reshape(aten.mm(aten.reshape(x, [-1, x.shape[-1]]), weight), [*x.shape[:-1], weight.shape[1]])


def _gathered(x: Tensor, group: str) -> Tensor:
    """The blocks of all ranks along dim 1, as a reshard puts them together."""
    rows, length, width = x.shape
    pieces = collectives.wait_tensor(collectives.all_gather_into_tensor(x, 2, group))
    if rows == 1:
        return aten.view(pieces, [1, 2 * length, width])
    opened = aten.permute(aten.view(pieces, [2, rows, 1, length, width]), [1, 2, 0, 3, 4])
    return aten.view(aten.clone(opened, memory_format=torch.contiguous_format), [rows, 2 * length, width])


def _gather_then_product(group: str) -> Callable[..., Any]:
    return lambda x, weight: (_product(_gathered(x, group), weight),)


def _gather_then_sum(group: str) -> Callable[..., Any]:
    return lambda x, weight: (aten.add(_gathered(x, group), 1),)


def _product_then_scatter(group: str) -> Callable[..., Any]:
    def run(x: Tensor, weight: Tensor) -> Any:
        scattered = collectives.reduce_scatter_tensor(_product(x, weight), "sum", 2, group)
        return (collectives.wait_tensor(scattered),)

    return run


def _targets(graph: fx.Graph) -> Counter[Any]:
    graph.lint()
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("build", "fused"),
    [(_gather_then_product, FUSED_GATHER), (_product_then_scatter, FUSED_SCATTER), (_gather_then_sum, None)],
)
def test_fused_products_give_the_same_numbers(
    build: Callable[[str], Callable[..., Any]], fused: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 2 * rows if fused is FUSED_SCATTER else rows
    with simulated_mesh(x=2) as mesh:
        ranks = Ranks(mesh, torch.device("cpu"))
        (group,) = ranks.groups
        x = torch.arange(rows * 4 * 6.0, dtype=torch.float64).reshape(rows, 4, 6) * (ranks.coordinates[0] + 1)
        weight = torch.arange(30.0, dtype=torch.float64).reshape(6, 5)
        with outside_modes():
            example = torch.empty(rows, 4, 6, dtype=torch.float64), torch.empty(6, 5, dtype=torch.float64)
            program = make_fx(build(group), tracing_mode="fake")(*example)
            before = _targets(program.graph)
            expected_program = fx.GraphModule(program, fx.Graph())
            expected_program.graph.output(expected_program.graph.graph_copy(program.graph, {}))
            expected_program.recompile()
            with symmetric_memory(monkeypatch, group):
                fuse(program.graph)
            program.recompile()
        after = _targets(program.graph)
        assert after[fused] == (fused is not None)
        assert after[GATHER] == (before[GATHER] if fused is None else 0)
        assert all("val" in node.meta for node in program.graph.nodes if node.op == "call_function")
        if fused is None and rows == 1:
            assert after[aten.cat.default] == 0  # what is only looked at is not copied
        found, expected = _Fallback(program).run(x, weight), fx.Interpreter(expected_program).run(x, weight)
        for one, other in zip(per_rank(found[0], mesh).values(), per_rank(expected[0], mesh).values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_nothing_is_fused_over_groups_without_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_mesh(x=2) as mesh:
        (group,) = Ranks(mesh, torch.device("cpu")).groups
        with outside_modes():
            program = make_fx(_gather_then_product(group), tracing_mode="fake")(torch.empty(3, 4, 6), torch.empty(6, 5))
            before = [node.name for node in program.graph.nodes]
            with symmetric_memory(monkeypatch, "another"):
                fuse(program.graph)
        assert [node.name for node in program.graph.nodes] == before


def test_a_torch_without_the_pass_has_no_use_for_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with symmetric_memory(monkeypatch, "group"):
        assert _torch.has_symmetric_memory("group")
        monkeypatch.setattr(_torch, "_fuse_products", lambda: None)
        assert not _torch.has_symmetric_memory("group")
