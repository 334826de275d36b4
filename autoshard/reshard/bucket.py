"""Gradients reduced in a few large collectives instead of one for each (Whale 5.1.1, grouped collectives)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.cluster.cost import GROUPED_BYTES
from autoshard.patterns.local import collectives
from autoshard.size import plain

aten = torch.ops.aten

_WAIT = collectives.wait_tensor.default
_ALL_REDUCE = collectives.all_reduce.default
_REDUCE_SCATTER = collectives.reduce_scatter_tensor.default
_RESHAPES = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """An output of the graph that is made of a local gradient by reductions alone, over one axis or several in turn.

    `stages` holds the collectives in order, each as its operator and the arguments behind the tensor; `parts` is into
    how many pieces a reduce-scatter among them cuts the gradient, 1 without one.
    """

    source: fx.Node
    result: fx.Node
    stages: tuple[tuple[Any, tuple[Any, ...]], ...]
    parts: int

    @property
    def key(self) -> tuple[object, ...]:
        return (self.source.meta["val"].dtype, self.stages)

    @property
    def elements(self) -> int:
        return int(self.source.meta["val"].numel())

    @property
    def bytes(self) -> int:
        return self.elements * int(self.source.meta["val"].element_size())


def bucket_reductions(graph: fx.Graph, limit: int = GROUPED_BYTES) -> None:
    """Join the reductions of gradients that are reduced alike (groups, kind, dtype) and handed back as they are.

    They are joined in the order in which they are made, up to `limit` bytes, and reduced as soon as the last of them
    is there.

    Source: Whale 5.1.1, "grouped" AllReduce.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    output = next(iter(graph.find_nodes(op="output")))
    handed = map(_uncast, output.all_input_nodes)
    found = [reduction for node in handed if (reduction := _reduction(node)) is not None]
    groups: dict[tuple[object, ...], list[_Reduction]] = {}
    for reduction in sorted(found, key=lambda one: positions[one.source]):
        groups.setdefault(reduction.key, []).append(reduction)
    for group in groups.values():
        for bucket in _buckets(group, limit):
            if len(bucket) > 1:
                _join(graph, bucket)
    graph.eliminate_dead_code(is_impure_node=_is_border)


def _is_border(node: fx.Node) -> bool:
    """Whether a node stays although nothing uses it: the graph is functional, so only its border does."""
    return node.op in ("placeholder", "output")


def _uncast(node: fx.Node) -> fx.Node:
    """What was reduced in another dtype than it is handed back in."""
    source = node.all_input_nodes[0] if node.target is aten._to_copy.default else node
    return source if len(source.users) == 1 else node


def _reduction(node: fx.Node) -> _Reduction | None:
    """The chain of reductions that ends in `node` and serves nothing but an output."""
    stages: list[tuple[Any, tuple[Any, ...]]] = []
    source, parts, seen = node, 1, node
    while len(seen.users) == 1:
        if seen.target in _RESHAPES:
            seen = seen.all_input_nodes[0]
            continue
        start = seen.all_input_nodes[0] if seen.target is _WAIT else None
        if start is None or len(start.users) != 1 or start.target not in (_ALL_REDUCE, _REDUCE_SCATTER):
            break
        if start.target is _REDUCE_SCATTER:
            if parts > 1:
                break
            parts = int(start.args[2])  # type: ignore[arg-type]
        stages.append((start.target, start.args[1:]))
        source = seen = start.all_input_nodes[0]
    return _Reduction(source, node, tuple(reversed(stages)), parts) if stages else None


def _buckets(reductions: Iterable[_Reduction], limit: int) -> Iterable[list[_Reduction]]:
    bucket: list[_Reduction] = []
    held = 0
    for reduction in reductions:
        if bucket and held + reduction.bytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(reduction)
        held += reduction.bytes
    if bucket:
        yield bucket


def _join(graph: fx.Graph, bucket: Sequence[_Reduction]) -> None:
    """Replace the reductions of a bucket by one of their elements laid side by side.

    A reduce-scatter hands the n-th row of its input to the n-th rank: rows are what is laid side by side.
    """

    def call(shape: Sequence[int], op: Any, *args: Any) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta = dict(bucket[-1].result.meta)
        node.meta["val"] = torch.empty([plain(size) for size in shape], dtype=dtype, device="meta")
        return node

    dtype, rows = bucket[0].source.meta["val"].dtype, bucket[0].parts
    widths = [reduction.elements // rows for reduction in bucket]
    total = sum(widths)
    with graph.inserting_before(bucket[-1].source.next):
        pieces = [
            call([rows, width], aten.reshape.default, one.source, [rows, width])
            for one, width in zip(bucket, widths, strict=True)
        ]
        joined, left = call([rows, total], aten.cat.default, pieces, 1), rows
        for op, arguments in bucket[0].stages:
            left = 1 if op is _REDUCE_SCATTER else left
            joined = call([left, total], _WAIT, call([left, total], op, joined, *arguments))
        flat = call([left * total], aten.view.default, joined, [-1])
        split = call([left * total], aten.split_with_sizes.default, flat, widths)
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
