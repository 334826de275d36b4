"""Rows that are sent to groups and come back, as tokens to the experts of a mixture (`capture/routing_operators.py`).

Every operator here has two ways to be split beside its other dims. By `source`, a rank routes its own tokens among all
groups, and sends nothing. By `group`, a rank holds a stretch of the groups besides: the ranks send each other the rows
of their groups in an all-to-all, and back in another, forward and backward alike. The two go together on a mesh: tokens
by one axis, tokens and groups by the other.

Source: GShard 3.2, expert parallelism; what is sent is not padded to a capacity, so that no token is dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.capture.routing_operators import routing as routing  # defines the operators
from autoshard.patterns.build import build
from autoshard.patterns.exchanging import exchange_ops
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.specs.emitter import collectives

aten = torch.ops.aten

_CONTIGUOUS = ("source", "group")
_ROUTE = ([["source", "repeats"]], [["source", "repeats"]], [["ways"], ["counted"]])
"""Dims of the order of rows, of their places on arrival, and of the counts of what is sent and arrives."""


@rule_maker("autoshard::group")
def _group(call: OpCall) -> Rule:
    """The ranks tell each other how many rows of each group they send."""
    (ids,) = call.operands
    groups = call.arg("groups")
    sizes = {"source": ids.shape[0], "repeats": 1, "group": groups, "ways": 2, "counted": groups}
    return build(
        sizes,
        [[["source"]]],
        [*_ROUTE, [["group"]]],
        whole=["ways", "counted"],
        contiguous=_CONTIGUOUS,
        exchange={"group": [("exchange_of_each", 8 * groups)]},
        local=_local_group,
        routed=[1, 2, 3, 4],
    )


def _local_group(call: LocalCall) -> Any:
    order, places, splits, ends = call.run()
    if not call.axes("group"):
        return order, places, splits, ends
    (axis,), emit = call.axes("group"), call.emit
    ranks, groups = emit.mesh.sizes[axis], call.arg("groups")
    sent = emit.select(splits, 0, 0)  # how many rows of each group this rank sends
    each = [groups // ranks] * ranks
    received = emit.call(collectives.all_to_all_single.default, sent, each, each, emit.group(axis))
    received = emit.call(collectives.wait_tensor.default, received)
    places, ends = emit.call(exchange_ops.arrivals.default, received, ranks, call.result_shape(1)[0])
    return order, places, emit.stack([sent, received]), ends


@rule_maker("autoshard::dispatch")
def _dispatch(call: OpCall) -> Rule:
    """`(values [T, ...], route) -> [S, ...]`: rows to the ranks of their groups."""
    values, _, _, splits = call.operands
    (rows,) = call.results
    assert rows is not None
    dims = [f"d{dim}" for dim in range(1, len(values.shape))]
    sizes = {
        "source": values.shape[0],
        "repeats": rows.shape[0] // values.shape[0],
        "group": splits.shape[1],
        **dict(zip(dims, values.shape[1:], strict=True)),
        "ways": 2,
        "counted": splits.shape[1],
    }
    inner = [[name] for name in dims]
    return build(
        sizes,
        [[["source"], *inner], *_ROUTE],
        [[["source", "repeats"], *inner]],
        whole=["repeats", "ways", "counted"],
        contiguous=_CONTIGUOUS,
        exchange={"group": [("all_to_all", rows.bytes)]},
        linear=[{0}],
        local=_local_dispatch,
        uneven=dims,
        routed=[1, 2, 3, 4],
    )


def _local_dispatch(call: LocalCall) -> Any:
    if not call.axes("group"):
        return call.run()
    values, order, places, splits = call.operands
    emit = call.emit
    # `order` numbers rows, each token having so many of them behind each other.
    tokens = emit.floor_divide(order, call.size("repeats"))
    arrived = _exchange_rows(call, emit.index_select(values, 0, tokens), splits, back=False)
    return emit.index_select(arrived, 0, places)


@rule_maker("autoshard::combine")
def _combine(call: OpCall) -> Rule:
    """`(rows [S, ...], route) -> [S, ...]`: rows back to the ranks of their tokens."""
    rows, _, _, splits = call.operands
    dims = [f"d{dim}" for dim in range(1, len(rows.shape))]
    sizes = {
        "source": rows.shape[0],
        "repeats": 1,
        "group": splits.shape[1],
        **dict(zip(dims, rows.shape[1:], strict=True)),
        "ways": 2,
        "counted": splits.shape[1],
    }
    moved = [["source"], *([name] for name in dims)]
    return build(
        sizes,
        [moved, *_ROUTE],
        [moved],
        whole=["ways", "counted"],
        contiguous=_CONTIGUOUS,
        exchange={"group": [("all_to_all", rows.bytes)]},
        linear=[{0}],
        local=_local_combine,
        uneven=dims,
        routed=[0, 1, 2, 3],
    )


def _local_combine(call: LocalCall) -> Any:
    if not call.axes("group"):
        return call.run()
    rows, order, places, splits = call.operands
    arrived = call.emit.index_copy(rows, 0, places, rows)  # a permutation writes every row
    returned = _exchange_rows(call, arrived, splits, back=True)
    return call.emit.index_copy(returned, 0, order, returned)


@rule_maker("autoshard::spread")
def _spread(call: OpCall) -> Rule:
    """`(table [groups, ...], places, ends) -> rows [S, ...]`: a rank needs the entries of its own groups alone."""
    return _group_table_rule(call, call.operands[0], rows=call.results[0], routed=[1, 2, 3])


@rule_maker("autoshard::collect")
def _collect(call: OpCall) -> Rule:
    """`(rows [S, ...], places, ends) -> [groups, ...]`: each rank adds up the rows that it holds."""
    return _group_table_rule(call, call.results[0], rows=call.operands[0], routed=[0, 1, 2])


def _group_table_rule(call: OpCall, table: TensorMeta | None, rows: TensorMeta | None, routed: list[int]) -> Rule:
    """Rows and a table with an entry for every group, of which one is made of the other."""
    assert table is not None
    assert rows is not None
    dims = [f"d{dim}" for dim in range(1, len(rows.shape))]
    sizes = {"source": rows.shape[0], "group": table.shape[0], **dict(zip(dims, rows.shape[1:], strict=True))}
    inner = [[name] for name in dims]
    tensors = [[["group"], *inner], [["source"], *inner]]
    operand, result = tensors if 0 not in routed else reversed(tensors)
    return build(
        sizes,
        [operand, [["source"]], [["group"]]],
        [result],
        contiguous=_CONTIGUOUS,
        linear=[{0}],
        uneven=dims,
        routed=routed,
    )


def _exchange_rows(call: LocalCall, rows: Any, splits: Any, back: bool) -> Any:
    (axis,), emit = call.axes("group"), call.emit
    return emit.call(exchange_ops.exchange.default, rows, splits, emit.mesh.sizes[axis], back, emit.group(axis))
