"""Extreme values and where they stand: the ranks agree on the value, then on the first place that holds it.

torch gives the first of equal values, and takes nan for more extreme than any number. A rank offers the place of its
own extreme value if that is the extreme of all; of the places offered, the first wins. A nan is offered as if it stood
in front of everything, so that the collective may treat it as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import all_reduce_over, aten, cast
from autoshard.patterns.ops._positions import positions, reshape_along, stretch_start
from autoshard.patterns.ops.reduction import reduced_dims, reduction_rule, sharded_dims
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin")
def _extreme(call: OpCall) -> Rule:
    """Values, if they are asked for, and indices; a sharded dim exchanges one of each twice."""
    dtype = call.operands[0].dtype
    place = call.results[-1]
    assert place is not None
    exchange = math.prod(place.shape) * (dtype.itemsize + place.dtype.itemsize)
    # Padding stands behind all elements, so that the first place is an element's even where all are as extreme as it.
    fill = -math.inf if "max" in call.op._schema.name else math.inf
    return reduction_rule(call, kinds=(None,), contiguous=True, local=_local_extreme, exchange=exchange, fill=fill)


def _local_extreme(call: LocalCall) -> Any:
    names = sharded_dims(call)
    if not names:
        return call.run()
    emit, (value,), dims = call.emit, call.operands, reduced_dims(call.call)
    dtype = value.dtype
    if dtype is torch.bool:
        value = cast(call, value, torch.uint8)
    if len(dims) != 1:  # all of them, as if they were one
        value = emit.reshape(value, [-1])
    largest = "max" in call.call.op._schema.name
    op = aten.max.dim if largest else aten.min.dim
    best, place = emit.call(op, value, dims[0] if len(dims) == 1 else 0)
    place = _global_index(call, place, dims)
    best, place = _global_extreme(call, best, place, names, "max" if largest else "min")
    place = emit.reshape(place, list(call.result_shape(-1)))
    if len(call.call.results) == 1:
        return place
    return emit.reshape(cast(call, best, dtype), list(call.result_shape())), place


def _global_index(call: LocalCall, place: Any, dims: Sequence[int]) -> Any:
    """A row-major index into the local dims `dims` as one into the whole dims."""
    emit, whole, local = call.emit, call.call.operands[0].shape, call.operand_shape(0)
    total, stride = None, 1
    for dim in reversed(dims):
        inner = emit.remainder(place, local[dim])
        place = emit.div(place, local[dim], rounding_mode="floor")
        if call.axes(f"d{dim}"):
            inner = inner + stretch_start(call, f"d{dim}", local[dim])
        inner = inner * stride
        total = inner if total is None else total + inner
        stride *= whole[dim]
    return total


def _global_extreme(call: LocalCall, best: Any, place: Any, names: Sequence[str], kind: str) -> tuple[Any, Any]:
    """The extreme value of all ranks, and the first place that holds it."""
    emit = call.emit
    last = math.prod(call.call.operands[0].shape)
    top = all_reduce_over(call, best, names, kind)
    behind = place + last  # behind all places of nan, and in front of no offer
    offer = emit.where(emit.eq(best, top), behind, 2 * last)
    number = best.dtype.is_floating_point
    if number:
        offer = emit.where(emit.isnan(best), place, offer)
    winner = all_reduce_over(call, offer, names, "min")
    if number:
        top = emit.masked_fill(top, winner < last, math.nan)
    return top, emit.remainder(winner, last)


@rule_maker("aten.value_selecting_reduction_backward")
def _selected_backward(call: OpCall) -> Rule:
    """Gradient of max, min, median along a dim: where that dim is sharded, a rank fills in what falls to it."""
    (result,) = call.results
    assert result is not None
    ndim = len(result.shape)
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)}
    target = [[name] for name in sizes]
    dim = call.arg("dim") % ndim if ndim else 0
    source = [[] if index == dim else names for index, names in enumerate(target)]
    if not call.arg("keepdim"):
        source = source[:dim] + source[dim + 1 :]
    name = [f"d{dim}"]
    return build(
        sizes, [source, source], [target], contiguous=name, linear=[{0}], local=_local_selected_backward, uneven=True
    )


def _local_selected_backward(call: LocalCall) -> Any:
    emit, shape = call.emit, list(call.result_shape())
    dim = call.arg("dim") % len(shape) if shape else 0
    if not call.axes(f"d{dim}"):
        return call.run(sizes=shape)
    gradient, index = call.operands
    if not call.arg("keepdim"):
        gradient, index = (emit.unsqueeze(value, dim) for value in (gradient, index))
    own = positions(call, f"d{dim}", shape[dim], gradient.device)
    selected = emit.eq(index, reshape_along(call, own, dim, len(shape)))
    return emit.where(selected, gradient, 0)
