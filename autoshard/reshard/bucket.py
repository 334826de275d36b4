"""Gradients reduced in a few large collectives instead of one for each (Whale 5.1.1, grouped collectives)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

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
    """An output of the graph that is made of a local gradient by reductions alone, over one axis or several in turn.

    `stages` holds the collectives in order, each as its operator and the arguments behind the tensor. Over several axes
    that may be a reduce-scatter, reductions of the pieces, and the gather of these: what is reduced whole in the end.
    """

    source: fx.Node
    result: fx.Node
    stages: tuple[tuple[Any, tuple[Any, ...]], ...]

    @property
    def pieces(self) -> int:
        """Into how many a reduce-scatter among the stages cuts the gradient; 1 without one."""
        return next((int(arguments[1]) for op, arguments in self.stages if op is _REDUCE_SCATTER), 1)

    @property
    def whole(self) -> bool:
        """Whether the pieces are put together again, so that it does not matter where they are cut."""
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
    """Join the reductions of gradients that are reduced alike (groups, kind, dtype) and handed back as they are.

    They are joined in the order in which they are made, up to `limit` bytes, and reduced as soon as the last of them
    is there.

    Source: Whale 5.1.1, "grouped" AllReduce.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    output = next(iter(graph.find_nodes(op="output")))
    handed = map(_uncast, output.all_input_nodes)
    found = [reduction for node in handed if (reduction := _reduction(node)) is not None]
    groups: dict[tuple[object, ...], list[_ReductionChain]] = {}
    for reduction in sorted(found, key=lambda one: positions[one.source]):
        groups.setdefault(reduction.key, []).append(reduction)
    for group in groups.values():
        for bucket in _buckets(group, limit):
            if len(bucket) > 1:
                _join(graph, bucket)
    graph.eliminate_dead_code(is_impure_node=is_border)


def is_border(node: fx.Node) -> bool:
    """Whether a node stays although nothing uses it: the graph is functional, so only its border does."""
    return node.op in ("placeholder", "output")


def _uncast(node: fx.Node) -> fx.Node:
    """What was reduced in another dtype than it is handed back in."""
    source = node.all_input_nodes[0] if node.target is aten._to_copy.default else node
    return source if len(source.users) == 1 else node


def _reduction(node: fx.Node) -> _ReductionChain | None:
    """The chain of reductions that ends in `node` and serves nothing but an output."""
    stages: list[tuple[Any, tuple[Any, ...]]] = []
    source, seen = node, node
    while len(seen.users) == 1:
        if seen.target in _RESHAPES:
            seen = seen.all_input_nodes[0]
            continue
        start = seen.all_input_nodes[0] if seen.target is _WAIT else None
        if start is None or len(start.users) != 1 or not _is_earlier_stage(start, stages):
            break
        stages.append((start.target, start.args[1:]))
        source = seen = start.all_input_nodes[0]
    found = tuple(reversed(stages))
    gathers = [arguments for op, arguments in found if op is _ALL_GATHER]
    if not found or (gathers and gathers[0] not in [one[1:] for op, one in found if op is _REDUCE_SCATTER]):
        return None
    # What has another size on other ranks is not laid side by side.
    return None if source.meta.get("dynamic") else _ReductionChain(source, node, found)


def _is_earlier_stage(start: fx.Node, behind: Sequence[tuple[Any, tuple[Any, ...]]]) -> bool:
    """Whether a collective is a stage before those `behind` it, which were found from the last to the first."""
    if start.target is _ALL_GATHER:
        return not behind
    if start.target is _REDUCE_SCATTER:
        return all(op is not _REDUCE_SCATTER for op, _ in behind)
    return start.target is _ALL_REDUCE


def _buckets(reductions: Iterable[_ReductionChain], limit: int) -> list[list[_ReductionChain]]:
    """Stretches of at most `limit` bytes.

    The last bucket is ready when hardly anything is left to compute: if it is tiny, the one before it is too late as
    well, and hands over some of what it has.
    """
    buckets: list[list[_ReductionChain]] = []
    held = 0
    for reduction in reductions:
        if not buckets or held + reduction.bytes > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(reduction)
        held += reduction.bytes
    if len(buckets) > 1:
        before, last = buckets[-2:]
        while len(before) > 1 and held + before[-1].bytes <= limit // 4:
            held += before[-1].bytes
            last.insert(0, before.pop())
    return buckets


def _join(graph: fx.Graph, bucket: Sequence[_ReductionChain]) -> None:
    """Replace the reductions of a bucket by one of their elements laid side by side.

    A reduce-scatter hands the n-th row of its input to the n-th rank: rows are what is laid side by side. Where the
    pieces are put together again, the elements may be cut anywhere: they lie one gradient behind the other.
    """

    def call(shape: Sequence[int], op: Any, *args: Any) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta = dict(bucket[-1].result.meta)
        node.meta["val"] = torch.empty([plain(size) for size in shape], dtype=dtype, device="meta")
        return node

    dtype, cuts = bucket[0].source.meta["val"].dtype, bucket[0].pieces
    rows = 1 if bucket[0].whole else cuts
    widths = [reduction.elements // rows for reduction in bucket]
    place = bucket[-1].source.next
    while place.op == "placeholder":  # what the graph is given stands before all that it does
        place = place.next
    with graph.inserting_before(place):
        parts = [
            call([rows, width], aten.reshape.default, one.source, [rows, width])
            for one, width in zip(bucket, widths, strict=True)
        ]
        joined = call([rows, sum(widths)], aten.cat.default, parts, 1)
        left, width = cuts, rows * sum(widths) // cuts
        if cuts > rows:
            joined = call([left, width], aten.view.default, joined, [left, width])
        for op, arguments in bucket[0].stages:
            left = {_REDUCE_SCATTER: 1, _ALL_GATHER: cuts}.get(op, left)
            joined = call([left, width], _WAIT, call([left, width], op, joined, *arguments))
        flat = call([left * width], aten.view.default, joined, [-1])
        split = call([left * width], aten.split_with_sizes.default, flat, widths)
        split.meta["val"] = [torch.empty([plain(width)], dtype=dtype, device="meta") for width in widths]
        for index, reduction in enumerate(bucket):
            piece = call([widths[index]], operator.getitem, split, index)
            whole = call([], aten.view.default, piece, list(reduction.result.meta["val"].shape))
            whole.meta["val"] = reduction.result.meta["val"]
            users = list(reduction.result.users)
            reduction.result.replace_all_uses_with(whole)
            for user in users:
                if user.op != "output":
                    whole.append(user)  # the cast of the gradient
