"""Positions in the whole tensor, for local programs that hold a stretch of one of its dims."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.specs.emitter import collectives


def stretch_start(call: LocalCall, name: str, stretch: int) -> Any:
    """Return the first position of this rank's stretch of the factor `name`: a 0-d int64 value.

    Args:
        call: the call; the factor is sharded, and contiguous.
        name: the factor.
        stretch: length of a rank's stretch.
    """
    # By name: a number would take mul.Scalar, and an emitter of unequal shares reads starts off mul.Tensor.
    return call.emit.call(torch.ops.aten.mul.Tensor, call.position(name), stretch)


def positions(call: LocalCall, name: str, stretch: int, device: torch.device | None) -> Any:
    """Positions in the whole factor `name` of the elements that this rank holds: int64 `[stretch]`."""
    counted = call.emit.arange(stretch, dtype=torch.int64, device=device)
    if not call.axes(name):
        return counted
    return counted + stretch_start(call, name, stretch)


def local_ends(call: LocalCall, ends: Any, name: str, length: int) -> Any:
    """Ends of groups along the factor `name`, counted in this rank's stretch of `length`: those outside are clamped."""
    moved = ends - stretch_start(call, name, length)
    return call.emit._to_copy(call.emit.clamp(moved, 0, length), dtype=ends.dtype)


def local_group_bounds(call: LocalCall, ends: Any, groups: int) -> tuple[Any, Any]:
    """Start of this rank's part of the factor `g`, groups that lie behind each other, and the ends of its groups.

    Groups that are padding are empty, and stand behind the last.

    Args:
        call: the call; `g` is sharded, and contiguous.
        ends: where every group ends.
        groups: how many groups a rank has.

    Returns:
        The start `[1]`, and the ends `[groups]`, counted from there.
    """
    emit, (count,) = call.emit, ends.shape
    held = positions(call, "g", groups, ends.device)
    bounds = emit.constant_pad_nd(ends, [1, 0])  # the first group starts at zero
    first = emit.clamp_max(emit.slice(held, 0, 0, 1), count)
    start = emit.index_select(bounds, 0, first)
    last = emit.index_select(ends, 0, emit.clamp_max(held, count - 1))
    return start, last - start


def reshape_along(call: LocalCall, value: Any, dim: int, ndim: int) -> Any:
    """A vector as a tensor of `ndim` dims that lies along `dim`; all other dims have size one."""
    shape = [1] * ndim
    shape[dim] = value.shape[0]
    return call.emit.reshape(value, shape)


def all_gather_stacked(call: LocalCall, value: Any, name: str) -> Any:
    """The values of all ranks that hold stretches of the factor `name`, in its order: `[share, *shape of value]`."""
    emit = call.emit
    value = emit.unsqueeze(value, 0)
    value = emit.clone(value, memory_format=torch.contiguous_format)
    # The first axis is the outermost: gathered last, its ranks come in the outer order.
    for axis in reversed(call.axes(name)):
        size = call.mesh.sizes[axis]
        pending = emit.call(collectives.all_gather_into_tensor.default, value, size, emit.group(axis))
        value = emit.call(collectives.wait_tensor.default, pending)
    return value


def local_positions(call: LocalCall, index: Any, name: str, stretch: int) -> tuple[Any, Any]:
    """Positions in the factor `name` counted from the start of this rank's stretch, and which lie outside of it.

    Args:
        call: the call; the factor is sharded, and contiguous.
        index: positions in the whole factor, none negative.
        name: the factor.
        stretch: length of a rank's stretch.
    """
    place = index - stretch_start(call, name, stretch)
    before, behind = place < 0, place >= stretch
    return place, call.emit.logical_or(before, behind)


def localize_index(call: LocalCall, index: Any, name: str, stretch: int, outside_at: int = 0) -> tuple[Any, Any]:
    """As `local_positions`, each position that lies outside replaced by `outside_at`."""
    place, outside = local_positions(call, index, name, stretch)
    return call.emit.masked_fill(place, outside, outside_at), outside
