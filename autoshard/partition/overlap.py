"""When collectives run: gradients reduced in a few large ones, started as early and awaited as late as can be."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.patterns.local import collectives

aten = torch.ops.aten

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced together up to this many bytes, torch's own default in DistributedDataParallel."""

_WAIT = collectives.wait_tensor.default
_REDUCE = collectives.all_reduce.default
_GATHER = collectives.all_gather_into_tensor.default
_MOVES = (aten.view.default, aten.reshape.default, aten.permute.default)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """An output of the graph that is an all-reduce of a local gradient, over one axis or several in turn."""

    source: fx.Node
    result: fx.Node
    stages: tuple[tuple[str, str], ...]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.source.meta["val"].dtype, self.stages)

    @property
    def bytes(self) -> int:
        val = self.source.meta["val"]
        return int(val.numel() * val.element_size())


def bucket_reductions(graph: fx.Graph, limit: int = BUCKET_BYTES) -> None:
    """Reduce gradients that are handed back whole in a few large collectives instead of one for each.

    Gradients that are reduced alike (groups, kind, dtype) are joined in the order in which they are made, up to
    `limit` bytes, and reduced as soon as the last of them is there.

    Source: Whale 5.1.1, "grouped" AllReduce.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    output = next(iter(graph.find_nodes(op="output")))
    found = [reduction for node in output.all_input_nodes if (reduction := _reduction(node)) is not None]
    groups: dict[tuple[object, ...], list[_Reduction]] = {}
    for reduction in sorted(found, key=lambda one: positions[one.source]):
        groups.setdefault(reduction.key, []).append(reduction)
    for group in groups.values():
        for bucket in _buckets(group, limit):
            if len(bucket) > 1:
                _join(graph, bucket)
    graph.eliminate_dead_code(is_impure_node=_keeps)


def _keeps(node: fx.Node) -> bool:
    """Whether a node stays although nothing uses it: the graph is functional, so only its border does."""
    return node.op in ("placeholder", "output")


def _reduction(node: fx.Node) -> _Reduction | None:
    """The chain of all-reduces that ends in `node` and serves nothing but an output."""
    stages: list[tuple[str, str]] = []
    source = node
    while source.target is _WAIT and len(source.users) == 1:
        start: Any = source.args[0]
        if start.target is not _REDUCE or len(start.users) != 1:
            break
        stages.append((str(start.args[1]), str(start.args[2])))
        source = start.args[0]
    return _Reduction(source, node, tuple(reversed(stages))) if stages else None


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
    """Replace the reductions of a bucket by one of their elements laid end to end."""
    vals = [reduction.source.meta["val"] for reduction in bucket]
    sizes = [math.prod(val.shape) for val in vals]
    tags = bucket[-1].result.meta.get("partitioner_tag")

    def call(op: Any, *args: Any) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta["partitioner_tag"] = tags
        return node

    with graph.inserting_after(bucket[-1].source):
        anchor = graph.call_function(aten.detach.default, (bucket[-1].source,))
    with graph.inserting_before(anchor):
        flat = [call(aten.reshape.default, reduction.source, [size]) for reduction, size in zip(bucket, sizes, strict=True)]
        joined = call(aten.cat.default, flat)
        for kind, group in bucket[0].stages:
            joined = call(_WAIT, call(_REDUCE, joined, kind, group))
        parts = call(aten.split_with_sizes.default, joined, sizes)
        for index, (reduction, val) in enumerate(zip(bucket, vals, strict=True)):
            part = call(operator.getitem, parts, index)
            whole = call(aten.view.default, part, list(val.shape))
            whole.meta["val"] = val
            reduction.result.replace_all_uses_with(whole)
    graph.erase_node(anchor)


def await_late(graph: fx.Graph) -> None:
    """Move every wait, and views of what is awaited, to just before its first user."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if not _awaits(node) or not node.users:
            continue
        first = min(node.users, key=order.__getitem__)
        first.prepend(node)
        order[node] = order[first]  # users of its operands see it where it now stands


def _awaits(node: fx.Node) -> bool:
    """Whether the node is a wait, or only reads one and does no work."""
    if node.target is _WAIT:
        return True
    source = node.args[0] if node.args else None
    return node.target in _MOVES and isinstance(source, fx.Node) and _awaits(source)


def gather_ahead(graph: fx.Graph) -> None:
    """Start every gather of a parameter one gather early, so that it runs behind the compute in between.

    One and not more: each gather in flight holds a whole parameter.
    """
    gathers = [node for node in graph.nodes if node.target is _GATHER and node.all_input_nodes[0].op == "placeholder"]
    for before, node in zip(gathers, gathers[1:], strict=False):
        wait = next(iter(before.users))
        if wait.target is _WAIT:
            wait.prepend(node)
