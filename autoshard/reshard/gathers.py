"""All-gathers of parameters: joined for each layer, and overlapped with the compute of the layers before it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import fx

from autoshard.capture.layers import PREPARATIONS
from autoshard.specs.emitter import collectives

_WAIT = collectives.wait_tensor.default
_GATHER = collectives.all_gather_into_tensor.default
_JOINED_GATHER = collectives.all_gather_into_tensor_coalesced.default
GATHERS = (_GATHER, _JOINED_GATHER)

_GATHER_PATH_OPS = PREPARATIONS | {_WAIT, *GATHERS}

GATHERED_BYTES = 512 * 2**20
"""Most bytes of the result of one joined gather. No further one is started while half of these are pending.

A layer of a model of 8 billion parameters has 416 MiB in 16 bits: it is gathered at once, during the layer before it.
Larger layers are gathered in several turns, of which the next one is pending.
"""


class _HasBytes(Protocol):
    @property
    def bytes(self) -> int: ...


_Sized = TypeVar("_Sized", bound=_HasBytes)


def split_by_bytes(items: Iterable[_Sized], limit: int) -> list[list[_Sized]]:
    """Return runs of consecutive items of at most `limit` bytes together; a larger item is a run of its own."""
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
        depth: number of gathers, over other axes, that its operands went through before.
    """

    node: fx.Node
    depth: int

    @property
    def key(self) -> tuple[Any, ...]:
        """The layer, depth, dtype, size and group: gathers with equal keys may be joined."""
        operand = self.node.all_input_nodes[0]
        return self.node.meta["layer"], self.depth, operand.meta["val"].dtype, self.node.args[1:]

    @property
    def group(self) -> Any:
        """The process group."""
        return self.node.args[-1]

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
    # Grows while it is walked.
    for node in labelled:
        for user in node.users:
            if user.target in _GATHER_PATH_OPS and "layer" not in user.meta:
                user.meta["layer"] = node.meta["layer"]
                labelled.append(user)


def join_gathers(graph: fx.Graph, limit: int = GATHERED_BYTES) -> None:
    """Join the gathers of a layer's parameters that have equal keys, up to `limit` gathered bytes.

    The joined collective takes a list of tensors as they lie in memory, so that nothing is copied.
    """
    propagate_layers(graph)
    groups: dict[tuple[Any, ...], list[_Gather]] = {}
    for gather in _gathers(graph):
        if gather.node.target is _GATHER and "layer" in gather.node.meta:
            groups.setdefault(gather.key, []).append(gather)
    for group in groups.values():
        for run in split_by_bytes(group, limit):
            if len(run) > 1:
                _join(graph, [gather.node for gather in run])


def _gathers(graph: fx.Graph) -> list[_Gather]:
    """Return the gathers of the graph's inputs, in order; casts, views, padding, other gathers may stand between."""
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
            # Sources of a gather that was itself gathered: one more.
            depths[node] = max(depths_before) + (sources[0].target in GATHERS) if complete else None
        return depths[node]

    starts = sorted(node for target in GATHERS for node in graph.find_nodes(op="call_function", target=target))
    return [_Gather(node, count) for node in starts if (count := depth(node)) is not None]


def _join(graph: fx.Graph, gathers: Sequence[fx.Node]) -> None:
    """Replace gathers by one joined gather, where the first of them starts."""
    first = gathers[0]
    operands = [gather.all_input_nodes[0] for gather in gathers]
    for operand in operands:
        # The joined gather starts where the first one did; operands of later ones have to exist by then.
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
    delay them. Different groups use links of their own and gather at the same time.
    """
    queues: dict[tuple[int, Any], list[_Gather]] = {}
    for gather in _gathers(graph):
        if gather.wait is not None:
            queues.setdefault((gather.depth, gather.group), []).append(gather)
    # A gather moves its operands' gathers along with it. The deepest go first, so that each gather of a parameter
    # over several axes ends up a turn before the one behind it.
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
    # Nodes compare by position: what stands before the place is there already.
    if node.op != "call_function" or node < place:
        return
    for source in node.all_input_nodes:
        move_before(source, place)
    place.prepend(node)
    node.meta = _meta_at(node.meta, place)


def _meta_at(meta: dict[str, Any], place: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node that is moved to `place`, with the position of the operator there."""
    return {**meta, "position": place.meta["position"]} if "position" in place.meta else meta
