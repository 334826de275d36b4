"""When collectives run: started as early and awaited as late as their data allows."""

from __future__ import annotations

import operator
from collections import deque

import torch
from torch import fx

from autoshard.reshard.gathers import gather_ahead, join_gathers, move_before, waits_of
from autoshard.specs.emitter import collectives

aten = torch.ops.aten

_WAIT = collectives.wait_tensor.default
_GATHER = collectives.all_gather_into_tensor.default
_STARTS = (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default, _GATHER)
_PASS_THROUGH = (
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.split_with_sizes.default,  # takes joined reductions apart
    operator.getitem,
    aten._to_copy.default,  # the cast of what was reduced
)
_COPY_OPS = frozenset(
    (
        *_PASS_THROUGH,
        aten.cat.default,  # lays gradients side by side
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
"""Collectives whose input a device holds until it awaits the result, whether or not others read it.

NCCL's work holds its input, which another stream reads. An all-reduce works in place on a copy: on its result.
"""

REDUCED_BYTES = 512 * 2**20
"""Bytes of the inputs of reductions that are under way at once.

Two gradients of the largest matrices of a model of 8 billion parameters in 32 bits, 224 MiB each: one is reduced while
the next one waits for it, so that links have something to do for as long as there are gradients.
"""


def schedule(graph: fx.Graph) -> None:
    """Join the gathers of half a program, and order its collectives, which stay in one order on all ranks."""
    join_gathers(graph)
    delay_stages(graph)
    delay_waits(graph)
    gather_ahead(graph)
    limit_pending_reductions(graph)


def delay_stages(graph: fx.Graph) -> None:
    """Start the later collectives of gradients that are reduced in stages when the next gradients' are started.

    A stage waits for the one before it, and what is computed behind it waits too. Where the next gradient is ready to
    be reduced, the stage before has had time to end. Stages of the last gradients, behind which there are no more, are
    started at the end of the half.
    """
    output = next(iter(graph.find_nodes(op="output")))
    chains = _chains(graph, output)
    most = max(map(len, chains), default=0)
    for turn in range(1, len(chains) + most - 1):
        place = chains[turn][0] if turn < len(chains) else output
        for stage in range(1, most):
            chain = chains[turn - stage] if 0 <= turn - stage < len(chains) else []
            if stage < len(chain):
                place.prepend(chain[stage])  # `delay_waits` brings the waits behind their collectives again


def _chains(graph: fx.Graph, output: fx.Node) -> list[list[fx.Node]]:
    """The collectives that are started for nothing but outputs, each with those that go on with its result.

    They are in the order in which the first of each is started; of several that go on with one result, one follows the
    other.
    """
    known: dict[fx.Node, bool] = {output: True}

    def feeds_outputs_only(node: fx.Node) -> bool:
        """Whether a node serves nothing but outputs, by waits, views of them and other collectives."""
        if node not in known:
            passes = node.target in _STARTS or _is_awaited(node)
            known[node] = passes and bool(node.users) and all(map(feeds_outputs_only, node.users))
        return known[node]

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
    """Move every wait, and views and casts of what is awaited, to just before its first user."""
    for node in reversed(list(graph.nodes)):
        if _is_awaited(node) and node.users:
            min(node.users).prepend(node)  # nodes compare by their places, those moved before included


def _is_awaited(node: fx.Node) -> bool:
    """Whether the node is a wait, or only a view or a cast of one."""
    return _source_collective(node) is not None


def _source_collective(node: object) -> fx.Node | None:
    """The collective whose result a node is, or is a view or a cast of; None where it is something else."""
    while isinstance(node, fx.Node) and (node.target is _WAIT or node.target in _PASS_THROUGH):
        if node.target is _WAIT:
            return node.all_input_nodes[0]
        node = node.args[0]
    return None


def limit_pending_reductions(graph: fx.Graph, limit: int = REDUCED_BYTES) -> None:
    """Await reductions of gradients as soon as the inputs of those under way have more than `limit` bytes.

    The oldest is awaited before the next is started, and before its input is made of gradients that are there. Inputs
    of more than twice the bytes of the largest are never held, and one larger than `limit` is under way alone.
    """
    late = {start for chain in _chains(graph, graph.output_node()) for start in chain if start.target in KEEPS_INPUT}
    limit = min(limit, 2 * max(map(_input_bytes, late), default=0))
    under_way: deque[fx.Node] = deque()
    for node in sorted({*late, *(wait for start in late for wait in waits_of(start))}):
        if node.target is _WAIT:
            if node.all_input_nodes[0] in under_way:  # it was not awaited earlier meanwhile
                under_way.remove(node.all_input_nodes[0])
        else:
            while under_way and sum(map(_input_bytes, (*under_way, node))) > limit:
                for wait in waits_of(under_way.popleft()):
                    move_before(wait, _place_before(node))
            under_way.append(node)


def _input_bytes(start: fx.Node) -> int:
    value: torch.Tensor = start.all_input_nodes[0].meta["val"]
    return int(value.numel()) * value.element_size()


def _place_before(start: fx.Node) -> fx.Node:
    """The first of the calls right before a collective that make its input of what is there: casts and copies."""
    makes = {start}
    place = start
    while (
        place.prev in {source for node in makes for source in node.all_input_nodes} and place.prev.target in _COPY_OPS
    ):
        place = place.prev
        makes.add(place)
    return place
