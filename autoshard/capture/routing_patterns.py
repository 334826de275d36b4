"""Stretches of a graph that send rows to groups and bring them back, found by what they do.

Models sort the group of every row, gather the rows in that order, count where each group ends, and put the rows back by
the inverse order. Such a stretch is replaced by the operators of `routing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from autoshard.capture.routing_operators import routing

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _RoutingMatch:
    """A stretch of a graph that sends rows to groups and brings them back.

    Attributes:
        ids: the group of every row.
        groups: their number.
        ends: nodes that say where groups end.
        gathered: nodes that gather rows in the order of their groups, and what they gather from.
        returned: nodes that put rows back, and the rows.
        looked_up: nodes that look up the group of every row in a table, such as a bias of each group, and the table.
    """

    ids: fx.Node
    groups: int
    ends: tuple[fx.Node, ...]
    gathered: tuple[tuple[fx.Node, fx.Node], ...]
    returned: tuple[tuple[fx.Node, fx.Node], ...]
    looked_up: tuple[tuple[fx.Node, fx.Node], ...]


def replace_routing(module: fx.GraphModule) -> None:
    """Put the operators of `routing.py` in the place of what sorts rows by group, gathers them, and puts them back.

    What does not do all of that stays as it is. The numbers stay the same, but for the order in which gradients of a
    value are added that became several rows. Regions under autocast or without gradients are modules of their own
    inside of the exported one.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for sort in [node for node in part.graph.nodes if node.op == "call_function" and node.target in _SORTS]:
                routed = _match_routing(sort)
                if routed is not None:
                    _replace(part.graph, sort, routed)


_SORTS = frozenset({aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable})
_GATHERS = frozenset({aten.index.Tensor, aten.index_select.default})
_WRITES = frozenset({aten.index_put_.default, aten.index_put.default})
_CASTS = frozenset({aten.to.dtype, aten._to_copy.default})


def _sorted_and_order(sort: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that are the sorted numbers, and those that are their order; none where it sorts downwards."""
    if _argument(sort, "descending", False):
        return [], []
    if sort.target in (aten.argsort.default, aten.argsort.stable):
        return [], [sort]
    items = [user for user in sort.users if user.target is getitem]
    return [item for item in items if item.args[1] == 0], [item for item in items if item.args[1] == 1]


def _match_routing(sort: fx.Node) -> _RoutingMatch | None:
    ids = sort.args[0]
    if not isinstance(ids, fx.Node) or ids.meta["val"].dim() != 1 or ids.meta["val"].dtype != torch.int64:
        return None
    values, orders = _sorted_and_order(sort)
    counted = [found for value in (*values, ids) for found in _ends_of(value)]
    gathered = [found for order in orders for found in _gathered_by(order)]
    inverses = [inverse for order in orders for inverse in _inverses(order)]
    returned = [(node, rows) for inverse in inverses for node, rows in _indexed_with(inverse)]
    numbers = {groups for _, groups in counted}
    if len(numbers) != 1 or not gathered or not returned:
        return None
    (groups,) = numbers
    tables = [(node, table) for value in values for node, table in _indexed_with(value)]
    tables = [(node, table) for node, table in tables if table.meta["val"].shape[0] == groups]
    return _RoutingMatch(
        ids, groups, tuple(node for node, _ in counted), tuple(gathered), tuple(returned), tuple(tables)
    )


def _ends_of(value: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Nodes that say where each of so many groups ends, counted from the groups of all rows."""
    for user in value.users:
        if user.target in _CASTS:
            yield from _ends_of(user)
        elif user.target is aten.histc.default:
            groups, low, high = (_argument(user, name, None) for name in ("bins", "min", "max"))
            if low == 0 and high == groups - 1:
                yield from ((total, groups) for total in user.users if _counts_up(total))


def _counts_up(node: fx.Node) -> bool:
    return node.target is aten.cumsum.default and node.meta["val"].dtype == torch.int32


def _gathered_by(order: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes that gather in this order from rows, or from values of which each becomes several rows."""
    rows = order.meta["val"].shape[0]
    for index, repeats in [(order, 1), *_floor_divisions(order)]:
        for node, values in _indexed_with(index):
            if values.meta["val"].shape[0] * repeats == rows:
                yield node, values


def _floor_divisions(order: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    for user in order.users:
        floored = user.target is aten.floor_divide.default or (
            user.target is aten.div.Tensor_mode and user.kwargs.get("rounding_mode") == "floor"
        )
        if floored and user.args[0] is order and isinstance(user.args[1], int):
            yield user, user.args[1]


def _indexed_with(index: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes that take the rows at `index` of another node, and that node."""
    for user in index.users:
        source = user.args[0] if user.target in _GATHERS else None
        if not isinstance(source, fx.Node) or source is index:
            continue
        if user.target is aten.index.Tensor:
            if list(user.args[1]) == [index]:  # type: ignore[arg-type]
                yield user, source
        elif user.args[1:] == (0, index):
            yield user, source


def _inverses(order: fx.Node) -> Iterator[fx.Node]:
    """Nodes that are the inverse of a permutation: its own order, or its numbers' places written at them."""
    for user in order.users:
        if user.target in _SORTS:
            yield from _sorted_and_order(user)[1]
        elif user.target in _WRITES and list(user.args[1]) == [order] and _counts_from_zero(user.args[2]):  # type: ignore[arg-type]
            yield user


def _counts_from_zero(node: Any) -> bool:
    return (
        isinstance(node, fx.Node) and node.target is aten.arange.default and node.args == (node.meta["val"].shape[0],)
    )


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    """An argument of an operator call by its name."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return default


def _replace(graph: fx.Graph, sort: fx.Node, routed: _RoutingMatch) -> None:
    with graph.inserting_before(sort):
        group = graph.call_function(routing.group.default, (routed.ids, routed.groups))
        route = tuple(graph.call_function(getitem, (group, index)) for index in range(4))
    group.meta = sort.meta | {"val": routing.group(routed.ids.meta["val"], routed.groups)}
    for index, node in enumerate(route):
        node.meta = sort.meta | {"val": group.meta["val"][index]}
    order, places, splits, ends = route
    for node in routed.ends:
        _substitute(node, ends)
    for node, rows in routed.returned:
        weights, rows = _weights_and_rows(rows, dict(routed.gathered))
        with graph.inserting_before(node):
            back = _call(graph, routing.combine.default, (rows, order, places, splits), node)
            if weights is not None:
                column = _call(graph, aten.unsqueeze.default, (weights, -1), node)
                back = _call(graph, aten.mul.Tensor, (back, column), node)
        _substitute(node, back)
    for node, values in routed.gathered:
        with graph.inserting_before(node):
            rows = _call(graph, routing.dispatch.default, (values, order, places, splits), node)
        _substitute(node, rows)
    for node, table in routed.looked_up:
        with graph.inserting_before(node):
            rows = _call(graph, routing.spread.default, (table, places, ends), node)
        _substitute(node, rows)
    for found in _sorted_and_order(sort)[1]:
        found.replace_all_uses_with(order)  # equal numbers may be sorted otherwise there


def _weights_and_rows(rows: fx.Node, gathered: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node | None, fx.Node]:
    """The weights that rows are multiplied by before they are put back, in the order in which they are there, and the
    rows without them; None without such.

    The product is the same after the rows are back. Then no weights are sent, and rows of half precision are not sent
    as the float32 that their weights make of them.
    """
    if rows.target is not aten.mul.Tensor or len(rows.users) > 1 or rows.meta["val"].dim() != 2:
        return None, rows
    for factor, other in (rows.args, reversed(rows.args)):
        if not isinstance(factor, fx.Node) or not isinstance(other, fx.Node):
            continue
        weights = gathered.get(factor.all_input_nodes[0]) if factor.target is aten.unsqueeze.default else None
        one_each = weights is not None and weights.meta["val"].shape == rows.meta["val"].shape[:1]
        if one_each and factor.args[1] in (1, -1) and other.meta["val"].shape == rows.meta["val"].shape:
            return weights, other
    return None, rows


def _call(graph: fx.Graph, op: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """A call where `like` stands, in its module."""
    node = graph.call_function(op, args)
    node.meta = like.meta | {"val": op(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))}
    return node


def _substitute(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
