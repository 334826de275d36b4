"""Padding of uneven shards: what stands behind the end of a factor is kept out of the results.

An axis of n ranks that does not divide a factor of s steps gives each rank ceil(s / n) of them, the last ranks fewer or
none, and all ranks run the same shapes: behind the last true step stands padding, which may hold anything. Where the
operator would mix it into results, it is replaced by what does no harm, at places that follow from the rank's
coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoshard.patterns.rule import Dims, OpCall, Rule
from autoshard.patterns.strategy import Choices, local_size, uneven_axis
from autoshard.patterns.unequal_shares import is_share, shares_of_ranks
from autoshard.specs.axes import MeshShape

if TYPE_CHECKING:
    from autoshard.patterns.local import LocalCall

aten = torch.ops.aten

MASK_VECTOR_OPS = 4
"""Operators on a vector that a mask takes before it is put in place, as `_fill` emits them."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What replaces padding of one operand along one factor before an operator runs.

    Attributes:
        operand: its position.
        factor: the factor that is padded.
        axis: the mesh axis that does not divide it.
        fill: the number.
    """

    operand: int
    factor: int
    axis: int
    fill: float


def padded_factors(rule: Rule, choices: Choices, mesh: MeshShape) -> dict[int, int]:
    """The factors of a rule without variants that are padded, each with the mesh axis that does not divide it."""
    axes = ((choice, uneven_axis(rule, choices, mesh, choice)) for choice in choices if choice >= 0)
    return {factor: axis for factor, axis in axes if axis is not None}


def masks(call: OpCall, rule: Rule, choices: Choices, mesh: MeshShape) -> list[Mask]:
    """Where padding is replaced before the operator runs: by what the rule asks for, by 0 where indices are read.

    Whatever an index points at in padding goes nowhere, but it has to be there.
    """
    found = []
    padded = padded_factors(rule, choices, mesh)
    indexes = bool(padded) and _may_index(call, rule)
    for position, (dims, meta) in enumerate(zip(rule.operands, call.operands, strict=True)) if padded else ():
        for factor, axis in padded.items():
            fill = rule.factors[factor].fill
            if fill is None and indexes and _is_integer(meta.dtype):
                fill = 0
            if fill is not None and any(factor in dim for dim in dims):
                found.append(Mask(position, factor, axis, _fill_value(fill, meta.dtype)))
    return found


def fill_padding(call: LocalCall) -> tuple[Any, ...]:
    """The operands, their padding replaced where it has to be; those that hold zeros there already are left alone."""
    values = list(call.operands)
    for mask in masks(call.call, call.rule, call.choices, call.mesh):
        if mask.fill != 0 or not call.zeros[mask.operand]:
            dims = call.rule.operands[mask.operand]
            values[mask.operand] = _fill(call, values[mask.operand], dims, mask.factor, mask.axis, mask.fill)
    return tuple(values)


def zero_padded_operands(call: LocalCall) -> tuple[bool, ...]:
    """For every operand, whether all of its padding is zero once `filled`."""
    padded = padded_factors(call.rule, call.choices, call.mesh)
    zero = {
        (mask.operand, mask.factor): mask.fill == 0 for mask in masks(call.call, call.rule, call.choices, call.mesh)
    }
    return tuple(
        all(zero.get((position, factor), known) for dim in dims for factor in dim if factor in padded)
        for position, (dims, known) in enumerate(zip(call.rule.operands, call.zeros, strict=True))
    )


def zero_padded_results(rule: Rule, padded: Collection[int], zeros: Sequence[bool]) -> tuple[bool, ...]:
    """For every result, whether all padding along some factors is known to be zero, given for which operands it is.

    So it is where elements only change their place, and where the operator runs as it stands and is linear in all that
    has the padded factor: a step in which all of that is zero is zero in the result (other operands being finite).

    Args:
        rule: the rule; of several variants, the one that was chosen.
        padded: the factors.
        zeros: for every operand, whether all of its padding is zero.
    """
    linear = frozenset().union(*rule.linear)

    def is_zero(factor: int) -> bool:
        having = {position for position, dims in enumerate(rule.operands) if any(factor in dim for dim in dims)}
        if not having or not all(zeros[position] for position in having):
            return False
        return rule.free or (having <= linear and any(group <= having for group in rule.linear))

    return tuple(
        dims is not None
        and all((rule.free or rule.local is None) and is_zero(one) for dim in dims for one in dim if one in padded)
        for dims in rule.results
    )


def without_padding(call: LocalCall, operand: int, value: Any, names: Sequence[str], fill: float) -> Any:
    """A value that lies as an operand does, its padding along the factors `names` replaced.

    Args:
        call: the call.
        operand: position of the operand.
        value: its local value, or one made from it.
        names: the factors; those that are not padded leave the value as it is.
        fill: what to put in the place of padding; infinities become the ends of what integers hold.
    """
    factors = [index for name in names for index in call.rule.indices(name)]
    return _replace_padding(call, value, call.rule.operands[operand], factors, fill)


def without_padded_steps(call: LocalCall, value: Any, dims: Sequence[str], fill: float = 0.0) -> Any:
    """A value whose padding is replaced along all factors that are named.

    Args:
        call: the call.
        value: a local value, such as one number for every step of some factors.
        dims: the factors of every dim, major to minor, such as `"n"` or `"k s0"`; `""` for dims that are left alone.
        fill: what to put in the place of padding.
    """
    placed = tuple(tuple(index for name in dim.split() for index in call.rule.indices(name)) for dim in dims)
    return _replace_padding(call, value, placed, [factor for dim in placed for factor in dim], fill)


def is_padded(call: LocalCall, names: Sequence[str]) -> bool:
    """Whether a rank may hold padding along any of the factors `names`."""
    padded = padded_factors(call.rule, call.choices, call.mesh)
    return any(
        index in padded
        and not is_share(
            call.emit.base, padded[index], local_size(call.rule, call.choices, call.mesh, index, padded[index])
        )
        for name in names
        for index in call.rule.indices(name)
    )


def steps_of_ranks(call: LocalCall, axis: int, device: torch.device) -> Any:
    """How many steps each rank of an axis has of the factor that the axis splits, padding left out.

    Args:
        call: the call.
        axis: of the mesh.
        device: where to make the numbers.

    Returns:
        Integers `[ranks]`; None where the axis divides what it splits.
    """
    emit, factor, ranks = call.emit, call.choices[axis], call.mesh.sizes[axis]
    if padded_factors(call.rule, call.choices, call.mesh).get(factor) != axis:
        return None
    true = local_size(call.rule, call.choices, call.mesh, factor, axis)
    shares = shares_of_ranks(emit.base, axis, true)
    if shares is not None:
        each = [emit.call(aten.full.default, [1], share, dtype=torch.int64, device=device) for share in shares]
        return emit.call(aten.cat.default, each)
    block = local_size(call.rule, call.choices, call.mesh, factor)
    starts = emit.call(aten.mul.Scalar, emit.call(aten.arange.default, ranks, device=device), block)
    return emit.call(aten.clamp.default, emit.call(aten.rsub.Scalar, starts, true), 0, block)


def _replace_padding(call: LocalCall, value: Any, dims: Dims, factors: Sequence[int], fill: float) -> Any:
    """`value`, a tensor of these dims, with padding along all of the factors replaced."""
    for factor, axis in padded_factors(call.rule, call.choices, call.mesh).items():
        if factor in factors and any(factor in dim for dim in dims):
            value = _fill(call, value, dims, factor, axis, _fill_value(fill, call.emit.dtype(value)))
    return value


def _may_index(call: OpCall, rule: Rule) -> bool:
    """Whether integers may be positions: not where elements are computed one by one, or only change their place."""
    return not rule.free and torch.Tag.pointwise not in call.op.tags


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not dtype.is_floating_point and not dtype.is_complex


def _fill_value(fill: float, dtype: torch.dtype) -> float | int:
    """`fill` as a number of a dtype: infinities become the ends of what integers hold."""
    if dtype == torch.bool:
        return int(fill > 0)
    if not _is_integer(dtype):
        return fill
    if math.isinf(fill):
        ends = torch.iinfo(dtype)
        return int(ends.max if fill > 0 else ends.min)
    return int(fill)


def _fill(call: LocalCall, value: Any, dims: Dims, factor: int, axis: int, fill: float) -> Any:
    """`value`, a tensor of these dims, with padding along a factor replaced by `fill`."""
    emit = call.emit
    true = local_size(call.rule, call.choices, call.mesh, factor, axis)
    if is_share(emit.base, axis, true):
        return value
    place = next(position for position, dim in enumerate(dims) if factor in dim)
    sizes = [local_size(call.rule, call.choices, call.mesh, one) for one in dims[place]]
    at = dims[place].index(factor)
    above, steps, below = math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])
    start = emit.call(aten.mul.Tensor, emit.coordinate(axis), steps)
    numbers = emit.call(aten.arange.default, steps, device=emit.device(value))
    outside = emit.call(aten.ge.Scalar, emit.call(aten.add.Tensor, numbers, start), true)
    if above * below > 1:
        outside = emit.call(aten.view.default, outside, [1, steps, 1])
        outside = emit.call(aten.expand.default, outside, [above, steps, below])
    shape = [above * steps * below, *[1] * (len(dims) - place - 1)]
    outside = emit.call(aten.reshape.default, outside, shape)
    return emit.call(aten.masked_fill.Scalar, value, outside, fill)
