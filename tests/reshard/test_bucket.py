"""Reductions joined in buckets: fewer collectives, equal numbers.

Gathers of parameters: joined by layers, started ahead, with the same numbers.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Link
from autoshard.planner.planning_problem import Constraints
from autoshard.program.split import split
from autoshard.reshard.bucket import bucket_reductions, gather_ahead, join_gathers, propagate_layers, waits_of
from autoshard.reshard.collective_schedule import schedule
from autoshard.specs.emitter import collectives
from tests import models
from tests.planner.steps import (
    KINDS,
    bytes_of,
    collectives_of,
    every_parameter,
    flow_of,
    halves_of,
    joint_graph,
    links,
    planner_of,
    program_of,
    regather_all,
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


aten = torch.ops.aten
WAIT = collectives.wait_tensor.default
GATHER = collectives.all_gather_into_tensor.default
JOINED = collectives.all_gather_into_tensor_coalesced.default


class _Program:
    """A graph that gathers parameters and works with each in turn; a parameter has as many bytes as its name says."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.total = self._told(self.graph.placeholder("x"), 8)

    def _told(self, node: fx.Node, size: int) -> fx.Node:
        node.meta["val"] = torch.empty(size, dtype=torch.int8, device="meta")
        return node

    def parameter(self, name: str, size: int = 8, layer: str | None = None) -> fx.Node:
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self._told(self.graph.placeholder(name), size)
        if layer is not None:
            node.meta["layer"] = layer
        return node

    def call(self, op: object, *args: object, name: str, size: int = 8) -> fx.Node:
        return self._told(self.graph.create_node("call_function", op, args, name=name), size)  # type: ignore[arg-type]

    def gathered(self, source: fx.Node, name: str, size: int = 8, group: str = "g") -> fx.Node:
        start = self.call(GATHER, source, 2, group, name=f"start{name}", size=size)
        return self.call(WAIT, start, name=f"wait{name}", size=size)

    def used(self, node: fx.Node, name: str) -> None:
        self.total = self.call(aten.add.Tensor, self.total, node, name=f"use{name}")

    def names(self, *kinds: str) -> list[str]:
        """Names of the calls, or of those whose names begin so."""
        self.graph.lint()
        result = [node.name for node in self.graph.nodes if node.op == "call_function"]
        return [name for name in result if name.startswith(kinds)] if kinds else result

    def done(self) -> fx.Graph:
        self.graph.output(self.total)
        return self.graph


def _in_turn(sizes: Sequence[int]) -> _Program:
    program = _Program()
    for index, size in enumerate(sizes):
        program.used(program.gathered(program.parameter(f"p{index}"), f"{index}", size), f"{index}")
    program.done()
    return program


def test_gathers_start_one_gather_early() -> None:
    program = _in_turn([8, 8, 8])
    gather_ahead(program.graph)
    assert program.names() == [
        *("start0", "start1", "wait0", "use0"),
        *("start2", "wait1", "use1"),
        *("wait2", "use2"),
    ]


def test_small_gathers_do_not_part_large_ones() -> None:
    program = _in_turn([8, 1, 8, 1, 8])
    gather_ahead(program.graph)
    assert program.names("start", "wait") == [
        *("start0", "start1", "start2", "wait0"),
        *("wait1", "start3", "start4", "wait2"),
        *("wait3", "wait4"),
    ]


def test_no_further_gather_starts_behind_half_of_the_bytes_allowed() -> None:
    program = _in_turn([8, 1, 1, 1, 1])
    gather_ahead(program.graph, limit=4)
    assert program.names("start", "wait") == [
        *("start0", "start1", "start2", "wait0", "start3", "wait1", "start4", "wait2"),
        *("wait3", "wait4"),
    ]


def test_gathers_run_ahead_through_casts_views_and_pads() -> None:
    program = _Program()
    for index in range(2):
        cast = program.call(aten._to_copy.default, program.parameter(f"p{index}"), name=f"cast{index}")
        view = program.call(aten.view.default, cast, [2, 4], name=f"view{index}")
        padded = program.call(aten.constant_pad_nd.default, view, [0, 1], name=f"pad{index}")
        program.used(program.gathered(padded, f"{index}"), f"{index}")
    gather_ahead(program.done())
    assert program.names() == [
        *("cast0", "view0", "pad0", "start0"),
        *("cast1", "view1", "pad1", "start1"),
        *("wait0", "use0", "wait1", "use1"),
    ]


def test_what_is_gathered_over_two_axes_goes_through_the_first_a_turn_earlier() -> None:
    program = _Program()
    for index in range(4):
        first = program.gathered(program.parameter(f"p{index}"), f"{index}x", group="x")
        program.used(program.gathered(first, f"{index}y", group="y"), f"{index}")
    gather_ahead(program.done())
    starts = program.names("start", "use")
    for index in range(1, 4):
        assert starts.index(f"start{index}y") < starts.index(f"use{index - 1}") < starts.index(f"use{index}")
    for index in range(2, 4):
        assert starts.index(f"start{index}x") < starts.index(f"use{index - 2}")


def test_gathers_of_one_group_do_not_hold_back_those_of_another() -> None:
    program = _Program()
    for index in range(3):
        for group in "xy":
            name = f"{index}{group}"
            program.used(program.gathered(program.parameter(f"p{name}"), name, group=group), name)
    gather_ahead(program.done())
    order = program.names("start", "use")
    for index in range(1, 3):
        for group in "xy":
            assert order.index(f"start{index}{group}") < order.index(f"use{index - 1}{group}")


def test_gathers_of_activations_stay_where_their_data_is_made() -> None:
    program = _Program()
    for index in range(2):
        program.total = program.call(aten.neg.default, program.total, name=f"work{index}")
        program.total = program.gathered(program.total, f"{index}")
    program.done()
    before = program.names()
    schedule(program.graph)
    assert program.names() == before


def _layers(bytes_of: Mapping[str, Sequence[int]]) -> _Program:
    program = _Program()
    for layer, sizes in bytes_of.items():
        for index, size in enumerate(sizes):
            name = f"{layer}{index}"
            cast = program.call(aten._to_copy.default, program.parameter(f"p{name}", layer=layer), name=f"cast{name}")
            program.used(program.gathered(cast, name, size), name)
    program.done()
    return program


def _joined(program: _Program) -> list[list[str]]:
    """What every gather gathers."""
    program.graph.lint()
    return [
        [source.name for source in node.all_input_nodes]
        for node in program.graph.nodes
        if node.target in (GATHER, JOINED)
    ]


def test_parameters_of_a_layer_are_gathered_together() -> None:
    program = _layers({"a": [1, 1, 1], "b": [1, 1], "c": [1]})
    join_gathers(program.graph)
    assert _joined(program) == [["casta0", "casta1", "casta2"], ["castb0", "castb1"], ["castc0"]]
    (first, *_) = program.graph.find_nodes(op="call_function", target=JOINED)
    parts = sorted(first.users, key=lambda node: node.args[1])
    assert [part.target for part in parts] == [operator.getitem] * 3
    assert [wait.name for wait in waits_of(first)] == ["waita0", "waita1", "waita2"]


def test_a_joined_gather_makes_no_more_bytes_than_allowed() -> None:
    program = _layers({"a": [3, 3, 3, 9, 1]})
    join_gathers(program.graph, limit=7)
    assert _joined(program) == [["casta0", "casta1"], ["casta2"], ["casta3"], ["casta4"]]


def test_gathers_of_other_groups_and_dtypes_are_not_joined() -> None:
    program = _Program()
    for index, (group, dtype) in enumerate(
        [("x", torch.half), ("y", torch.half), ("x", torch.float), ("x", torch.half), ("x", torch.float)]
    ):
        parameter = program.parameter(f"p{index}", layer="a")
        parameter.meta["val"] = parameter.meta["val"].to(dtype)
        program.used(program.gathered(parameter, f"{index}", group=group), f"{index}")
    join_gathers(program.done())
    assert _joined(program) == [["p0", "p3"], ["p1"], ["p2", "p4"]]


def test_a_layer_is_told_through_casts_and_gathers_and_no_further() -> None:
    program = _layers({"a": [1]})
    propagate_layers(program.graph)
    assert [node.name for node in program.graph.nodes if "layer" in node.meta] == ["pa0", "casta0", "starta0", "waita0"]


@pytest.mark.parametrize("sizes", [{"x": 2}, {"x": 2, "y": 2}], ids=str)
def test_joined_gathers_give_the_same_numbers(sizes: Mapping[str, int]) -> None:
    module, inputs = models.hf_llama(dtype=torch.float64)
    graph = capture(module, (), inputs)
    pinned = {name: (Shard(0),) * len(sizes) for name in every_parameter(graph)}
    with simulated_mesh(**sizes) as mesh:
        step = step_on(graph, mesh, Constraints(pinned=pinned))
        tensors = locals_of(step, module, inputs, mesh)
        propagate_layers(step.graph_module.graph)
        halves = halves_of(step)
        before = run_halves(halves, step, tensors)
        count = sum(len(half.graph.find_nodes(op="call_function", target=GATHER)) for half in halves)
        for half in halves:
            schedule(half.graph)
            half.graph.lint()
            half.recompile()
        after = run_halves(halves, step, tensors)
        for one, other in zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True):
            for ours, expected in zip(per_rank(one, mesh).values(), per_rank(other, mesh).values(), strict=True):
                assert torch.equal(ours, expected)
    left = sum(node.target in (GATHER, JOINED) for half in halves for node in half.graph.nodes)
    assert left < count - 5 * len(sizes)


@pytest.mark.parametrize("policy", [False, True], ids=["float32", "bfloat16"])
def test_all_gathers_of_parameters_but_the_first_run_behind_products(policy: bool) -> None:
    module, inputs = models.hf_llama(layers=4)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if policy else None
    graph = capture(module, (), inputs, mp_policy=mixed)
    pinned = {name: (Shard(0),) for name in every_parameter(graph)}
    planner = planner_of(graph, {"x": 2}, Constraints(pinned=pinned))
    halves = split(program_of(planner, regather_all(planner, planner.plan())), compile=False)
    for half in halves.graphs:
        order = {node: place for place, node in enumerate(half.nodes)}
        products = [order[node] for node in half.nodes if node.target in (aten.mm.default, aten.addmm.default)]
        gathers = [node for node in half.nodes if node.target is JOINED]
        assert len(gathers) >= 4
        for gather in gathers[1:]:
            wait = min(map(order.__getitem__, waits_of(gather)))
            assert any(order[gather] < product < wait for product in products)


def test_the_planned_program_joins_as_many_gathers_as_the_real_one() -> None:
    graph = joint_graph("hf_llama")
    planner = planner_of(graph, {"x": 4}, Constraints(forced=every_parameter(graph)))
    plan = regather_all(planner, planner.plan())
    halves = split(program_of(planner, plan), compile=False)
    predicted = planner.program(flow_of(planner, plan))
    for half, ours in zip(halves.graphs, (predicted.forward.graph, predicted.backward.graph), strict=True):
        assert _numbers_gathered(half) == _numbers_gathered(ours)


def _numbers_gathered(graph: fx.Graph) -> list[int]:
    """How many tensors every gather takes."""
    return [len(node.all_input_nodes) for node in graph.nodes if node.target in (GATHER, JOINED)]
