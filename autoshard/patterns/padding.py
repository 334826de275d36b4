"""Padding of uneven shards: what stands behind the end of a factor is kept out of the results.

An axis of n ranks that does not divide a factor of s steps gives each rank ceil(s / n) of them, the last ranks fewer or
none, and all ranks run the same shapes: behind the last true step stands padding, which may hold anything. Where the
operator would mix it into results, it is replaced by what does no harm, at places that follow from the rank's
coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from autoshard.patterns.rule import Dims, TensorMeta
from autoshard.patterns.strategy import local_size, uneven_axis

if TYPE_CHECKING:
    from autoshard.patterns.local import LocalCall

aten = torch.ops.aten


def padded_factors(call: LocalCall) -> dict[int, int]:
    """The factors that are padded, each with the mesh axis that does not divide it."""
    axes = ((choice, uneven_axis(call.rule, call.choices, call.mesh, choice)) for choice in call.choices if choice >= 0)
    return {factor: axis for factor, axis in axes if axis is not None}


def filled(call: LocalCall) -> tuple[Any, ...]:
    """The operands, padding replaced by what the rule asks for, and by 0 where the operator reads indices.

    Whatever an index points at in padding goes nowhere, but it has to be there.
    """
    padded = padded_factors(call)
    if not padded:
        return call.operands
    indexes = _indexes(call)
    values = list(call.operands)
    for position, (dims, meta) in enumerate(zip(call.rule.operands, call.call.operands, strict=True)):
        for factor, axis in padded.items():
            fill = call.rule.factors[factor].fill
            if fill is None and indexes and _is_integer(meta.dtype):
                fill = 0
            if fill is not None and any(factor in dim for dim in dims):
                values[position] = _fill(call, values[position], dims, factor, axis, _number(fill, meta))
    return tuple(values)


def without_padding(call: LocalCall, operand: int, value: Any, names: Sequence[str], fill: float) -> Any:
    """A value that lies as an operand does, its padding along the factors `names` replaced.

    Args:
        call: the call.
        operand: position of the operand.
        value: its local value, or one made from it.
        names: the factors; those that are not padded leave the value as it is.
        fill: what to put in the place of padding.
    """
    dims = call.rule.operands[operand]
    for factor, axis in padded_factors(call).items():
        one = call.rule.factors[factor]
        if (one.base in names or one.name in names) and any(factor in dim for dim in dims):
            value = _fill(call, value, dims, factor, axis, fill)
    return value


def _indexes(call: LocalCall) -> bool:
    """Whether integers may be positions: not where elements are computed one by one, or only change their place."""
    return not call.rule.free and torch.Tag.pointwise not in call.call.op.tags


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not dtype.is_floating_point and not dtype.is_complex


def _number(fill: float, meta: TensorMeta) -> float | int:
    """`fill` as a number of the operand's dtype: infinities become the ends of what integers hold."""
    if meta.dtype == torch.bool:
        return int(fill > 0)
    if not _is_integer(meta.dtype):
        return fill
    if math.isinf(fill):
        ends = torch.iinfo(meta.dtype)
        return int(ends.max if fill > 0 else ends.min)
    return int(fill)


def _fill(call: LocalCall, value: Any, dims: Dims, factor: int, axis: int, fill: float) -> Any:
    """`value`, a tensor of these dims, with padding along a factor replaced by `fill`."""
    emit = call.emit
    place = next(position for position, dim in enumerate(dims) if factor in dim)
    sizes = [local_size(call.rule, call.choices, call.mesh, one) for one in dims[place]]
    at = dims[place].index(factor)
    above, steps, below = math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])
    true = local_size(call.rule, call.choices, call.mesh, factor, axis)
    start = emit.call(aten.mul.Tensor, emit.coordinate(axis), steps)
    numbers = emit.call(aten.arange.default, steps, device=emit.device(value))
    outside = emit.call(aten.ge.Scalar, emit.call(aten.add.Tensor, numbers, start), true)
    if above * below > 1:
        outside = emit.call(aten.view.default, outside, [1, steps, 1])
        outside = emit.call(aten.expand.default, outside, [above, steps, below])
    shape = [above * steps * below, *[1] * (len(dims) - place - 1)]
    outside = emit.call(aten.reshape.default, outside, shape)
    return emit.call(aten.masked_fill.Scalar, value, outside, fill)
