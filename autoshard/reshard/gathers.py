"""Gathers of parameters: one for all parameters of a layer, running behind the compute of the layers before it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.capture.layers import PREPARATIONS
from autoshard.specs.emitter import collectives

_WAIT = collectives.wait_tensor.default
_GATHER = collectives.all_gather_into_tensor.default
_JOINED_GATHER = collectives.all_gather_into_tensor_coalesced.default
GATHERS = (_GATHER, _JOINED_GATHER)

_GATHER_PATH_OPS = PREPARATIONS | {_WAIT, *GATHERS}

GATHERED_BYTES = 512 * 2**20
"""Bytes that one joined gather makes at most, and twice those behind which no further one is started.

A layer of a model of 8 billion parameters has 416 MiB in 16 bits: it is gathered at once, behind the layer before it.
Larger layers are gathered in several turns, of which the next one is under way.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """A gather of what the graph is given.

    Attributes:
        node: starts it.
        depth: how many gathers, over other axes, its operands went through before.
    """

    node: fx.Node
    depth: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Gathers of equal keys may be joined: of one layer and depth, over one group, in one dtype."""
        return self.node.meta["layer"], self.depth, _value(self.node.args[0]).dtype, self.node.args[1:]

    @property
    def group(self) -> Any:
        """The group that it runs over."""
        return self.node.args[-1]

    @property
    def bytes(self) -> int:
        """Bytes that it makes."""
        made = self.node.meta["val"]
        return sum(
            int(one.numel()) * one.element_size() for one in (made if isinstance(made, (list, tuple)) else (made,))
        )

    @property
    def wait(self) -> fx.Node | None:
        """The first wait for it."""
        return min(waits_of(self.node), default=None)


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for the results of a collective."""
    found = []
    for user in start.users:
        if user.target is _WAIT:
            found.append(user)
        elif user.target is operator.getitem:
            found += [wait for wait in user.users if wait.target is _WAIT]
    return found


def propagate_layers(graph: fx.Graph) -> None:
    """Tell all that is made of a parameter alone which layer it belongs to.

    `meta["layer"]` of a parameter's placeholder is the name of its layer; that of what reaches a half as a saved tensor
    is the one that it has in the half that makes it.
    """
    told = [node for node in graph.find_nodes(op="placeholder") if "layer" in node.meta]
    for node in told:  # grows while it is walked
        for user in node.users:
            if user.target in _GATHER_PATH_OPS and "layer" not in user.meta:
                user.meta["layer"] = node.meta["layer"]
                told.append(user)


def join_gathers(graph: fx.Graph, limit: int = GATHERED_BYTES) -> None:
    """Gather the parameters of a layer together, where they lie alike: as many as have `limit` bytes when gathered.

    One collective takes all of them as they lie in memory, so that nothing is copied.
    """
    propagate_layers(graph)
    groups: dict[tuple[Any, ...], list[_Gather]] = {}
    for gather in _gathers(graph):
        if gather.node.target is _GATHER and "layer" in gather.node.meta:
            groups.setdefault(gather.key, []).append(gather)
    for group in groups.values():
        for bucket in _buckets(group, limit):
            if len(bucket) > 1:
                _join(graph, [gather.node for gather in bucket])


def _gathers(graph: fx.Graph) -> list[_Gather]:
    """The gathers of what a graph is given, in their order; casts, views, padding, other gathers may stand between."""
    depths: dict[fx.Node, int | None] = {}

    def depth(node: fx.Node) -> int | None:
        """How many gathers a node went through; None where it is made otherwise."""
        if node.op == "placeholder":
            return 0
        if node not in depths:
            sources = node.all_input_nodes if node.target in _GATHER_PATH_OPS else []
            before = [depth(source) for source in sources]
            known = [one for one in before if one is not None]
            complete = bool(sources) and len(known) == len(before)
            depths[node] = max(known) + (sources[0].target in GATHERS) if complete else None
        return depths[node]

    starts = sorted(node for target in GATHERS for node in graph.find_nodes(op="call_function", target=target))
    return [_Gather(node, found) for node in starts if (found := depth(node)) is not None]


def _buckets(gathers: Sequence[_Gather], limit: int) -> list[list[_Gather]]:
    """Stretches of gathers of at most `limit` bytes together; one that makes more stays alone."""
    buckets: list[list[_Gather]] = []
    held = 0
    for gather in gathers:
        if not buckets or held + gather.bytes > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(gather)
        held += gather.bytes
    return buckets


def _join(graph: fx.Graph, gathers: Sequence[fx.Node]) -> None:
    """Replace gathers by one, where the first of them starts."""
    first = gathers[0]
    operands = [gather.all_input_nodes[0] for gather in gathers]
    for operand in operands:
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
    """Start gathers early, so that they run behind compute: the next one always, more as far as bytes allow.

    Another gather over the same group is started while those under way, behind the one that is awaited next, make less
    than half of `limit` bytes, and of what the largest gather makes. So the large gathers run one by one, and small
    ones do not part them. Groups gather at the same time, over links of their own.
    """
    queues: dict[tuple[int, Any], list[_Gather]] = {}
    for gather in _gathers(graph):
        if gather.wait is not None:
            queues.setdefault((gather.depth, gather.group), []).append(gather)
    # What goes through several gathers goes through each of them a turn earlier than through the one behind it.
    for _, queue in sorted(queues.items(), key=lambda one: -one[0][0]):
        _start_ahead(queue, limit)


def _start_ahead(gathers: Sequence[_Gather], limit: int) -> None:
    waits = {gather: wait for gather in gathers if (wait := gather.wait) is not None}
    queue = sorted(waits, key=waits.__getitem__)
    sizes = [gather.bytes for gather in queue]
    limit = min(limit, max(sizes, default=0))
    for place in range(1, len(queue)):
        awaited = place - 1
        while awaited > 0 and sum(sizes[awaited:place]) < limit / 2:
            awaited -= 1
        move_before(queue[place].node, waits[queue[awaited]])


def move_before(node: fx.Node, place: fx.Node) -> None:
    """Move a call before another one, with all that it needs."""
    if node.op != "call_function" or node < place:
        return
    for source in node.all_input_nodes:
        move_before(source, place)
    place.prepend(node)
    node.meta = _meta_at(node.meta, place)


def _meta_at(meta: dict[str, Any], place: fx.Node) -> dict[str, Any]:
    """What is told of a node, moved to the operator of another one, where that is told."""
    return {**meta, "position": place.meta["position"]} if "position" in place.meta else meta


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
