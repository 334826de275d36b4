"""Schedule of collectives: started as early and awaited as late as their data allows."""

from __future__ import annotations

import operator
from collections import deque

import torch
from torch import fx

from autoshard.reshard.bucket import gather_ahead, join_gathers, move_before, waits_of
from autoshard.specs.emitter import collectives

aten = torch.ops.aten

_WAIT = collectives.wait_tensor.default
_GATHER = collectives.all_gather_into_tensor.default
_STARTS = (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default, _GATHER)
_PASS_THROUGH = (
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    # Splits joined reductions.
    aten.split_with_sizes.default,
    operator.getitem,
    # The cast of a reduced gradient.
    aten._to_copy.default,
)
_COPY_OPS = frozenset(
    (
        *_PASS_THROUGH,
        # Joins gradients in a buffer.
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
    )
)


KEEPS_INPUT = frozenset(
    (
        _GATHER,
        collectives.all_gather_into_tensor_coalesced.default,
        collectives.reduce_scatter_tensor.default,
        collectives.all_to_all_single.default,
    )
)
"""Collectives whose input stays allocated until the result is awaited.

The work object of NCCL holds its input, which another stream reads. An all-reduce works in place on a copy, its
result.
"""

REDUCED_BYTES = 512 * 2**20
"""Most bytes of the inputs of reductions that are pending at once.

The largest matrices of a model of 8 billion parameters have gradients of 224 MiB in 32 bits. Two of them fit: one is
reduced while the next one waits, so that links are busy for as long as there are gradients.
"""


def schedule(graph: fx.Graph) -> None:
    """Join the gathers of half a program and order its collectives, in the same order on all ranks."""
    join_gathers(graph)
    delay_stages(graph)
    delay_waits(graph)
    gather_ahead(graph)
    limit_pending_reductions(graph)


def delay_stages(graph: fx.Graph) -> None:
    """Start the later stages of a gradient's reduction when the reductions of the next gradients start.

    A stage waits for the one before it, and the compute behind it waits too. By the time the next gradient is ready,
    the stage before has had time to end. The stages of the last gradients start at the end of the half.
    """
    output = graph.output_node()
    chains = _chains(graph, output)
    most = max(map(len, chains), default=0)
    # In every turn, one chain starts, the one before it starts its second stage, and so on.
    for turn in range(1, len(chains) + most - 1):
        place = chains[turn][0] if turn < len(chains) else output
        for stage in range(1, most):
            chain = chains[turn - stage] if 0 <= turn - stage < len(chains) else []
            if stage < len(chain):
                # `delay_waits` moves the waits behind their collectives again.
                place.prepend(chain[stage])


def _chains(graph: fx.Graph, output: fx.Node) -> list[list[fx.Node]]:
    """Return chains of the collectives that serve nothing but outputs, each followed by those that use its result.

    Chains are in the order of their first collectives. Several collectives that use one result follow each other.
    """
    reaches_outputs: dict[fx.Node, bool] = {output: True}

    def feeds_outputs_only(node: fx.Node) -> bool:
        """Return True if a node reaches outputs alone, through waits, views, casts and other collectives."""
        if node not in reaches_outputs:
            passes = node.target in _STARTS or _is_awaited(node)
            reaches_outputs[node] = passes and bool(node.users) and all(map(feeds_outputs_only, node.users))
        return reaches_outputs[node]

    starts = (node for target in _STARTS for node in graph.find_nodes(op="call_function", target=target))
    chains: list[list[fx.Node]] = []
    chain_of: dict[fx.Node | None, list[fx.Node]] = {}
    for node in sorted(filter(feeds_outputs_only, starts)):
        chain = chain_of.get(_source_collective(node.args[0]))
        if chain is None:
            chains.append(chain := [])
        chain.append(node)
        chain_of[node] = chain
    return chains


def delay_waits(graph: fx.Graph) -> None:
    """Move every wait, and the views and casts behind it, to just before its first user."""
    for node in reversed(list(graph.nodes)):
        if _is_awaited(node) and node.users:
            # Nodes compare by their present places, moved ones too.
            min(node.users).prepend(node)


def _is_awaited(node: fx.Node) -> bool:
    """Return True if the node is a wait, or a view or a cast of one."""
    return _source_collective(node) is not None


def _source_collective(node: object) -> fx.Node | None:
    """Return the collective whose result the node awaits, views or casts; None for other nodes."""
    while isinstance(node, fx.Node) and (node.target is _WAIT or node.target in _PASS_THROUGH):
        if node.target is _WAIT:
            return node.all_input_nodes[0]
        node = node.args[0]
    return None


def limit_pending_reductions(graph: fx.Graph, limit: int = REDUCED_BYTES) -> None:
    """Await the oldest reductions of gradients where the inputs of the pending ones would exceed `limit` bytes.

    A wait stands before the next reduction and before the copies that make its input. The limit is at most twice the
    largest input. An input larger than the limit is pending alone.
    """
    # Only reductions whose input NCCL keeps: that of an all-reduce is its result, and lives on in any case.
    late = {start for chain in _chains(graph, graph.output_node()) for start in chain if start.target in KEEPS_INPUT}
    limit = min(limit, 2 * max(map(_input_bytes, late), default=0))
    pending: deque[fx.Node] = deque()
    for node in sorted({*late, *(wait for start in late for wait in waits_of(start))}):
        if node.target is _WAIT:
            # Its wait has not moved to an earlier place.
            if node.all_input_nodes[0] in pending:
                pending.remove(node.all_input_nodes[0])
        else:
            while pending and sum(map(_input_bytes, (*pending, node))) > limit:
                for wait in waits_of(pending.popleft()):
                    move_before(wait, _place_before(node))
            pending.append(node)


def _input_bytes(start: fx.Node) -> int:
    value: torch.Tensor = start.all_input_nodes[0].meta["val"]
    return int(value.numel()) * value.element_size()


def _place_before(start: fx.Node) -> fx.Node:
    """Return the first of the casts and copies that stand right before a collective and make its input."""
    place = start
    needed = set(start.all_input_nodes)
    while place.prev in needed and place.prev.target in _COPY_OPS:
        place = place.prev
        needed.update(place.all_input_nodes)
    return place
