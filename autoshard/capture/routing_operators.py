"""Operators that send rows to groups and back, as a mixture of experts does with tokens.

To rules for sorting and gathering, the order of sorted rows is just numbers. The operators of this file know that rows
go to groups and come back: ranks that hold some of the groups are sent the rows of these groups and no others.

Source: GShard 3.2, dispatch and combine; MegaBlocks 4 for groups of any size, without capacity or padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.capture.operators import define, define_backward

routing = torch.ops.autoshard


def _group(ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the route of rows, given the group of each row `[S]`, to where rows lie sorted by group.

    Returns:
        `order [S]`: the permutation that sorts the rows, stably; `places [S]`: the permutation that sorts the rows that
        arrive at this device, here the identity, as they arrive sorted; `splits [2, groups]`: the numbers of rows of
        each group that this device sends, and that arrive; `ends [groups]`, int32: the end of each group among the rows
        at this device.
    """
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
    """Return rows sorted by group `[S, ...]` of values `[T, ...]`, each of which becomes S / T rows in turn."""
    return values.index_select(0, order // (order.shape[0] // values.shape[0]) if order.shape[0] else order)


def _combine(rows: Tensor, order: Tensor, places: Tensor, splits: Tensor) -> Tensor:
    """Return rows that lie sorted by group `[S, ...]` in the order that they had before."""
    return torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, order, rows)


def _group_of_each(places: Tensor, ends: Tensor) -> Tensor:
    """Return the group of each of the rows at this device, which lie sorted by group."""
    return torch.searchsorted(ends, torch.arange(places.shape[0], dtype=ends.dtype, device=ends.device), right=True)


def _spread(table: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Return, for every row that lies sorted by group, the entry of its group in a table `[groups, ...]`."""
    return table.index_select(0, _group_of_each(places, ends))


def _collect(rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Return the sums of the rows of every group, `[groups, ...]`."""
    return rows.new_zeros(ends.shape[0], *rows.shape[1:]).index_add_(0, _group_of_each(places, ends), rows)


def _rows_like(values: Tensor, rows: Tensor, *_: Tensor) -> Tensor:
    """Return as many rows as `rows` has, each like a row of `values`."""
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


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = routing.combine(grad, *ctx.saved_tensors)
    if back.shape != ctx.shape:
        back = back.view(ctx.shape[0], -1, *ctx.shape[1:]).sum(1)
    return back, None, None, None


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return routing.dispatch(grad, *ctx.saved_tensors), None, None, None


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return routing.collect(grad, *ctx.saved_tensors), None, None


def _collect_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return routing.spread(grad, *ctx.saved_tensors), None, None


define_backward("spread", _keep, _spread_backward)
define_backward("collect", _keep, _collect_backward)
define_backward("dispatch", _keep, _dispatch_backward)
define_backward("combine", _keep, _combine_backward)
