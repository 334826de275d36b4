"""Schedule of the collectives of half a program.

All-gathers of a layer's parameters are joined and start early, so that the compute of earlier layers hides them.
Reductions of gradients start as early as their data allows, and every collective is awaited as late as possible.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from autoshard.capture.recomputation import PREPARATIONS
from autoshard.specs.emitter import collectives

aten = torch.ops.aten

_WAIT = collectives.wait_tensor.default
_GATHER = collectives.all_gather_into_tensor.default
_JOINED_GATHER = collectives.all_gather_into_tensor_coalesced.default
_GATHERS = (_GATHER, _JOINED_GATHER)
_STARTS = (collectives.reduce_scatter_tensor.default, collectives.all_reduce.default, _GATHER)
_GATHER_PATH_OPS = PREPARATIONS | {_WAIT, *_GATHERS}

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

# NCCL's work object holds its input, which another stream reads. An all-reduce is not listed: it works in place on a
# copy, its result.
KEEPS_INPUT = frozenset((*_GATHERS, collectives.reduce_scatter_tensor.default, collectives.all_to_all_single.default))
"""Collectives whose input stays allocated until the result is awaited."""

# A layer of a model of 8 billion parameters has 416 MiB in 16 bits: it is gathered at once, during the layer before it.
# Larger layers are gathered in several turns.
GATHERED_BYTES = 512 * 2**20
"""Most bytes of the result of one joined gather. No other gather starts while half of these bytes are pending."""

# The largest matrices of a model of 8 billion parameters have gradients of 224 MiB in 32 bits. Two of them fit: one is
# reduced while the next one waits, so that links are always busy.
REDUCED_BYTES = 512 * 2**20
"""Most bytes of the inputs of reductions that are pending at once."""


def schedule(graph: fx.Graph) -> None:
    """Join the gathers of half a program and order its collectives, in the same order on all ranks."""
    join_gathers(graph)
    # Stages first: the place of a wait depends on its users, which include later stages.
    delay_stages(graph)
    delay_waits(graph)
    gather_ahead(graph)
    limit_pending_reductions(graph)


class _HasBytes(Protocol):
    @property
    def bytes(self) -> int: ...


_Sized = TypeVar("_Sized", bound=_HasBytes)


def split_by_bytes(items: Iterable[_Sized], limit: int) -> list[list[_Sized]]:
    """Return runs of consecutive items of at most `limit` bytes in total; a larger item is a separate run."""
    runs: list[list[_Sized]] = []
    run_bytes = 0
    for item in items:
        if not runs or run_bytes + item.bytes > limit:
            runs.append([])
            run_bytes = 0
        runs[-1].append(item)
        run_bytes += item.bytes
    return runs


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """An all-gather of inputs of the graph.

    Attributes:
        node: its call.
        depth: number of earlier gathers, over other axes, of its operands.
    """

    node: fx.Node
    depth: int

    @property
    def key(self) -> tuple[Any, ...]:
        """The layer, depth, dtype, size and group: gathers with equal keys may be joined."""
        operand = self.node.all_input_nodes[0]
        return self.node.meta["layer"], self.depth, operand.meta["val"].dtype, self.node.args[1:]

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        value = self.node.meta["val"]
        values = value if isinstance(value, (list, tuple)) else (value,)
        return sum(int(part.numel()) * part.element_size() for part in values)

    @property
    def wait(self) -> fx.Node | None:
        """The first wait for the result; None where nothing awaits it."""
        return min(waits_of(self.node), default=None)


def waits_of(start: fx.Node) -> list[fx.Node]:
    """Return the waits for the results of a collective."""
    waits = []
    for user in start.users:
        if user.target is _WAIT:
            waits.append(user)
        elif user.target is operator.getitem:
            # A joined gather returns a list.
            waits += [wait for wait in user.users if wait.target is _WAIT]
    return waits


def propagate_layers(graph: fx.Graph) -> None:
    """Set `meta["layer"]` of every node that depends on a parameter alone.

    On entry, the placeholder of a parameter has the name of its layer. The placeholder of a saved tensor has the layer
    that the tensor has in the half that makes it.
    """
    labelled = [node for node in graph.find_nodes(op="placeholder") if "layer" in node.meta]
    # The list grows while it is iterated.
    for node in labelled:
        for user in node.users:
            if user.target in _GATHER_PATH_OPS and "layer" not in user.meta:
                user.meta["layer"] = node.meta["layer"]
                labelled.append(user)


def join_gathers(graph: fx.Graph, limit: int = GATHERED_BYTES) -> None:
    """Join the gathers of a layer's parameters that have equal keys, up to `limit` gathered bytes.

    The joined collective takes a list of tensors, so that nothing is copied.
    """
    propagate_layers(graph)
    groups: dict[tuple[Any, ...], list[_Gather]] = {}
    for gather in _gathers(graph):
        if gather.node.target is _GATHER and "layer" in gather.node.meta:
            groups.setdefault(gather.key, []).append(gather)
    for group in groups.values():
        for run in split_by_bytes(group, limit):
            if len(run) > 1:
                _join_gathers(graph, [gather.node for gather in run])


def _gathers(graph: fx.Graph) -> list[_Gather]:
    """Return the gathers of the graph's inputs, in order, possibly after casts, views, padding and other gathers."""
    depths: dict[fx.Node, int | None] = {}

    def depth(node: fx.Node) -> int | None:
        """Return the number of gathers that a node went through; None where it depends on other operators."""
        if node.op == "placeholder":
            return 0
        if node not in depths:
            sources = node.all_input_nodes if node.target in _GATHER_PATH_OPS else []
            before = [depth(source) for source in sources]
            depths_before = [count for count in before if count is not None]
            complete = bool(sources) and len(depths_before) == len(before)
            # One more after a gather.
            depths[node] = max(depths_before) + (sources[0].target in _GATHERS) if complete else None
        return depths[node]

    starts = sorted(node for target in _GATHERS for node in graph.find_nodes(op="call_function", target=target))
    return [_Gather(node, count) for node in starts if (count := depth(node)) is not None]


def _join_gathers(graph: fx.Graph, gathers: Sequence[fx.Node]) -> None:
    """Replace gathers by one joined gather, where the first of them starts."""
    first = gathers[0]
    operands = [gather.all_input_nodes[0] for gather in gathers]
    for operand in operands:
        # The joined gather starts where the first one did, so operands of later ones have to exist by then.
        move_before(operand, first)
    with graph.inserting_before(first):
        joined = graph.call_function(_JOINED_GATHER, (operands, *first.args[1:]))
        joined.meta = {**first.meta, "val": [gather.meta["val"] for gather in gathers]}
        for index, gather in enumerate(gathers):
            part = graph.call_function(operator.getitem, (joined, index))
            part.meta = _meta_at(gather.meta, first)
            gather.replace_all_uses_with(part)
    for gather in gathers:
        graph.erase_node(gather)


def gather_ahead(graph: fx.Graph, limit: int = GATHERED_BYTES) -> None:
    """Start gathers early, so that compute hides them: always the next one, and more as far as bytes allow.

    A gather starts before the wait of an earlier gather over the same group, if the results between them have less
    than half of `limit` bytes and of the largest gather's. So the large gathers run one by one, and small ones do not
    delay them. Different groups use separate links and gather at the same time.
    """
    queues: dict[tuple[int, Any], list[_Gather]] = {}
    for gather in _gathers(graph):
        if gather.wait is not None:
            queues.setdefault((gather.depth, gather.node.args[-1]), []).append(gather)
    # A gather moves its operands' gathers, too. The deepest go first, so that each gather of a parameter over several
    # axes is one turn before the gather of its result.
    for _, gathers in sorted(queues.items(), key=lambda item: -item[0][0]):
        waits = {gather: wait for gather in gathers if (wait := gather.wait) is not None}
        queue = sorted(waits, key=waits.__getitem__)
        sizes = [gather.bytes for gather in queue]
        most = min(limit, max(sizes, default=0))
        for place in range(1, len(queue)):
            awaited = place - 1
            while awaited > 0 and sum(sizes[awaited:place]) < most / 2:
                awaited -= 1
            move_before(queue[place].node, waits[queue[awaited]])


def move_before(node: fx.Node, place: fx.Node) -> None:
    """Move a call and the calls that it depends on before another one."""
    # Nodes compare by position.
    if node.op != "call_function" or node < place:
        return
    for source in node.all_input_nodes:
        move_before(source, place)
    place.prepend(node)
    node.meta = _meta_at(node.meta, place)


def _meta_at(meta: dict[str, Any], place: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node that is moved to `place`, with the position of the operator there."""
    return {**meta, "position": place.meta["position"]} if "position" in place.meta else meta


def delay_stages(graph: fx.Graph) -> None:
    """Start the later stages of a gradient's reduction when the reductions of the next gradients start.

    A stage waits for the one before it, and so does the compute after it. By the time the next gradient is ready, the
    previous stage has had time to end. The stages of the last gradients start at the end of the half.
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
    """Return chains of collectives whose results reach outputs only, each followed by those that use its result.

    Chains are in the order of their first collectives. Several collectives that use one result follow each other.
    """
    reaches_outputs: dict[fx.Node, bool] = {output: True}

    def feeds_outputs_only(node: fx.Node) -> bool:
        """Return True if a node reaches only outputs, through waits, views, casts and other collectives."""
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
    """Move every wait, with the views and casts of its result, to just before its first user."""
    for node in reversed(list(graph.nodes)):
        if _is_awaited(node) and node.users:
            # Nodes compare by their current positions.
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

    A wait is put before the next reduction and the copies that make its input. The limit is at most twice the largest
    input. An input larger than the limit is pending alone.
    """
    # Only reductions whose input NCCL keeps: the input of an all-reduce is its result, which is always kept.
    late = {start for chain in _chains(graph, graph.output_node()) for start in chain if start.target in KEEPS_INPUT}
    limit = min(limit, 2 * max(map(_input_bytes, late), default=0))
    pending: deque[fx.Node] = deque()
    for node in sorted({*late, *(wait for start in late for wait in waits_of(start))}):
        if node.target is _WAIT:
            # Its wait is not earlier already.
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
    """Return the first of the casts and copies right before a collective that make its input."""
    place = start
    needed = set(start.all_input_nodes)
    while place.prev in needed and place.prev.target in _COPY_OPS:
        place = place.prev
        needed.update(place.all_input_nodes)
    return place
