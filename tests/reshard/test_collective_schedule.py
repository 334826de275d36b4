"""Collectives start early and are awaited late, in one order on all ranks, with the same numbers.

Gathers of parameters: joined by layers, started ahead, with the same numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from autoshard.capture.joint import JointGraph, capture
from autoshard.planner.planning_problem import Constraints
from autoshard.program.split import split
from autoshard.reshard.collective_schedule import (
    delay_stages,
    delay_waits,
    gather_ahead,
    join_gathers,
    limit_pending_reductions,
    propagate_layers,
    schedule,
    waits_of,
)
from autoshard.specs.emitter import collectives
from tests import models
from tests.planner.steps import (
    KINDS,
    every_parameter,
    flow_of,
    halves_of,
    joint_graph,
    planner_of,
    program_of,
    regather_all,
)
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.runtime.programs import locals_of, run_halves, step_on

aten = torch.ops.aten
WAIT = collectives.wait_tensor.default
SCATTER = collectives.reduce_scatter_tensor.default
GATHER = collectives.all_gather_into_tensor.default
JOINED = collectives.all_gather_into_tensor_coalesced.default
VIEWS = (aten.view.default, aten.reshape.default, aten.permute.default)


def _graph(build: Callable[[fx.Graph, fx.Node, fx.Node], object]) -> fx.Graph:
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x"), graph.placeholder("y")))
    return graph


def _names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


def _call(graph: fx.Graph, op: object, *args: object, name: str) -> fx.Node:
    return graph.create_node("call_function", op, args, name=name)  # type: ignore[arg-type]


def test_waits_and_views_of_them_move_to_their_first_user() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        start = _call(graph, collectives.all_reduce.default, x, "sum", "g", name="start")
        wait = _call(graph, WAIT, start, name="wait")
        view = _call(graph, aten.view.default, wait, [4], name="view")
        work = _call(graph, aten.neg.default, y, name="work")
        more = _call(graph, aten.neg.default, work, name="more")
        return _call(graph, aten.add.Tensor, view, more, name="total")

    graph = _graph(build)
    delay_waits(graph)
    graph.lint()
    assert _names(graph) == ["start", "work", "more", "wait", "view", "total"]


def test_joined_reductions_are_awaited_where_their_parts_are_used() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        start = _call(graph, collectives.all_reduce.default, x, "sum", "g", name="start")
        wait = _call(graph, WAIT, start, name="wait")
        parts = _call(graph, aten.split_with_sizes.default, wait, [1, 2], name="parts")
        part = _call(graph, operator.getitem, parts, 0, name="part")
        cast = graph.create_node("call_function", aten._to_copy.default, (part,), {"dtype": torch.half}, name="cast")
        return [_call(graph, aten.mul.Tensor, y, y, name="work"), cast]

    graph = _graph(build)
    delay_waits(graph)
    graph.lint()
    assert _names(graph) == ["start", "work", "wait", "parts", "part", "cast"]


def test_a_wait_that_is_needed_at_once_stays() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        start = _call(graph, collectives.all_reduce.default, x, "sum", "g", name="start")
        wait = _call(graph, WAIT, start, name="wait")
        first = _call(graph, aten.add.Tensor, wait, y, name="first")
        return _call(graph, aten.add.Tensor, first, wait, name="second")

    graph = _graph(build)
    delay_waits(graph)
    graph.lint()
    assert _names(graph) == ["start", "wait", "first", "second"]


def test_a_stage_of_a_gradient_goes_on_where_the_next_gradient_is_reduced() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        reduced = []
        for index in range(3):
            built = x = _call(graph, aten.neg.default, x, name=f"work{index}")
            for stage in ("scatter", "reduce", "gather"):
                op = {"scatter": SCATTER, "reduce": collectives.all_reduce.default, "gather": GATHER}[stage]
                built = _call(graph, op, built, 2, "g", name=f"{stage}{index}")
                built = _call(graph, WAIT, built, name=f"{stage}{index}_wait")
            reduced.append(built)
        return reduced

    graph = _graph(build)
    delay_stages(graph)
    delay_waits(graph)
    graph.lint()
    assert [name for name in _names(graph) if not name.endswith("wait")] == [
        *("work0", "scatter0"),
        *("work1", "reduce0", "scatter1"),
        *("work2", "reduce1", "gather0", "scatter2"),
        *("reduce2", "gather1"),
        "gather2",
    ]


@given(st.data())
def test_stages_stay_behind_those_that_they_go_on_with(data: st.DataObject) -> None:
    """Whatever the order in which gradients are reduced, and however many stages go on with one."""
    graph = fx.Graph()
    x, built = graph.placeholder("x"), list[fx.Node]()
    for number in range(data.draw(st.integers(2, 10))):
        source = data.draw(st.sampled_from([x, x, *built[-4:]]))
        if source is x:
            source = _call(graph, aten.neg.default, x, name=f"work{number}")
        start = _call(graph, SCATTER, source, 2, "g", name=f"scatter{number}")
        built.append(_call(graph, WAIT, start, name=f"wait{number}"))
    reduced = [wait for wait in built if not wait.users or data.draw(st.booleans())]
    graph.output(reduced)
    delay_stages(graph)
    delay_waits(graph)
    graph.lint()


def test_stages_of_what_is_used_at_once_stay() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        for index in range(2):
            first = _call(graph, WAIT, _call(graph, SCATTER, x, 2, "g", name=f"scatter{index}"), name=f"a{index}")
            second = _call(graph, WAIT, _call(graph, GATHER, first, 2, "g", name=f"gather{index}"), name=f"b{index}")
            x = _call(graph, aten.neg.default, second, name=f"work{index}")
        return x

    graph = _graph(build)
    before = _names(graph)
    delay_stages(graph)
    assert _names(graph) == before


def _reduced(graph: fx.Graph, x: fx.Node, sizes: list[int], copies: bool = False) -> list[fx.Node]:
    """Gradients of so many bytes, each reduced behind the work that makes it."""
    reduced = []
    for index, size in enumerate(sizes):
        x = _call(graph, aten.neg.default, x, name=f"work{index}")
        built = _call(graph, aten.cat.default, [x], name=f"copy{index}") if copies else x
        start = _call(graph, SCATTER, built, "sum", 2, "g", name=f"start{index}")
        reduced.append(_call(graph, WAIT, start, name=f"wait{index}"))
        for node in (x, built, start, reduced[-1]):
            node.meta["val"] = torch.empty(size, dtype=torch.int8, device="meta")
    return reduced


def test_reductions_are_awaited_before_their_inputs_have_too_many_bytes() -> None:
    graph = _graph(lambda graph, x, y: _reduced(graph, x, [40, 40, 40, 10, 10]))
    delay_waits(graph)
    limit_pending_reductions(graph, limit=70)
    graph.lint()
    assert _names(graph)[:-3] == [
        *("work0", "start0", "work1", "wait0", "start1"),
        *("work2", "wait1", "start2", "work3", "start3"),  # 40 + 10 bytes
        *("work4", "start4"),
    ]


def test_a_reduction_that_is_awaited_makes_room_before_the_next_input_is_copied() -> None:
    graph = _graph(lambda graph, x, y: _reduced(graph, x, [40, 40, 90, 40], copies=True))
    delay_waits(graph)
    limit_pending_reductions(graph, limit=50)
    graph.lint()
    assert [name for name in _names(graph) if "work" not in name] == [
        *("copy0", "start0", "wait0", "copy1", "start1", "wait1"),
        *("copy2", "start2", "wait2", "copy3", "start3", "wait3"),
    ]


def test_two_of_the_largest_reductions_are_under_way_however_many_bytes_are_allowed() -> None:
    graph = _graph(lambda graph, x, y: _reduced(graph, x, [1, 4, 4, 4]))
    delay_waits(graph)
    limit_pending_reductions(graph)
    graph.lint()
    assert [name for name in _names(graph) if "work" not in name] == [
        *("start0", "start1", "wait0", "start2", "wait1", "start3", "wait3", "wait2")
    ]


def test_reductions_whose_results_are_computed_with_stay() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        return _call(graph, aten.cat.default, _reduced(graph, x, [40, 40, 40]), name="total")

    graph = _graph(build)
    delay_waits(graph)
    before = _names(graph)
    limit_pending_reductions(graph, limit=10)
    assert _names(graph) == before


@pytest.mark.parametrize("forced", [False, True], ids=["free", "forced"])
def test_waits_of_a_real_program_stand_before_their_first_user(forced: bool) -> None:
    graph = joint_graph("gpt")
    planner = planner_of(graph, {"x": 2}, Constraints(forced=every_parameter(graph) if forced else frozenset()))
    halves = split(program_of(planner, planner.plan()), compile=False)
    assert halves.backward is not None
    distances = []
    for half in (halves.forward, halves.backward):
        order = {node: place for place, node in enumerate(half.graph.nodes)}
        for node in half.graph.nodes:
            if node.target is WAIT:
                nodes = list(half.graph.nodes)[order[node] + 1 : min(order[user] for user in node.users)]
                # Other waits for the same user, and collectives that start meanwhile, may stand between.
                assert {other.target for other in nodes} <= {WAIT, *KINDS, *VIEWS}
                distances.append(order[node] - order[node.args[0]])
    assert max(distances) > 3  # some collective does run behind compute


def test_every_rank_issues_the_same_collectives_in_the_same_order() -> None:
    sequences = []
    for _ in range(2):
        planner = planner_of(joint_graph("gpt"), {"x": 4})
        halves = split(program_of(planner, planner.plan()), compile=False)
        assert halves.backward is not None
        sequences.append(
            [
                (node.target, node.name, node.args[1:])
                for half in (halves.forward, halves.backward)
                for node in half.graph.nodes
                if node.target in KINDS
            ]
        )
    assert sequences[0] == sequences[1]
    assert sequences[0]


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


@functools.cache
def llama_graph() -> JointGraph:
    module, inputs = models.hf_llama(dtype=torch.float64)
    return capture(module, (), inputs)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"x": 2, "y": 2}], ids=str)
def test_joined_gathers_give_the_same_numbers(sizes: Mapping[str, int]) -> None:
    module, inputs = models.hf_llama(dtype=torch.float64)
    graph = llama_graph()
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
    module, inputs = models.hf_llama(layers=3)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if policy else None
    graph = capture(module, (), inputs, mp_policy=mixed)
    pinned = {name: (Shard(0),) for name in every_parameter(graph)}
    planner = planner_of(graph, {"x": 2}, Constraints(pinned=pinned))
    halves = split(program_of(planner, regather_all(planner, planner.plan())), compile=False)
    for half in halves.graphs:
        order = {node: place for place, node in enumerate(half.nodes)}
        products = [order[node] for node in half.nodes if node.target in (aten.mm.default, aten.addmm.default)]
        gathers = [node for node in half.nodes if node.target is JOINED]
        assert len(gathers) >= 3
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
