"""Reductions of gradients: in buckets, each reduced by one large collective, and deferred over the runs of a step.

Deferred reductions are removed from the backward half, so that one reduction serves the summed gradients of many runs.
The last run adds its gradients to the sums of the others. Its compute hides the reductions, as in a single run.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from autoshard.reshard.collective_schedule import schedule, split_by_bytes
from autoshard.size import plain
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES, collectives

aten = torch.ops.aten
_WAIT = collectives.wait_tensor.default
_ALL_REDUCE = collectives.all_reduce.default
_REDUCE_SCATTER = collectives.reduce_scatter_tensor.default
_ALL_GATHER = collectives.all_gather_into_tensor.default
_RESHAPES = (aten.view.default, aten.reshape.default)
_LINEAR = (
    _WAIT,
    _ALL_GATHER,
    collectives.all_to_all_single.default,
    *_RESHAPES,
    aten.permute.default,
    aten.slice.Tensor,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.div.Scalar,
)
"""Operators that may follow a gradient's first reduction: linear, so they also apply to a sum of gradients.

A cast to the dtype of the parameter (`_CAST`) may follow, too, if the sum has the wider dtype of the two.
"""
_CAST = aten._to_copy.default

DeferredReduction = Literal["step", "microbatch"]
"""When to reduce gradients that are smaller once reduced: once per step, or with every microbatch.

Other gradients are always reduced once per step, since they take no more memory before.
"""


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
        """True if the pieces are gathered in the end, so that the gradient may be split anywhere."""
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
    vals: dict[tuple[object, ...], torch.Tensor] = {}
    for group in groups.values():
        for bucket in _buckets(group, limit):
            if len(bucket) > 1:
                _join_reductions(graph, bucket, vals)
    drop_unused(graph)


def drop_unused(graph: fx.Graph) -> None:
    """Drop every node that nothing uses; `eliminate_dead_code` would look through the whole graph first."""
    for node in reversed(graph.nodes):
        if not node.users and not is_border(node):
            graph.erase_node(node)


def is_border(node: fx.Node) -> bool:
    """Return True for a placeholder or the output, which stay although nothing uses them."""
    return node.op in ("placeholder", "output")


def _uncast(node: fx.Node) -> fx.Node:
    """Return the operand of a result that is cast after its reduction; the result itself otherwise."""
    source = node.all_input_nodes[0] if node.target is _CAST else node
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
    # A gradient whose size differs between ranks cannot share a buffer.
    return None if source.meta.get("dynamic") else _ReductionChain(source, node, tuple(stages))


def _is_earlier_stage(start: fx.Node, later_stages: Sequence[tuple[Any, tuple[Any, ...]]]) -> bool:
    """Return True if a collective may precede `later_stages`: at most one reduce-scatter, a gather only last."""
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
        # The last bucket is ready when hardly anything is left to compute. If it is tiny, the one before it ends late,
        # too: move its last gradients to the last bucket, so that the rest starts earlier.
        while len(before) > 1 and last_bytes + before[-1].bytes <= limit // 4:
            last_bytes += before[-1].bytes
            last.insert(0, before.pop())
    return buckets


def _join_reductions(
    graph: fx.Graph, bucket: Sequence[_ReductionChain], vals: dict[tuple[object, ...], torch.Tensor]
) -> None:
    """Replace the reductions of a bucket by one reduction of a joint buffer.

    Args:
        graph: changed in place.
        bucket: the reductions.
        vals: fake tensors of the graph, by dtype and shape.
    """

    def val(*shape: int) -> torch.Tensor:
        key = dtype, *map(plain, shape)
        if key not in vals:
            vals[key] = torch.empty(key[1:], dtype=dtype, device="meta")
        return vals[key]

    def call(shape: Sequence[int], op: Any, *args: Any) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta = dict(bucket[-1].result.meta)
        node.meta["val"] = val(*shape)
        return node

    dtype, cuts = bucket[0].source.meta["val"].dtype, bucket[0].pieces
    # A reduce-scatter returns the n-th row of its input to the n-th rank, so each row of the buffer holds that row of
    # all gradients. If the pieces are gathered again, they may be split anywhere: gradients are concatenated.
    rows = 1 if bucket[0].whole else cuts
    widths = [reduction.elements // rows for reduction in bucket]
    place = bucket[-1].source.next
    # Calls come after all placeholders.
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
        split.meta["val"] = [val(width) for width in widths]
        for index, reduction in enumerate(bucket):
            piece = call([widths[index]], operator.getitem, split, index)
            reshaped = call([], aten.view.default, piece, list(reduction.result.meta["val"].shape))
            reshaped.meta["val"] = reduction.result.meta["val"]
            users = list(reduction.result.users)
            reduction.result.replace_all_uses_with(reshaped)
            for user in users:
                _move_behind(user, reshaped)


def _move_behind(node: fx.Node, place: fx.Node) -> None:
    """Move the cast of a gradient after its new reduction, and its users after that."""
    if node.op != "output":
        place.append(node)
        for user in list(node.users):
            _move_behind(user, node)


@dataclass(frozen=True, slots=True, eq=False)
class PendingReductions:
    """Reductions of some results of a graph, to be run later.

    Attributes:
        graph: takes sums of these results and returns them reduced.
        places: positions of these among the graph's results.
    """

    graph: fx.Graph
    places: tuple[int, ...]

    def scheduled_graph(self) -> fx.Graph:
        """Return a copy of the graph with joined and scheduled reductions."""
        joined = fx.Graph()
        joined.output(joined.graph_copy(self.graph, {}))
        return _bucket_and_schedule(joined)


def take_reductions(graph: fx.Graph, places: Collection[int], reduced: DeferredReduction) -> PendingReductions | None:
    """Remove reductions of gradients from a graph, which then returns these gradients unreduced.

    Args:
        graph: the backward half, changed in place.
        places: positions of the results that may be returned unreduced.
        reduced: the time to reduce gradients that are smaller once reduced.

    Returns:
        The removed reductions; None if there are none.
    """
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    chains: dict[int, list[fx.Node]] = {}
    for place in sorted(places):
        chain = _reductions(results[place]) if isinstance(results[place], fx.Node) else []
        if chain and (reduced == "step" or _elements(results[place]) >= _elements(chain[0].all_input_nodes[0])):
            chains[place] = chain
    if not chains:
        return None
    # A separate graph, which runs once, on sums; the backward half runs with every microbatch.
    later = fx.Graph()
    sums = {place: later.placeholder(f"sum_{place}") for place in chains}
    reductions: list[fx.Node] = []
    for place, chain in chains.items():
        source = chain[0].all_input_nodes[0]
        results[place] = wide = _widen(graph, source, chain)
        sums[place].meta = dict(wide.meta)
        total = sums[place] if wide is source else _copy_cast(later, wide, sums[place], source.meta["val"].dtype)
        reductions.append(_copy_chain(later, chain, total))
    later.output(tuple(reductions))
    output.args = (tuple(results),)
    drop_unused(graph)
    return PendingReductions(later, tuple(chains))


def reduce_with_sums(graph: fx.Graph, unreduced: PendingReductions, places: Sequence[int]) -> fx.Graph:
    """Return the graph of the last run: it adds its gradients to the sums of earlier runs and reduces them.

    Args:
        graph: returns gradients unreduced.
        unreduced: the reductions.
        places: positions of these gradients among the graph's results.

    Returns:
        A graph that takes the sums after all other inputs and returns reduced gradients. The reductions are joined
        and overlap the remaining compute.
    """
    last = fx.Graph()
    results: list[fx.Node] = list(last.graph_copy(graph, {}))  # type: ignore[arg-type]
    *_, border = last.find_nodes(op="placeholder")
    sums = unreduced.graph.find_nodes(op="placeholder")
    inputs: list[fx.Node] = []
    for node in sums:
        with last.inserting_after(border):
            border = last.node_copy(node)
        inputs.append(border)
    output = unreduced.graph.output_node()
    for place, before, end in zip(places, inputs, output.args[0], strict=True):  # type: ignore[arg-type]
        source = results[place]
        chain = []
        while end.op != "placeholder":
            chain.append(end)
            end = end.all_input_nodes[0]
        # Right after the gradient, so that the reduction starts at once; never between placeholders.
        with last.inserting_after(border if source.op == "placeholder" else source):
            total = last.call_function(aten.add.Tensor, (before, source))
        total.meta = dict(source.meta)
        results[place] = _copy_chain(last, chain[::-1], total)
    last.output(tuple(results))
    return _bucket_and_schedule(last)


def _widen(graph: fx.Graph, source: fx.Node, chain: Sequence[fx.Node]) -> fx.Node:
    """Return a gradient before its reductions in the dtype of its sums: the wider of its own and the chain's result.

    So a sum is rounded to the dtype of the reduction once, not with every term.
    """
    casts = [node for node in chain if node.target is _CAST]
    dtype = source.meta["val"].dtype
    wide = torch.promote_types(dtype, chain[-1].meta["val"].dtype)
    return source if wide == dtype else _copy_cast(graph, casts[-1], source, wide)


def _copy_cast(graph: fx.Graph, cast: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Copy a cast, with another dtype, to after the operand `node`."""
    with graph.inserting_after(node):
        copied = graph.node_copy(cast, lambda _: node)
    copied.kwargs = {**cast.kwargs, "dtype": dtype}
    copied.meta["val"] = node.meta["val"].to(dtype)
    return copied


def _copy_chain(graph: fx.Graph, chain: Sequence[fx.Node], node: fx.Node) -> fx.Node:
    """Copy a chain of calls to after `node`, the operand of the first, in another graph; return the last copy."""
    for call in chain:
        with graph.inserting_after(node):
            node = graph.node_copy(call, lambda _, node=node: node)  # type: ignore[misc]
    return node


def _bucket_and_schedule(graph: fx.Graph) -> fx.Graph:
    bucket_reductions(graph)
    schedule(graph)
    graph.lint()
    return graph


def _reductions(result: fx.Node) -> list[fx.Node]:
    """Return the calls from a gradient's first sum over ranks to a result, in order, if they have no other users."""
    chain: list[fx.Node] = []
    # Length of the chain from the first reduction on.
    first = 0
    node = result
    while len(node.users) == 1 and len(node.all_input_nodes) == 1:
        if node.target in (_ALL_REDUCE, _REDUCE_SCATTER):
            if node.args[1] != "sum":
                # Other reductions, such as a maximum, do not apply to sums.
                break
            first = len(chain) + 1
        elif node.target not in _LINEAR and node.target is not _CAST:
            break
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[:first][::-1]


def _elements(node: fx.Node) -> int:
    return int(node.meta["val"].numel())
