"""All-gathers of parameters: joined for each layer, and overlapped with the compute of the layers before it.

Buckets of gradients, each reduced by one large collective (Whale 5.1.1, grouped collectives).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from autoshard.capture.recomputation import PREPARATIONS
from autoshard.size import plain
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES, collectives

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
                _join_gathers(graph, [gather.node for gather in run])


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


def _join_gathers(graph: fx.Graph, gathers: Sequence[fx.Node]) -> None:
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


aten = torch.ops.aten
_ALL_REDUCE = collectives.all_reduce.default
_REDUCE_SCATTER = collectives.reduce_scatter_tensor.default
_ALL_GATHER = collectives.all_gather_into_tensor.default
_RESHAPES = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True, slots=True)
class _ReductionChain:
    """A chain of collectives, over one axis or several in turn, from a local gradient to an output of the graph.

    `stages` holds the collectives in order, each as its operator and its arguments after the tensor. A reduction over
    several axes may be a reduce-scatter, reductions of the pieces, and an all-gather of these.
    """

    source: fx.Node
    result: fx.Node
    stages: tuple[tuple[Any, tuple[Any, ...]], ...]

    @property
    def pieces(self) -> int:
        """The number of pieces that a reduce-scatter among the stages makes; 1 without one."""
        return next((int(arguments[1]) for op, arguments in self.stages if op is _REDUCE_SCATTER), 1)

    @property
    def whole(self) -> bool:
        """True if the pieces are gathered in the end, so that the gradient may be cut anywhere."""
        return self.stages[-1][0] is _ALL_GATHER

    @property
    def key(self) -> tuple[object, ...]:
        return (self.source.meta["val"].dtype, self.stages)

    @property
    def elements(self) -> int:
        return int(self.source.meta["val"].numel())

    @property
    def bytes(self) -> int:
        return self.elements * int(self.source.meta["val"].element_size())


def bucket_reductions(graph: fx.Graph, limit: int = GRADIENT_BUCKET_BYTES) -> None:
    """Join the reductions of gradients with equal groups, kinds and dtypes, in buckets of up to `limit` bytes.

    Gradients are joined in the order of their computation. A bucket is reduced as soon as its last gradient exists.

    Source: Whale 5.1.1, "grouped" AllReduce.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    output = next(iter(graph.find_nodes(op="output")))
    results = map(_uncast, output.all_input_nodes)
    chains = [chain for node in results if (chain := _reduction(node)) is not None]
    groups: dict[tuple[object, ...], list[_ReductionChain]] = {}
    for reduction in sorted(chains, key=lambda chain: positions[chain.source]):
        groups.setdefault(reduction.key, []).append(reduction)
    for group in groups.values():
        for bucket in _buckets(group, limit):
            if len(bucket) > 1:
                _join_reductions(graph, bucket)
    graph.eliminate_dead_code(is_impure_node=is_border)


def is_border(node: fx.Node) -> bool:
    """Return True if a node stays although nothing uses it: the graph is functional, so only its border does."""
    return node.op in ("placeholder", "output")


def _uncast(node: fx.Node) -> fx.Node:
    """Return the operand of a result that is cast after its reduction; the result itself otherwise."""
    source = node.all_input_nodes[0] if node.target is aten._to_copy.default else node
    return source if len(source.users) == 1 else node


def _reduction(node: fx.Node) -> _ReductionChain | None:
    """Return the chain of reductions that ends in `node` and has no other users than an output."""
    stages: list[tuple[Any, tuple[Any, ...]]] = []
    source, current = node, node
    while len(current.users) == 1:
        if current.target in _RESHAPES:
            current = current.all_input_nodes[0]
            continue
        start = current.all_input_nodes[0] if current.target is _WAIT else None
        if start is None or len(start.users) != 1 or not _is_earlier_stage(start, stages):
            break
        stages.append((start.target, start.args[1:]))
        source = current = start.all_input_nodes[0]
    stages.reverse()
    gathers = [arguments for op, arguments in stages if op is _ALL_GATHER]
    scatters = [arguments[1:] for op, arguments in stages if op is _REDUCE_SCATTER]
    # A gather must undo the reduce-scatter: over the same group, of the same size.
    if not stages or (gathers and gathers[0] not in scatters):
        return None
    # A gradient with other sizes on other ranks can not share a buffer.
    return None if source.meta.get("dynamic") else _ReductionChain(source, node, tuple(stages))


def _is_earlier_stage(start: fx.Node, later_stages: Sequence[tuple[Any, tuple[Any, ...]]]) -> bool:
    """Return True if a collective may be a stage before those `behind` it: one scatter at most, a gather only last."""
    if start.target is _ALL_GATHER:
        return not later_stages
    if start.target is _REDUCE_SCATTER:
        return all(op is not _REDUCE_SCATTER for op, _ in later_stages)
    return start.target is _ALL_REDUCE


def _buckets(reductions: Iterable[_ReductionChain], limit: int) -> list[list[_ReductionChain]]:
    """Return buckets of at most `limit` bytes, with a last one that is not tiny."""
    buckets = split_by_bytes(reductions, limit)
    if len(buckets) > 1:
        before, last = buckets[-2:]
        last_bytes = sum(reduction.bytes for reduction in last)
        # The last bucket is ready when hardly anything is left to compute. If it is tiny, the one before it ends late
        # as well: its own last gradients move on, so that the rest starts earlier. A quarter is a guess that works.
        while len(before) > 1 and last_bytes + before[-1].bytes <= limit // 4:
            last_bytes += before[-1].bytes
            last.insert(0, before.pop())
    return buckets


def _join_reductions(graph: fx.Graph, bucket: Sequence[_ReductionChain]) -> None:
    """Replace the reductions of a bucket by one reduction of a joint buffer."""

    def call(shape: Sequence[int], op: Any, *args: Any) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta = dict(bucket[-1].result.meta)
        node.meta["val"] = torch.empty([plain(size) for size in shape], dtype=dtype, device="meta")
        return node

    dtype, cuts = bucket[0].source.meta["val"].dtype, bucket[0].pieces
    # A reduce-scatter returns the n-th row of its input to the n-th rank, so the buffer's rows hold the rows of all
    # gradients. Where the pieces are gathered again, the cut may be anywhere: gradients lie one after the other.
    rows = 1 if bucket[0].whole else cuts
    widths = [reduction.elements // rows for reduction in bucket]
    place = bucket[-1].source.next
    # Calls stand behind all placeholders.
    while place.op == "placeholder":
        place = place.next
    with graph.inserting_before(place):
        parts = [
            call([rows, width], aten.reshape.default, reduction.source, [rows, width])
            for reduction, width in zip(bucket, widths, strict=True)
        ]
        joined = call([rows, sum(widths)], aten.cat.default, parts, 1)
        row_count, width = cuts, rows * sum(widths) // cuts
        if cuts > rows:
            joined = call([row_count, width], aten.view.default, joined, [row_count, width])
        for op, arguments in bucket[0].stages:
            row_count = {_REDUCE_SCATTER: 1, _ALL_GATHER: cuts}.get(op, row_count)
            joined = call([row_count, width], _WAIT, call([row_count, width], op, joined, *arguments))
        flat = call([row_count * width], aten.view.default, joined, [-1])
        split = call([row_count * width], aten.split_with_sizes.default, flat, widths)
        split.meta["val"] = [torch.empty([plain(width)], dtype=dtype, device="meta") for width in widths]
        for index, reduction in enumerate(bucket):
            piece = call([widths[index]], operator.getitem, split, index)
            reshaped = call([], aten.view.default, piece, list(reduction.result.meta["val"].shape))
            reshaped.meta["val"] = reduction.result.meta["val"]
            users = list(reduction.result.users)
            reduction.result.replace_all_uses_with(reshaped)
            for user in users:
                _move_behind(user, reshaped)


def _move_behind(node: fx.Node, place: fx.Node) -> None:
    """Move the cast of a gradient behind its new reduction, and everything that reads it behind that."""
    if node.op != "output":
        place.append(node)
        for user in list(node.users):
            _move_behind(user, node)
