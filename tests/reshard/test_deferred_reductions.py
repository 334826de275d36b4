"""Reductions taken out of a backward half: sums of what it returns then become what it returned before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.joint import capture
from autoshard.planner.planning_problem import Constraints
from autoshard.reshard.deferred_reductions import DeferredReduction, reduce_with_sums, take_reductions
from tests import models
from tests.planner.steps import KINDS, every_parameter, halves_of, links
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.runtime.programs import locals_of, run_halves, step_on

_SLOW = links(bandwidth=1e9, latency=1e-9)
"""With a large batch, behind links like these, the plan of the smallest sum of seconds is data parallel."""


@pytest.mark.parametrize(
    ("forced", "reduced", "later"),
    [(False, "step", 4), (False, "microbatch", 4), (True, "step", 4), (True, "microbatch", 0)],
)
def test_sums_are_reduced_as_their_terms_are(forced: bool, reduced: DeferredReduction, later: int) -> None:
    module, inputs = models.mlp(dtype=torch.float64, batch=1920)
    graph = capture(module, (), inputs)
    constraints = Constraints(forced=every_parameter(graph) if forced else frozenset())
    with simulated_mesh(x=2) as mesh:
        step = step_on(graph, mesh, constraints, _SLOW, effort="fast")
        tensors = locals_of(step, module, inputs, mesh)
        halves = halves_of(step)
        _, whole = run_halves(halves, step, tensors)
        unreduced = take_reductions(halves[1].graph, range(len(whole)), reduced)
        halves[1].recompile()
        _, parts = run_halves(halves, step, tensors)
        left = [node.target for node in halves[1].graph.nodes if KINDS.get(node.target) == "reduce_scatter"]
        assert len(left) == (4 if forced and not later else 0)
        if unreduced is None:
            assert later == 0
            return
        assert len(unreduced.places) == later
        last = reduce_with_sums(halves[1].graph, unreduced, unreduced.places)
        for graph in (last, unreduced.scheduled_graph()):
            assert (
                sum(KINDS.get(node.target) in ("all_reduce", "reduce_scatter") for node in graph.nodes) == 1
            )  # joined
        sums = [2 * parts[place] for place in unreduced.places]
        alone = fx.GraphModule(halves[1], unreduced.scheduled_graph())(*sums)
        _, added = run_halves((halves[0], _closed(fx.GraphModule(halves[1], last), sums)), step, tensors)
        for place, result in zip(unreduced.places, alone, strict=True):
            assert_multiple(2, result, whole[place], mesh)
            assert_multiple(3, added[place], whole[place], mesh)


def _closed(graph: fx.GraphModule, sums: list[torch.Tensor]) -> Callable[..., Any]:
    """The graph with these tensors for its last arguments."""
    return lambda *arguments: graph(*arguments, *sums)


def assert_multiple(times: int, ours: torch.Tensor, expected: torch.Tensor, mesh: DeviceMesh) -> None:
    for one, other in zip(per_rank(ours, mesh).values(), per_rank(expected, mesh).values(), strict=True):
        torch.testing.assert_close(one, times * other, rtol=1e-12, atol=1e-14)


def test_other_sums_stay() -> None:
    """The greatest of sums is no sum of the greatest, and what is read twice is reduced where it is made."""
    graph = fx.Graph()
    first, second = (graph.placeholder(name) for name in ("first", "second"))
    reduce, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
    greatest = graph.call_function(wait, (graph.call_function(reduce, (first, "max", "x")),))
    total = graph.call_function(wait, (graph.call_function(reduce, (second, "sum", "x")),))
    negative = graph.call_function(torch.ops.aten.neg.default, (total,))
    graph.output((greatest, total, negative))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, device="meta")
    assert take_reductions(graph, range(3), "step") is None
