"""The two halves: what they take and return, and that nothing is done twice.

The backward half in two parts: the same results, nothing twice, and nothing early that can wait.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.capture import capture
from autoshard.program.split import split, split_at_waits, split_by_results
from tests.models.routed import sorted_experts
from tests.planner.steps import KINDS, joint_graph, planner_of, program_of


def _outputs(graph: object) -> list[object]:
    return list(next(iter(graph.find_nodes(op="output"))).args[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_forward_half_saves_what_the_backward_half_takes(name: str) -> None:
    planner = planner_of(joint_graph(name), {"x": 2})
    step = program_of(planner, planner.plan())
    halves = split(step, compile=False)
    assert halves.backward is not None
    placeholders = list(halves.backward.graph.find_nodes(op="placeholder"))
    assert len(_outputs(halves.forward.graph)) == len(step.forward_outputs) + halves.saved
    assert len(placeholders) == halves.saved + len(step.tangents)
    assert all(node.users for node in placeholders)
    assert len(_outputs(halves.backward.graph)) == sum(border.kind == "gradient" for border in step.outputs)
    assert not halves.draws


def test_no_operator_and_no_collective_runs_in_both_halves() -> None:
    planner = planner_of(joint_graph("gpt"), {"x": 2})
    halves = split(program_of(planner, planner.plan()), compile=False)
    assert halves.backward is not None
    names = [
        {node.name for node in half.graph.nodes if node.op == "call_function" and node.target in KINDS}
        for half in (halves.forward, halves.backward)
    ]
    assert names[0]
    assert names[1]
    assert not names[0] & names[1]


def test_a_forward_pass_has_one_half_and_saves_nothing() -> None:
    planner = planner_of(joint_graph("mlp", grad=False), {"x": 2})
    halves = split(program_of(planner, planner.plan()), compile=False)
    assert halves.backward is None
    assert halves.saved == 0


def test_programs_with_dropout_draw() -> None:
    planner = planner_of(joint_graph("gpt", dropout=0.5), {"x": 2})
    assert split(program_of(planner, planner.plan()), compile=False).draws


def test_a_program_whose_sizes_the_data_decides_is_not_compiled() -> None:
    module, inputs = sorted_experts()
    planner = planner_of(capture(module, (), inputs), {"ep": 2})
    step = program_of(planner, planner.plan())
    with pytest.warns(UserWarning, match="compile=True has no effect"):
        halves = split(step, compile=True)
    assert isinstance(halves.forward, fx.GraphModule)


def backward(
    x: torch.Tensor, weight: torch.Tensor, unused: torch.Tensor, tangent: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Of two branches that share a product; one gradient is the tangent itself, one is made on the way to another."""
    left, right = torch.unbind(tangent @ weight.t(), 0)
    of_bias = left + right
    of_input = of_bias.tanh() * 2
    of_weight = torch.einsum("bij,bik->jk", x, tangent)
    return tangent, of_weight, of_input, of_bias, right.exp()


def test_parts_make_what_the_whole_makes() -> None:
    given = [torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(1), torch.randn(2, 3, 4)]
    whole = make_fx(backward)(*given)
    expected = whole(*given)
    first, second = split_by_results(whole, (2,))
    assert first.makes == (2,)
    assert second.makes == (0, 1, 3, 4)
    assert first.takes == (1, 3)
    assert second.takes == (0, 3)
    made = first.graph(*(given[place] for place in first.takes))
    handed = made[len(first.makes) :]
    others = second.graph(*(given[place] for place in second.takes), *handed)
    for places, values in ((first.makes, made), (second.makes, others)):
        for place, value in zip(places, values, strict=False):
            assert torch.equal(value, expected[place])
    calls = [
        {node.name for node in graph.graph.nodes if node.op == "call_function"}
        for graph in (whole, first.graph, second.graph)
    ]
    assert calls[1] | calls[2] == calls[0]
    assert calls[1].isdisjoint(calls[2])
    assert {"exp", "bmm"}.isdisjoint(calls[1])


def test_a_part_may_be_empty() -> None:
    given = [torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(1), torch.randn(2, 3, 4)]
    whole = make_fx(backward)(*given)
    first, second = split_by_results(whole, ())
    assert first.graph() == ()
    results = second.graph(*(given[place] for place in second.takes))
    assert all(torch.equal(value, expected) for value, expected in zip(results, whole(*given), strict=True))


def test_what_shares_a_collective_with_another_result_is_awaited_with_it() -> None:
    graph = fx.Graph()
    reduce, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
    first, second = (
        graph.call_function(wait, (graph.call_function(reduce, (graph.placeholder(name), "sum", "x")),))
        for name in ("first", "second")
    )
    alone = graph.call_function(torch.ops.aten.view.default, (first, [2, 2]))
    parted = graph.call_function(torch.ops.aten.split_with_sizes.default, (second, [1, 3]))
    pieces = [graph.call_function(operator.getitem, (parted, place)) for place in range(2)]
    graph.output((alone, *pieces))
    whole = fx.GraphModule(nn.Module(), graph)
    some, rest = split_at_waits(whole, [0, 1])
    assert (some.makes, rest.makes) == ((1, 2), (0,))
    started, everything = split_at_waits(whole, [0, 1, 2])
    assert (started.makes, everything.makes) == ((), (0, 1, 2))
    waits = [[node.target for node in one.graph.graph.nodes].count(wait) for one in (some, rest, started, everything)]
    assert waits == [1, 1, 0, 2]
    assert started.takes == (0, 1)
    assert everything.takes == ()
