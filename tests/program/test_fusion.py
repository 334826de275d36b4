"""What kernels of a compiled program compute where they read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.program.fusion import FusedResults, join, keep_joins, maker

aten, collectives = torch.ops.aten, torch.ops._c10d_functional


def _graph(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.Graph:
    graph: fx.Graph = make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes)).graph
    graph.eliminate_dead_code()
    return graph


def _names(nodes: Any) -> set[str]:
    return {node.name for node in nodes}


def _gathered(x: Tensor) -> Tensor:
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x, 2, "0"))


def test_a_chain_is_made_once() -> None:
    graph = _graph(lambda x, w: (x * 2 + 1).relu() @ w, (4, 4), (4, 4))
    fused = FusedResults(graph)
    assert _names(fused.unmade) == {"mul", "add"}
    (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
    assert _names(fused.read_by(relu)) == {"x_1"}


def test_views_and_sums_end_no_chain() -> None:
    graph = _graph(lambda x: (x.exp().t().sum(0), x.exp().view(16).softmax(0) * 2), (4, 4))
    assert _names(FusedResults(graph).unmade) == {"exp", "exp_1", "_softmax"}


@pytest.mark.parametrize("count", [8, 9])
def test_a_sum_of_many_tensors_is_made_in_parts(count: int) -> None:
    graph = _graph(lambda *xs: sum(xs[1:], xs[0]).relu(), *[(4,)] * count)
    unmade = FusedResults(graph).unmade
    assert len(unmade) == (count - 1 if count <= 8 else count - 2)


@pytest.mark.parametrize(("count", "made"), [(4, False), (5, True)])
def test_what_several_operators_read_is_made_of_few_tensors(count: int, made: bool) -> None:
    def step(*xs: Tensor) -> tuple[Tensor, Tensor]:
        total = sum(xs[1:], xs[0])
        return total.relu(), total.tanh()

    graph = _graph(step, *[(4,)] * count)
    unmade = _names(FusedResults(graph).unmade)
    last = [node.name for node in graph.nodes if node.target is aten.add.Tensor][-1]
    assert (last not in unmade) == made


def test_a_collective_gets_a_copy() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return _gathered(doubled), doubled.sum()

    graph = _graph(step, (4,))
    fused = FusedResults(graph)
    assert not fused.unmade
    (total,) = graph.find_nodes(op="call_function", target=aten.sum.default)
    (gather,) = graph.find_nodes(op="call_function", target=collectives.all_gather_into_tensor.default)
    assert _names(fused.read_by(total)) == {"x_1"}
    assert _names(fused.read_by(gather)) == {"mul"}


def test_a_product_is_made_with_the_matrix_that_is_added_to_it() -> None:
    graph = _graph(lambda x, w, y: (x @ w + y.relu()).relu() @ w, (4, 4), (4, 4), (4, 4))
    fused = FusedResults(graph)
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    # The sum is what a call of its own makes, of operands that exist.
    assert _names(fused.unmade) >= {"mm"}
    assert add not in fused.unmade
    assert {"x_1", "w_1"} <= _names(fused.read_by(add))


def test_one_of_several_results_is_made_where_it_is_read() -> None:
    graph = _graph(lambda x, w: torch.native_layer_norm(x, [4], w, w, 1e-5)[0].relu() @ w.view(4, 1), (4, 4), (4,))
    (result,) = FusedResults(graph).unmade
    assert maker(result).target is aten.native_layer_norm.default


def test_parts_for_a_collective_are_joined_when_all_are_made() -> None:
    graph = _graph(lambda x, y: (_gathered(torch.cat([x, y]).view(2, 4)), torch.cat([x, x])), (4,), (4,))
    keep_joins(graph)
    assert [node.target for node in graph.nodes if node.target in (join, aten.cat.default)] == [join, aten.cat.default]
    assert torch.equal(join([torch.ones(2), torch.zeros(1)], 0), torch.tensor([1.0, 1.0, 0.0]))
