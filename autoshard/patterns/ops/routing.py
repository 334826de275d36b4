"""Rows that are sent to groups and come back, as tokens to the experts of a mixture (`capture/routing_operators.py`).

Every operator here has two ways to be split beside its other dims. By `source`, a rank routes its own tokens among all
groups, and sends nothing. By `group`, a rank holds a stretch of the groups besides: the ranks send each other the rows
of their groups in an all-to-all, and back in another, forward and backward alike. The two go together on a mesh: tokens
by one axis, tokens and groups by the other.

Source: GShard 3.2, expert parallelism; what is sent is not padded to a capacity, so that no token is dropped.
"""

from __future__ import annotations

from typing import Any

from autoshard.capture.routing import routing as routing  # defines the operators
from autoshard.patterns.build import build
from autoshard.patterns.exchanging import exchange_ops
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import if_sharded
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.specs.emitter import collectives

_CONTIGUOUS = ("source", "group")
_ROUTE = ([["source", "repeats"]], [["source", "repeats"]], ["ways", "counted"])
"""Dims of the order of rows, of their places on arrival, and of the counts of what is sent and arrives."""


@rule_maker("autoshard::group")
def _group(call: OpCall) -> Rule:
    """The ranks tell each other how many rows of each group they send."""
    (ids,) = call.operands
    groups = call.arg("groups")
    sizes = {"source": ids.shape[0], "repeats": 1, "group": groups, "ways": 2, "counted": groups}
    return build(
        sizes,
        [["source"]],
        [*_ROUTE, ["group"]],
        whole=["ways", "counted"],
        contiguous=_CONTIGUOUS,
        exchange={"group": [("exchange_of_each", 8 * groups)]},
        local=_local_group,
        routed=[1, 2, 3, 4],
    )


@if_sharded("group")
def _local_group(call: LocalCall) -> Any:
    order, places, splits, ends = call.run()
    (axis,), emit = call.axes("group"), call.emit
    ranks, groups = emit.mesh.sizes[axis], call.arg("groups")
    sent = splits.select(0, 0)  # how many rows of each group this rank sends
    each = [groups // ranks] * ranks
    received = emit.collective(collectives.all_to_all_single.default, sent, each, each, axis=axis)
    places, ends = emit.call(exchange_ops.arrivals.default, received, ranks, call.result_shape(1)[0])
    return order, places, emit.stack([sent, received]), ends


def _row_dims(meta: TensorMeta) -> dict[str, int]:
    """The dims of rows, which lie along the first dim of a tensor."""
    return {f"d{dim}": size for dim, size in enumerate(meta.shape[1:], start=1)}


@rule_maker("autoshard::dispatch", "autoshard::combine")
def _move_rows(call: OpCall) -> Rule:
    """Rows to the ranks of their groups, `(values [T, ...], route) -> [S, ...]`; or back to the ranks of their tokens.

    The rows that go back are as many as come back: `(rows [S, ...], route) -> [S, ...]`.
    """
    values, groups = call.operands[0], call.operands[-1].shape[1]
    dispatches = call.op is routing.dispatch.default
    dims = _row_dims(values)
    repeats = call.result.shape[0] // values.shape[0] if dispatches else 1
    sizes = {"source": values.shape[0], "repeats": repeats, "group": groups, **dims, "ways": 2, "counted": groups}
    return build(
        sizes,
        [["source", *dims], *_ROUTE],
        [[["source", "repeats"], *dims]],
        whole=["repeats", "ways", "counted"],
        contiguous=_CONTIGUOUS,
        exchange={"group": [("all_to_all", call.result.bytes)]},
        linear=[{0}],
        local=_local_dispatch if dispatches else _local_combine,
        uneven=list(dims),
        routed=[1, 2, 3, 4] if dispatches else [0, 1, 2, 3],
    )


@if_sharded("group")
def _local_dispatch(call: LocalCall) -> Any:
    values, order, places, splits = call.operands
    # `order` numbers rows, each token having so many of them behind each other.
    tokens = order.floor_divide(call.size("repeats"))
    arrived = _exchange_rows(call, values.index_select(0, tokens), splits, back=False)
    return arrived.index_select(0, places)


@if_sharded("group")
def _local_combine(call: LocalCall) -> Any:
    rows, order, places, splits = call.operands
    arrived = rows.index_copy(0, places, rows)  # a permutation writes every row
    returned = _exchange_rows(call, arrived, splits, back=True)
    return returned.index_copy(0, order, returned)


@rule_maker("autoshard::spread", "autoshard::collect")
def _group_table(call: OpCall) -> Rule:
    """Rows and a table with an entry for every group, of which one is made of the other.

    `spread(table [groups, ...], places, ends) -> rows [S, ...]`: a rank needs the entries of its own groups alone.
    `collect(rows [S, ...], places, ends) -> [groups, ...]`: each rank adds up the rows that it holds.
    """
    spreads = call.op is routing.spread.default
    table, rows = (call.operands[0], call.result) if spreads else (call.result, call.operands[0])
    dims = _row_dims(rows)
    sizes = {"source": rows.shape[0], "group": table.shape[0], **dims}
    operand, result = ("group", "source") if spreads else ("source", "group")
    return build(
        sizes,
        [[operand, *dims], ["source"], ["group"]],
        [[result, *dims]],
        contiguous=_CONTIGUOUS,
        linear=[{0}],
        uneven=list(dims),
        routed=[1, 2, 3] if spreads else [0, 1, 2],
    )


def _exchange_rows(call: LocalCall, rows: Any, splits: Any, back: bool) -> Any:
    (axis,), emit = call.axes("group"), call.emit
    return emit.call(exchange_ops.exchange.default, rows, splits, emit.mesh.sizes[axis], back, emit.group(axis))
