"""Reductions deferred from the backward half, so that one reduction serves the summed gradients of many runs.

The last run adds its gradients to the sums of the others. Its compute hides the reductions, as in a single run.
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
"""The time to reduce gradients that are smaller once reduced: once per step, or with every microbatch.

Other gradients are reduced once per step in either case: they take no more memory before.
"""

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
"""Operators that may follow a gradient's first reduction: linear, so that a sum of gradients may pass instead."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingReductions:
    """Reductions of some results of a graph, to be run later.

    Attributes:
        graph: takes sums of these results and returns them reduced.
        places: positions of these among the graph's results.
    """

    graph: fx.Graph
    places: tuple[int, ...]

    def scheduled_graph(self) -> fx.Graph:
        """Return a copy of the graph with joined and scheduled reductions."""
        joined = fx.Graph()
        joined.output(joined.graph_copy(self.graph, {}))
        return _bucket_and_schedule(joined)


def take_reductions(graph: fx.Graph, places: Collection[int], reduced: DeferredReduction) -> PendingReductions | None:
    """Remove reductions of gradients from a graph, which then returns these gradients unreduced.

    Args:
        graph: the backward half, changed in place.
        places: positions of the results that may be returned unreduced.
        reduced: the time to reduce gradients that are smaller once reduced.

    Returns:
        The removed reductions; None if there are none.
    """
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    chains: dict[int, list[fx.Node]] = {}
    for place in sorted(places):
        chain = _reductions(results[place]) if isinstance(results[place], fx.Node) else []
        if chain and (reduced == "step" or _elements(results[place]) >= _elements(chain[0].all_input_nodes[0])):
            chains[place] = chain
    if not chains:
        return None
    # A graph of its own: it runs once, on sums, while the backward half runs with every microbatch.
    later = fx.Graph()
    sums = {place: later.placeholder(f"sum_{place}") for place in chains}
    reductions: list[fx.Node] = []
    for place, chain in chains.items():
        results[place] = source = chain[0].all_input_nodes[0]
        sums[place].meta = dict(source.meta)
        reductions.append(_copy_chain(later, chain, sums[place]))
    later.output(tuple(reductions))
    output.args = (tuple(results),)
    # The reductions.
    graph.eliminate_dead_code(is_impure_node=is_border)
    return PendingReductions(later, tuple(chains))


def reduce_with_sums(graph: fx.Graph, unreduced: PendingReductions, places: Sequence[int]) -> fx.Graph:
    """Return the graph of the last run: it adds its gradients to the sums of earlier runs and reduces them.

    Args:
        graph: returns gradients unreduced.
        unreduced: the reductions.
        places: positions of these gradients among the graph's results.

    Returns:
        A graph that takes the sums behind all other inputs and returns reduced gradients. The reductions are joined
        and overlap the remaining compute.
    """
    last = fx.Graph()
    results: list[fx.Node] = list(last.graph_copy(graph, {}))  # type: ignore[arg-type]
    *_, border = last.find_nodes(op="placeholder")
    sums = unreduced.graph.find_nodes(op="placeholder")
    inputs: list[fx.Node] = []
    for node in sums:
        with last.inserting_after(border):
            border = last.node_copy(node)
        inputs.append(border)
    output = unreduced.graph.output_node()
    for place, before, end in zip(places, inputs, output.args[0], strict=True):  # type: ignore[arg-type]
        source = results[place]
        chain = []
        while end.op != "placeholder":
            chain.append(end)
            end = end.all_input_nodes[0]
        # Right behind the gradient, so that the reduction starts as soon as it exists; never between placeholders.
        with last.inserting_after(border if source.op == "placeholder" else source):
            total = last.call_function(aten.add.Tensor, (before, source))
        total.meta = dict(source.meta)
        results[place] = _copy_chain(last, chain[::-1], total)
    last.output(tuple(results))
    return _bucket_and_schedule(last)


def _copy_chain(graph: fx.Graph, chain: Sequence[fx.Node], node: fx.Node) -> fx.Node:
    """Copy a chain of calls to another graph, behind `node`, the operand of the first; return the last copy."""
    for call in chain:
        with graph.inserting_after(node):
            node = graph.node_copy(call, lambda _, node=node: node)  # type: ignore[misc]
    return node


def _bucket_and_schedule(graph: fx.Graph) -> fx.Graph:
    bucket_reductions(graph)
    schedule(graph)
    graph.lint()
    return graph


def _reductions(result: fx.Node) -> list[fx.Node]:
    """Return the calls that lead from a gradient's first sum over ranks to a result, and to nothing else, in order."""
    chain: list[fx.Node] = []
    # Length of the chain from the first reduction on.
    first = 0
    node = result
    while len(node.users) == 1 and len(node.all_input_nodes) == 1:
        if node.target in _REDUCTIONS:
            if node.args[1] != "sum":
                # Sums may not pass through other reductions, such as a maximum.
                break
            first = len(chain) + 1
        elif node.target not in _LINEAR:
            break
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[:first][::-1]


def _elements(node: fx.Node) -> int:
    return int(node.meta["val"].numel())
