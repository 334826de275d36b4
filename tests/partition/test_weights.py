"""The backward half in two parts: the same results, nothing twice, and nothing early that can wait."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.partition.weights import part


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
    first, second = part(whole, (2,))
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
    first, second = part(whole, ())
    assert first.graph() == ()
    results = second.graph(*(given[place] for place in second.takes))
    assert all(torch.equal(value, expected) for value, expected in zip(results, whole(*given), strict=True))
