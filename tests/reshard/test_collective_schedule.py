"""Collectives start early and are awaited late, in one order on all ranks, with the same numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autoshard.planner.planning_problem import Constraints
from autoshard.program.split import split
from autoshard.reshard.collective_schedule import delay_stages, delay_waits, limit_pending_reductions
from autoshard.specs.emitter import collectives
from tests.planner.steps import KINDS, every_parameter, joint_graph, planner_of, program_of

aten = torch.ops.aten
WAIT = collectives.wait_tensor.default
SCATTER = collectives.reduce_scatter_tensor.default
GATHER = collectives.all_gather_into_tensor.default
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
