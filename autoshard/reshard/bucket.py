"""Buckets of gradients, each reduced by one large collective (Whale 5.1.1, grouped collectives)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.reshard.gathers import split_by_bytes
from autoshard.size import plain
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES, collectives

aten = torch.ops.aten

_WAIT = collectives.wait_tensor.default
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
                _join(graph, bucket)
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


def _join(graph: fx.Graph, bucket: Sequence[_ReductionChain]) -> None:
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
