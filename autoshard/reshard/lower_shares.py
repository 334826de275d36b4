"""Reshards of what lies in shares of different length: gathered whole, and cut out of the whole."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from autoshard.specs.emitter import Emitter, EmitterWithShares, collectives

aten = torch.ops.aten


def shared_axis(emit: Emitter, axis: int, shape: tuple[int, ...]) -> EmitterWithShares | None:
    """What the emitter knows of shares, if a local shape is one on this axis."""
    if not isinstance(emit, EmitterWithShares) or emit.shared.axis != axis:
        return None
    return emit if emit.shared.is_shared(emit.shape_with_shares(shape)) else None


def gather_shares(emit: Emitter, knows: EmitterWithShares, value: Any, shape: tuple[int, ...], dim: int) -> Any:
    """The shares of all ranks one behind the other.

    Every rank sends as much as the one with the most: collectives take equal parts.

    Args:
        emit: where operators go.
        knows: the same, for what it knows of shares.
        value: a rank's share.
        shape: its shape.
        dim: along which shares lie.
    """
    shared = knows.shared
    steps = knows.shape_with_shares(shape)[dim].expr / shared.own_share  # type: ignore[attr-defined]  # of the dim, for one of what is shared
    widths = [0] * (2 * (len(shape) - dim - 1)) + [
        0,
        knows.share(sympy.expand(steps * (shared.largest_share - shared.own_share))),
    ]
    value = emit.call(aten.view.default, value, list(shape))
    value = emit.call(aten.constant_pad_nd.default, value, widths)
    padded = emit.shape(value)
    group = emit.group(shared.axis)
    value = emit.call(collectives.all_gather_into_tensor.default, value, shared.ranks, group)
    value = emit.call(collectives.wait_tensor.default, value)
    value = emit.call(aten.view.default, value, [shared.ranks, *padded])
    parts = [
        emit.call(
            aten.slice.Tensor,
            emit.call(aten.select.int, value, 0, rank),
            dim,
            0,
            knows.share(steps * shared.share_of_rank(rank)),
        )
        for rank in range(shared.ranks)
    ]
    return emit.call(aten.cat.default, parts, dim)


def cut_share(emit: Emitter, knows: EmitterWithShares, value: Any, shape: tuple[int, ...], dim: int) -> Any:
    """This rank's share of a whole tensor.

    Args:
        emit, knows: as for `gather_shares`.
        value: the whole tensor.
        shape: its shape.
        dim: along which shares lie.
    """
    shared = knows.shared
    steps = shape[dim].expr / shared.whole  # type: ignore[attr-defined]
    value = emit.call(aten.view.default, value, list(shape))
    places = emit.call(aten.arange.default, knows.share(steps * shared.own_share), device=emit.device(value))
    places = emit.call(aten.add.Tensor, places, knows.share(steps * shared.share_before))
    return emit.call(aten.index_select.default, value, dim, places)
