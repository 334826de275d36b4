"""Operators that send rows to groups and back, as a mixture of experts does with tokens, and their pattern in a graph.

To rules for sorting and gathering, the order of sorted rows is arbitrary data. The operators of this file express that
rows are sent to groups and back, so that ranks with some of the groups get only the rows of these. Models sort the
group of every row, gather the rows in that order, count where each group ends, and restore the rows by the inverse
order; `replace_routing` replaces this by the operators.

Source: GShard 3.2, dispatch and combine; MegaBlocks 4 for groups of any size, without capacity or padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.capture.nodes import argument_of
from autoshard.operator_library import define, define_backward

aten = torch.ops.aten

routing = torch.ops.autoshard


def _group(ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the route of rows, given the group of each row `[S]`, to rows sorted by group.

    Returns:
        `order [S]`: the permutation that stably sorts the rows; `places [S]`: the permutation that sorts the rows that
        arrive at this device, here the identity, since they arrive sorted; `splits [2, groups]`: the numbers of rows of
        each group that this device sends, and receives; `ends [groups]`, int32: the end of each group among the rows at
        this device.
    """
    # Stable, so that a token's rows in one group keep their order on every mesh.
    ranked, order = ids.sort(stable=True)
    ends = torch.searchsorted(ranked, torch.arange(groups, device=ids.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    places = torch.arange(ids.shape[0], device=ids.device)
    return order, places, torch.stack((counts, counts)), ends.to(torch.int32)


def _group_like(ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole = ids.new_empty(ids.shape, dtype=torch.int64)
    splits = ids.new_empty((2, groups), dtype=torch.int64)
    return whole, torch.empty_like(whole), splits, ids.new_empty(groups, dtype=torch.int32)


def _dispatch(values: Tensor, order: Tensor, places: Tensor, splits: Tensor) -> Tensor:
    """Return rows `[S, ...]` sorted by group, of values `[T, ...]` that become S / T consecutive rows each."""
    # Without rows, the divisor would be 0.
    return values.index_select(0, order // (order.shape[0] // values.shape[0]) if order.shape[0] else order)


def _combine(rows: Tensor, order: Tensor, places: Tensor, splits: Tensor) -> Tensor:
    """Return rows `[S, ...]` that are sorted by group in their original order."""
    # Contiguous whatever the layout of `rows`, as in `_rows_like`.
    return torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, order, rows)


def _group_of_each(places: Tensor, ends: Tensor) -> Tensor:
    """Return the group of each row at this device; rows are sorted by group."""
    return torch.searchsorted(ends, torch.arange(places.shape[0], dtype=ends.dtype, device=ends.device), right=True)


def _spread(table: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Return, for every row in the order of groups, the entry of its group in a table `[groups, ...]`."""
    return table.index_select(0, _group_of_each(places, ends))


def _collect(rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Return the sums of the rows of every group, `[groups, ...]`."""
    return rows.new_zeros(ends.shape[0], *rows.shape[1:]).index_add_(0, _group_of_each(places, ends), rows)


def _rows_like(values: Tensor, rows: Tensor, *_: Tensor) -> Tensor:
    """Return a fake tensor with as many rows as `rows`, each like a row of `values`."""
    return values.new_empty(rows.shape[0], *values.shape[1:])


_ROUTE = "Tensor order, Tensor places, Tensor splits"
define("group(Tensor ids, int groups) -> (Tensor, Tensor, Tensor, Tensor)", _group, _group_like)
define(f"dispatch(Tensor values, {_ROUTE}) -> Tensor", _dispatch, _rows_like)
define(f"combine(Tensor rows, {_ROUTE}) -> Tensor", _combine, _rows_like)
define("spread(Tensor table, Tensor places, Tensor ends) -> Tensor", _spread, _rows_like)
define(
    "collect(Tensor rows, Tensor places, Tensor ends) -> Tensor",
    _collect,
    lambda rows, places, ends: _rows_like(rows, ends),
)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape
    ctx.save_for_backward(*inputs[1:])


def _differentiate_by(inverse: str) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the backward of an operator whose gradient is another operator on the same route."""

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        route = ctx.saved_tensors
        back = getattr(routing, inverse)(grad, *route)
        # The gradient of a value that was dispatched as several rows is the sum of theirs.
        if inverse == "combine" and back.shape != ctx.shape:
            back = back.view(ctx.shape[0], -1, *ctx.shape[1:]).sum(1)
        return back, *(None for _ in route)

    return gradients


for _name, _inverse in (("dispatch", "combine"), ("spread", "collect")):
    define_backward(_name, _keep, _differentiate_by(_inverse))
    define_backward(_inverse, _keep, _differentiate_by(_name))


@dataclass(frozen=True, slots=True)
class _RoutingMatch:
    """The nodes that send rows to groups and bring them back.

    Attributes:
        ids: the group of every row.
        groups: the number of groups.
        ends: nodes that compute where groups end.
        gathered: nodes that gather rows in the order of their groups -> the nodes that they gather from.
        returned: nodes that restore rows -> the rows.
        looked_up: nodes that look up the group of every row in a table, such as a bias per group -> the table.
    """

    ids: fx.Node
    groups: int
    ends: tuple[fx.Node, ...]
    gathered: tuple[tuple[fx.Node, fx.Node], ...]
    returned: tuple[tuple[fx.Node, fx.Node], ...]
    looked_up: tuple[tuple[fx.Node, fx.Node], ...]


def replace_routing(graph: fx.Graph) -> None:
    """Replace nodes that sort rows by group, gather them, and restore them, by routing operators.

    A sort without the other steps is not changed. Results are the same, except for the order in which the gradients of
    a value that became several rows are summed.
    """
    for sort in [node for node in graph.nodes if node.op == "call_function" and node.target in _SORTS]:
        match = _match_routing(sort)
        if match is not None:
            _replace(graph, sort, match)


_SORTS = frozenset({aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable})
_GATHERS = frozenset({aten.index.Tensor, aten.index_select.default})
_WRITES = frozenset({aten.index_put_.default, aten.index_put.default})
_CASTS = frozenset({aten.to.dtype, aten._to_copy.default})


def _sorted_and_order(sort: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes of the sorted numbers and those of their order; empty lists for a descending sort."""
    if argument_of(sort, "descending", False):
        return [], []
    if sort.target in (aten.argsort.default, aten.argsort.stable):
        return [], [sort]
    results = [user for user in sort.users if user.target is getitem]
    return [result for result in results if result.args[1] == 0], [result for result in results if result.args[1] == 1]


def _match_routing(sort: fx.Node) -> _RoutingMatch | None:
    ids = sort.args[0]
    if not isinstance(ids, fx.Node) or ids.meta["val"].dim() != 1 or ids.meta["val"].dtype != torch.int64:
        return None
    values, orders = _sorted_and_order(sort)
    counted = [end for value in (*values, ids) for end in _ends_of(value)]
    gathered = [end for order in orders for end in _gathered_by(order)]
    inverses = [inverse for order in orders for inverse in _inverses(order)]
    returned = [(node, rows) for inverse in inverses for node, rows in _indexed_with(inverse)]
    # A sort with different numbers of groups, or none, is no routing.
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
    """Yield the nodes that compute the end of each group from the groups of all rows, with the number of groups."""
    for user in value.users:
        if user.target in _CASTS:
            yield from _ends_of(user)
        elif user.target is aten.histc.default:
            groups, low, high = (argument_of(user, name, None) for name in ("bins", "min", "max"))
            if low == 0 and high == groups - 1:
                for total in user.users:
                    if total.target is aten.cumsum.default and total.meta["val"].dtype == torch.int32:
                        yield total, groups


def _gathered_by(order: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the nodes that gather in this order from rows, or from values that become several rows each."""
    # A token of k experts has k consecutive rows: row // k is its index.
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
    """Yield the nodes that take the rows at `index` of another node, with that node."""
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
    """Yield the nodes that are the inverse of a permutation: its argsort, or `arange` written at its indices."""
    for user in order.users:
        if user.target in _SORTS:
            yield from _sorted_and_order(user)[1]
        elif user.target in _WRITES and list(user.args[1]) == [order] and _counts_from_zero(user.args[2]):  # type: ignore[arg-type]
            yield user


def _counts_from_zero(node: Any) -> bool:
    return (
        isinstance(node, fx.Node) and node.target is aten.arange.default and node.args == (node.meta["val"].shape[0],)
    )


def _replace(graph: fx.Graph, sort: fx.Node, match: _RoutingMatch) -> None:
    with graph.inserting_before(sort):
        group = graph.call_function(routing.group.default, (match.ids, match.groups))
        route = tuple(graph.call_function(getitem, (group, index)) for index in range(4))
    group.meta = sort.meta | {"val": routing.group(match.ids.meta["val"], match.groups)}
    for index, node in enumerate(route):
        node.meta = sort.meta | {"val": group.meta["val"][index]}
    order, places, splits, ends = route
    for node in match.ends:
        _substitute(node, ends)
    # Returned rows first: their weights are found by the nodes that gather them, which are replaced next.
    for node, rows in match.returned:
        weights, rows = _weights_and_rows(rows, dict(match.gathered))
        with graph.inserting_before(node):
            back = _call(graph, routing.combine.default, (rows, order, places, splits), node)
            if weights is not None:
                column = _call(graph, aten.unsqueeze.default, (weights, -1), node)
                back = _call(graph, aten.mul.Tensor, (back, column), node)
        _substitute(node, back)
    for node, values in match.gathered:
        with graph.inserting_before(node):
            rows = _call(graph, routing.dispatch.default, (values, order, places, splits), node)
        _substitute(node, rows)
    for node, table in match.looked_up:
        with graph.inserting_before(node):
            rows = _call(graph, routing.spread.default, (table, places, ends), node)
        _substitute(node, rows)
    for sort_order in _sorted_and_order(sort)[1]:
        sort_order.replace_all_uses_with(order)  # an unstable sort may order equal numbers differently


def _weights_and_rows(rows: fx.Node, gathered: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node | None, fx.Node]:
    """Return the weights, in the order before the sort, by which `rows` were multiplied, and the rows without."""
    # The product is the same after the rows are restored. Then no weights are sent, and rows of half precision are not
    # sent as float32, the dtype of their product with weights.
    if rows.target is not aten.mul.Tensor or len(rows.users) > 1 or rows.meta["val"].dim() != 2:
        return None, rows
    for factor, values in (rows.args, reversed(rows.args)):
        if not isinstance(factor, fx.Node) or not isinstance(values, fx.Node):
            continue
        weights = gathered.get(factor.all_input_nodes[0]) if factor.target is aten.unsqueeze.default else None
        is_per_row = weights is not None and weights.meta["val"].shape == rows.meta["val"].shape[:1]
        if is_per_row and factor.args[1] in (1, -1) and values.meta["val"].shape == rows.meta["val"].shape:
            return weights, values
    return None, rows


def _call(graph: fx.Graph, op: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """Return a call with the meta of `like`."""
    node = graph.call_function(op, args)
    node.meta = like.meta | {"val": op(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))}
    return node


def _substitute(node: fx.Node, replacement: fx.Node) -> None:
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)
