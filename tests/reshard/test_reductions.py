"""Reductions joined in buckets: fewer collectives, equal numbers.

Reductions taken out of a backward half: sums of what it returns then become what it returned before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Link
from autoshard.planner.planning_problem import Constraints
from autoshard.reshard.collective_schedule import schedule
from autoshard.reshard.reductions import DeferredReduction, bucket_reductions, reduce_with_sums, take_reductions
from autoshard.specs.emitter import collectives
from tests import models
from tests.planner.steps import (
    KINDS,
    bytes_of,
    collectives_of,
    every_parameter,
    halves_of,
    joint_graph,
    links,
    planner_of,
    program_of,
)
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.runtime.programs import locals_of, run_halves, step_on

_SLOW = links(bandwidth=1e9, latency=1e-9)
"""With a large batch, behind links like these, the plan of the smallest sum of seconds is data parallel."""


@pytest.mark.parametrize("forced", [False, True], ids=["reduced", "scattered"])
@pytest.mark.parametrize("limit", [25 * 2**20, 12_000, 1])
def test_bucketed_reductions_give_the_same_numbers(forced: bool, limit: int) -> None:
    module, inputs = models.mlp(dtype=torch.float64, batch=1920)
    graph = capture(module, (), inputs)
    constraints = Constraints(forced=every_parameter(graph) if forced else frozenset())
    with simulated_mesh(x=2) as mesh:
        step = step_on(graph, mesh, constraints, _SLOW, effort="fast")
        tensors = locals_of(step, module, inputs, mesh)
        plain = halves_of(step)
        before = run_halves(plain, step, tensors)
        for half in plain:
            bucket_reductions(half.graph, limit)
            half.graph.lint()
            half.recompile()
        after = run_halves(plain, step, tensors)
        for one, other in zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True):
            for ours, expected in zip(per_rank(one, mesh).values(), per_rank(other, mesh).values(), strict=True):
                assert torch.equal(ours, expected)
    starts = [node for node in plain[1].graph.nodes if node.target in KINDS]
    reductions = [node for node in starts if KINDS[node.target] in ("all_reduce", "reduce_scatter")]
    assert len(reductions) == {25 * 2**20: 1, 12_000: 2, 1: 4}[limit]


@pytest.mark.parametrize("limit", [25 * 2**20, 12_000])
def test_reductions_in_stages_over_two_axes_are_joined_and_give_the_same_numbers(limit: int) -> None:
    module, inputs = models.mlp(dtype=torch.float64, batch=1920)
    graph = capture(module, (), inputs)
    constraints = Constraints(pinned=dict.fromkeys(every_parameter(graph), (Replicate(), Replicate())))
    cluster = dataclasses.replace(_SLOW, devices_per_host=2, inside=Link(bandwidth=4e9, latency=1e-9))
    with simulated_mesh(hosts=2, devices=2) as mesh:
        step = step_on(graph, mesh, constraints, cluster)
        tensors = locals_of(step, module, inputs, mesh)
        plain = halves_of(step)
        before = run_halves(plain, step, tensors)
        assert _stages(plain[1]) == {"reduce_scatter": 4, "all_reduce": 4, "all_gather": 4}
        for half in plain:
            bucket_reductions(half.graph, limit)
            schedule(half.graph)
            half.graph.lint()
            half.recompile()
        after = run_halves(plain, step, tensors)
        for one, other in zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True):
            for ours, expected in zip(per_rank(one, mesh).values(), per_rank(other, mesh).values(), strict=True):
                assert torch.equal(ours, expected)
    joined = {25 * 2**20: 1, 12_000: 2}[limit]
    assert _stages(plain[1]) == {"reduce_scatter": joined, "all_reduce": joined, "all_gather": joined}


def _stages(half: fx.GraphModule) -> Counter[str]:
    return Counter(KINDS[node.target] for node in half.graph.nodes if node.target in KINDS)


def test_a_tiny_last_bucket_takes_from_the_one_before() -> None:
    graph = fx.Graph()
    gradients = []
    for place, elements in enumerate((40, 40, 10, 10, 1)):
        built = graph.placeholder(f"gradient{place}")
        built.meta["val"] = torch.empty(elements, dtype=torch.int8, device="meta")
        start = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (built, "sum", "x"))
        gradients.append(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,)))
        gradients[-1].meta["val"] = built.meta["val"]
    graph.output(tuple(gradients))
    bucket_reductions(graph, 100)
    graph.lint()
    joined = [node.args[0] for node in graph.nodes if "all_reduce" in str(node.target)]
    assert [[part.args[0].name for part in node.args[0]] for node in joined] == [
        ["gradient0", "gradient1"],
        ["gradient2", "gradient3", "gradient4"],
    ]


def test_a_bucket_holds_what_the_limit_allows_and_all_bytes_are_reduced() -> None:
    limit = 40_000
    planner = planner_of(joint_graph("gpt", batch=512), {"x": 2}, cluster=_SLOW, effort="fast")
    _, backward = halves_of(program_of(planner, planner.plan()))
    total = sum(size * n for (kind, _, size), n in collectives_of(backward).items() if kind == "all_reduce")
    bucket_reductions(backward.graph, limit)
    sizes = []
    for node in backward.graph.nodes:
        if "all_reduce" in str(node.target):
            source = node.args[0]
            parts = source.args[0] if source.target is torch.ops.aten.cat.default else [source]
            sizes.append(sum(bytes_of(part.args[0] if len(parts) > 1 else part) for part in parts))
    assert sum(sizes) == total
    assert len(sizes) > 1
    assert max(sizes) <= limit


def test_a_copy_of_a_gradient_that_is_cast_stands_behind_the_joined_reduction() -> None:
    """Two parameters of one value have one gradient, of which the second gets a copy."""
    graph = fx.Graph()

    def call(op: object, *args: object, **kwargs: object) -> fx.Node:
        node = graph.call_function(op, args, kwargs)
        node.meta["val"] = torch.empty(4)
        return node

    results = []
    for name in ("first", "second"):
        graph.placeholder(name).meta["val"] = torch.empty(4)
    for tangent in graph.find_nodes(op="placeholder"):
        gradient = call(torch.ops.aten.neg.default, tangent)
        reduced = call(collectives.all_reduce.default, gradient, "sum", "group")
        awaited = call(collectives.wait_tensor.default, reduced)
        cast = call(torch.ops.aten._to_copy.default, awaited, dtype=torch.float64)
        results += [cast, call(torch.ops.aten.clone.default, cast)]
    graph.output(tuple(results))
    bucket_reductions(graph)
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=collectives.all_reduce.default)) == 1


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
