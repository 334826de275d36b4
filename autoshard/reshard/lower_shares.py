"""Reshards of dims in unequal shares: the gather of the whole dim, and the cut of a share from it."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from autoshard.specs.emitter import Emitter, EmitterWithShares, collectives

aten = torch.ops.aten


def shared_axis(emit: Emitter, axis: int, shape: tuple[int, ...]) -> EmitterWithShares | None:
    """Return the emitter as one with shares, if a dim of the local shape is a share on this axis; None otherwise."""
    if not isinstance(emit, EmitterWithShares) or emit.shared.axis != axis:
        return None
    return emit if emit.shared.is_shared(emit.shape_with_shares(shape)) else None


def gather_shares(emit: Emitter, shares: EmitterWithShares, value: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Return the shares of all ranks, concatenated along a dim.

    Args:
        emit: emits the operators.
        shares: the same emitter.
        value: this rank's share.
        shape: its shape.
        dim: the shared dim.
    """
    shared = shares.shared
    # Elements of the dim per element of the shared size.
    steps = shares.shape_with_shares(shape)[dim].expr / shared.own_share  # type: ignore[attr-defined]
    # Collectives take equal parts: every rank pads its share to the largest one.
    padding = shares.share(sympy.expand(steps * (shared.largest_share - shared.own_share)))
    widths = [0] * (2 * (len(shape) - dim - 1)) + [0, padding]
    value = emit.call(aten.view.default, value, list(shape))
    value = emit.call(aten.constant_pad_nd.default, value, widths)
    padded = emit.shape(value)
    group = emit.group(shared.axis)
    value = emit.call(collectives.all_gather_into_tensor.default, value, shared.ranks, group)
    value = emit.call(collectives.wait_tensor.default, value)
    value = emit.call(aten.view.default, value, [shared.ranks, *padded])
    parts = []
    for rank in range(shared.ranks):
        part = emit.call(aten.select.int, value, 0, rank)
        length = shares.share(steps * shared.share_of_rank(rank))
        parts.append(emit.call(aten.slice.Tensor, part, dim, 0, length))
    return emit.call(aten.cat.default, parts, dim)


def cut_share(emit: Emitter, shares: EmitterWithShares, value: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Return this rank's share of a whole tensor of `shape`; other arguments as for `gather_shares`."""
    shared = shares.shared
    steps = shape[dim].expr / shared.whole  # type: ignore[attr-defined]
    value = emit.call(aten.view.default, value, list(shape))
    places = emit.call(aten.arange.default, shares.share(steps * shared.own_share), device=emit.device(value))
    places = emit.call(aten.add.Tensor, places, shares.share(steps * shared.share_before))
    return emit.call(aten.index_select.default, value, dim, places)
