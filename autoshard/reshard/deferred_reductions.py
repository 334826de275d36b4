"""Reductions taken out of a backward half, so that one serves the gradients of many runs of it, added up.

The last of these runs adds its own to the sums of the others, and reduces them behind its compute, as every run would.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from autoshard.reshard.bucket import bucket_reductions, is_border
from autoshard.reshard.collective_schedule import schedule
from autoshard.specs.emitter import collectives

aten = torch.ops.aten

DeferredReduction = Literal["step", "microbatch"]
"""When gradients are reduced that are smaller then: once per step, or with every microbatch. The others, which take no
more room before, are reduced once per step in either case."""

_WAIT = collectives.wait_tensor.default
_REDUCTIONS = (collectives.all_reduce.default, collectives.reduce_scatter_tensor.default)
_LINEAR = (
    _WAIT,
    collectives.all_gather_into_tensor.default,
    collectives.all_to_all_single.default,
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.div.Scalar,
)
"""What a gradient may pass through between its reductions and behind them: linear, so that sums may pass too."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingReductions:
    """What a graph leaves to be done of some of its results.

    Attributes:
        graph: takes sums of these results, and returns what the graph returned in their places before.
        places: of these among the graph's results.
    """

    graph: fx.Graph
    places: tuple[int, ...]

    def scheduled_graph(self) -> fx.Graph:
        """The reductions, joined and scheduled as those of a backward half are."""
        joined = fx.Graph()
        joined.output(joined.graph_copy(self.graph, {}))
        return _bucket_and_schedule(joined)


def take_reductions(graph: fx.Graph, places: Collection[int], reduced: DeferredReduction) -> PendingReductions | None:
    """Let a graph return gradients as they are made, without their reductions.

    Args:
        graph: the backward half; it is changed.
        places: among its results, those that may be returned unreduced.
        reduced: when those are reduced that are smaller then.

    Returns:
        The reductions; None if nothing is to be reduced later.
    """
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    found: dict[int, list[fx.Node]] = {}
    for place in sorted(places):
        chain = _reductions(results[place]) if isinstance(results[place], fx.Node) else []
        if chain and (reduced == "step" or _elements(results[place]) >= _elements(_chain_input(chain))):
            found[place] = chain
    if not found:
        return None
    later = fx.Graph()
    sums = {place: later.placeholder(f"sum_{place}") for place in found}
    made: list[fx.Node] = []
    for place, chain in found.items():
        results[place] = source = _chain_input(chain)
        sums[place].meta = dict(source.meta)
        made.append(_copy_chain(later, chain, sums[place]))
    later.output(tuple(made))
    output.args = (tuple(results),)
    graph.eliminate_dead_code(is_impure_node=is_border)
    return PendingReductions(later, tuple(found))


def reduce_with_sums(graph: fx.Graph, unreduced: PendingReductions, places: Sequence[int]) -> fx.Graph:
    """A graph as it runs last: what it makes is added to sums of what it made before, and reduced at once.

    Args:
        graph: returns gradients unreduced.
        unreduced: their reductions.
        places: of these gradients among the graph's results.

    Returns:
        A graph that takes the sums too, behind all else, and returns reduced gradients. The reductions are joined, and
        run behind the compute that is left.
    """
    last = fx.Graph()
    results: list[fx.Node] = list(last.graph_copy(graph, {}))  # type: ignore[arg-type]
    *_, border = last.find_nodes(op="placeholder")
    sums = unreduced.graph.find_nodes(op="placeholder")
    taken: list[fx.Node] = []
    for node in sums:
        with last.inserting_after(border):
            border = last.node_copy(node)
        taken.append(border)
    output = unreduced.graph.output_node()
    for place, before, end in zip(places, taken, output.args[0], strict=True):  # type: ignore[arg-type]
        source = results[place]
        with last.inserting_after(border if source.op == "placeholder" else source):
            total = last.call_function(aten.add.Tensor, (before, source))
        total.meta = dict(source.meta)
        results[place] = _copy_chain(last, _back_to_sum(end), total)
    last.output(tuple(results))
    return _bucket_and_schedule(last)


def _copy_chain(graph: fx.Graph, chain: Sequence[fx.Node], node: fx.Node) -> fx.Node:
    """Calls that take each other's result, in another graph, right behind a node that the first of them takes."""
    for call in chain:
        with graph.inserting_after(node):
            node = graph.node_copy(call, lambda _, node=node: node)  # type: ignore[misc]
    return node


def _back_to_sum(end: fx.Node) -> list[fx.Node]:
    """The calls from a sum to its reduced gradient."""
    chain = []
    while end.op != "placeholder":
        chain.append(end)
        end = end.all_input_nodes[0]
    return chain[::-1]


def _bucket_and_schedule(graph: fx.Graph) -> fx.Graph:
    bucket_reductions(graph)
    schedule(graph)
    graph.lint()
    return graph


def _reductions(result: fx.Node) -> list[fx.Node]:
    """The calls from a gradient's first sum over ranks on that lead to a result and to nothing else, in their order."""
    chain: list[fx.Node] = []
    first = 0  # how many calls there are from the first reduction on
    node = result
    while len(node.users) == 1 and len(node.all_input_nodes) == 1:
        if node.target in _REDUCTIONS:
            if node.args[1] != "sum":
                break
            first = len(chain) + 1
        elif node.target not in _LINEAR:
            break
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[:first][::-1]


def _chain_input(chain: Sequence[fx.Node]) -> fx.Node:
    """What the first call of a chain takes."""
    return chain[0].all_input_nodes[0]


def _elements(node: fx.Node) -> int:
    return int(node.meta["val"].numel())
