"""The backward half in two parts: the same results, nothing twice, and nothing early that can wait."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.program.graph_parts import split_at_waits, split_by_results


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
