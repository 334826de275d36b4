"""Rows sent to groups, as a mixture of experts does with tokens, as operators of their own.

To a rule for sorting or for gathering, the order of sorted rows is just numbers. To the operators of this file, it is
rows that go to groups and come back, so that ranks which hold some of the groups can be sent the rows of these and no
others.

Source: GShard 3.2, dispatch and combine; MegaBlocks 4 for groups of any size, without capacity or padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("autoshard", "FRAGMENT")
_ROUTE = "Tensor order, Tensor places, Tensor splits"
_library.define("group(Tensor ids, int groups) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"dispatch(Tensor values, {_ROUTE}) -> Tensor")
_library.define(f"combine(Tensor rows, {_ROUTE}) -> Tensor")
_library.define("spread(Tensor table, Tensor places, Tensor ends) -> Tensor")
_library.define("collect(Tensor rows, Tensor places, Tensor ends) -> Tensor")

routing = torch.ops.autoshard


def _group(ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How rows `[S]` with a group each are routed to where rows lie sorted by group.

    Returns:
        `order [S]`: which row comes when they are sorted, equal ones in order; `places [S]`: which of the rows that
        arrived at this device comes when they are sorted, here the first first, as they arrive sorted; `splits
        [2, groups]`: how many rows of each group this device sends, and how many arrive; `ends [groups]`, int32: where
        each group ends among the rows at this device.
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
    """Rows sorted by group `[S, ...]`, made of values `[T, ...]` of which each becomes S / T rows in turn."""
    return values.index_select(0, order // (order.shape[0] // values.shape[0]) if order.shape[0] else order)


def _dispatch_like(values: Tensor, order: Tensor, places: Tensor, splits: Tensor) -> Tensor:
    return values.new_empty(order.shape[0], *values.shape[1:])


def _combine(rows: Tensor, order: Tensor, places: Tensor, splits: Tensor) -> Tensor:
    """Rows that lie sorted by group `[S, ...]` in the order in which they were before."""
    return torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, order, rows)


def _combine_like(rows: Tensor, order: Tensor, places: Tensor, splits: Tensor) -> Tensor:
    return rows.new_empty(order.shape[0], *rows.shape[1:])


def _group_of_each(places: Tensor, ends: Tensor) -> Tensor:
    """The group of each of the rows at this device, which lie sorted by group."""
    return torch.searchsorted(ends, torch.arange(places.shape[0], dtype=ends.dtype, device=ends.device), right=True)


def _spread(table: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """For every row that lies sorted by group, the entry of its group in a table `[groups, ...]`."""
    return table.index_select(0, _group_of_each(places, ends))


def _spread_like(table: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    return table.new_empty(places.shape[0], *table.shape[1:])


def _collect(rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """The sums of the rows of every group, `[groups, ...]`."""
    return rows.new_zeros(ends.shape[0], *rows.shape[1:]).index_add_(0, _group_of_each(places, ends), rows)


def _collect_like(rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], *rows.shape[1:])


for _name, _program, _shapes in (
    ("group", _group, _group_like),
    ("dispatch", _dispatch, _dispatch_like),
    ("combine", _combine, _combine_like),
    ("spread", _spread, _spread_like),
    ("collect", _collect, _collect_like),
):
    _library.impl(_name, _program, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{_name}", _shapes, lib=_library)


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


torch.library.register_autograd("autoshard::spread", _spread_backward, setup_context=_keep, lib=_library)
torch.library.register_autograd("autoshard::collect", _collect_backward, setup_context=_keep, lib=_library)
torch.library.register_autograd("autoshard::dispatch", _dispatch_backward, setup_context=_keep, lib=_library)
torch.library.register_autograd("autoshard::combine", _combine_backward, setup_context=_keep, lib=_library)
