"""What the backward half needs of a parameter starts at the parameter, not at a view that the forward half took."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoshard.capture.backward_views import refresh_views
from tests.planner.steps import joint_graph

aten = torch.ops.aten


def _tagged(graph: fx.Graph, phase: str, op: object, *args: object) -> fx.Node:
    node = graph.call_function(op, args)  # type: ignore[arg-type]
    node.meta["partitioner_tag"] = f"is_{phase}"
    return node


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def test_chains_of_views_are_taken_anew_once() -> None:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    turned = _tagged(graph, "forward", aten.t.default, weight)
    wide = _tagged(graph, "forward", aten.unsqueeze.default, turned, 0)
    forward = _tagged(graph, "forward", aten.mul.Tensor, x, wide)
    first = _tagged(graph, "backward", aten.mul.Tensor, forward, wide)
    second = _tagged(graph, "backward", aten.add.Tensor, first, turned)
    graph.output((forward, second, _tagged(graph, "backward", aten.add.Tensor, second, wide)))
    refresh_views(graph, [weight], _is_backward)
    graph.lint()
    assert set(turned.users) == {wide}
    assert set(wide.users) == {forward}
    views = [node for node in graph.nodes if node.target in (aten.t.default, aten.unsqueeze.default)]
    assert len(views) == 4
    assert [_is_backward(view) for view in views] == [False, False, True, True]
    assert views[3].args[0] is views[2]
    assert views[2].args[0] is weight


def test_views_of_what_is_no_parameter_and_other_operators_stay() -> None:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    view = _tagged(graph, "forward", aten.t.default, x)
    work = _tagged(graph, "forward", aten.neg.default, weight)
    graph.output(_tagged(graph, "backward", aten.add.Tensor, view, work))
    before = str(graph)
    refresh_views(graph, [weight], _is_backward)
    assert str(graph) == before


@pytest.mark.parametrize("name", ["mlp", "gpt", "hf_llama"])
def test_no_view_of_a_parameter_is_read_by_both_halves(name: str) -> None:
    graph = joint_graph(name)
    views = {source.node for source in graph.inputs if source.kind == "parameter"}
    turned = 0
    for node in graph.graph.nodes:
        if node.target in (aten.t.default, aten.permute.default, aten.view.default) and node.args[0] in views:
            views.add(node)
            assert {graph.phase(user) for user in node.users} == {graph.phase(node)}
            turned += 1
    assert turned


def test_no_view_is_left_without_a_use() -> None:
    assert all(node.users for node in joint_graph("gpt").graph.nodes if node.op == "call_function")
