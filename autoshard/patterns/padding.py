"""Padding of uneven shards, and its replacement where an operator would mix it into results.

An axis of n ranks that does not divide a factor of s steps gives each rank ceil(s / n) of them, the last ranks fewer or
none. All ranks run the same shapes: steps after the last true one are padding, which may hold anything. Where the
operator would mix padding into results, a neutral number replaces it, at positions computed from the rank's coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.patterns.local import LocalCall, emit_program
from autoshard.patterns.rule import Dims, OpCall, Rule, is_inexact
from autoshard.patterns.strategy import Choices, local_size, uneven_axis
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import EmitterWithShares

aten = torch.ops.aten

# Multiplication, range, addition and comparison in `_fill`.
MASK_VECTOR_OPS = 4
"""Number of vector operators per mask, for its price."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The replacement of the padding of one operand along one factor before an operator runs.

    Attributes:
        operand: position of the operand.
        factor: the padded factor.
        axis: the mesh axis that does not divide it.
        fill: the replacement.
    """

    operand: int
    factor: int
    axis: int
    fill: float


def padded_factors(rule: Rule, choices: Choices, mesh: MeshShape) -> dict[int, int]:
    """Return the padded factors of a rule without variants, each with the mesh axis that does not divide it."""
    axes = ((choice, uneven_axis(rule, choices, mesh, choice)) for choice in choices if choice >= 0)
    return {factor: axis for factor, axis in axes if axis is not None}


def masks(call: OpCall, rule: Rule, choices: Choices, mesh: MeshShape) -> list[Mask]:
    """Return the replacements before the operator runs: by the rule's fills, and by 0 for indices."""
    padded = padded_factors(rule, choices, mesh)
    if not padded:
        return []
    result = []
    # Integers may be indices, unless the operator is pointwise or only moves elements.
    indexes = not rule.free and torch.Tag.pointwise not in call.op.tags
    for position, (dims, meta) in enumerate(zip(rule.operands, call.operands, strict=True)):
        for factor, axis in padded.items():
            fill = rule.factors[factor].fill
            # The element at a padded index is padding of the result, but must exist.
            if fill is None and indexes and _is_integer(meta.dtype):
                fill = 0
            if fill is not None and any(factor in dim for dim in dims):
                result.append(Mask(position, factor, axis, _fill_value(fill, meta.dtype)))
    return result


def fill_operands(call: LocalCall) -> None:
    """Emit the replacement of padding that the operator would mix into its results; record where it is zero now."""
    values, zeros = list(call.operands), []
    needed = masks(call.call, call.rule, call.choices, call.mesh)
    for mask in needed:
        # Padding that is known to be zero needs no replacement by zeros.
        if mask.fill != 0 or not call.zeros[mask.operand]:
            dims = call.rule.operands[mask.operand]
            values[mask.operand] = _fill(call, values[mask.operand], dims, mask.factor, mask.axis, mask.fill)
    padded = padded_factors(call.rule, call.choices, call.mesh)
    filled = {(mask.operand, mask.factor): mask.fill == 0 for mask in needed}
    for position, (dims, known) in enumerate(zip(call.rule.operands, call.zeros, strict=True)):
        factors = [factor for dim in dims for factor in dim if factor in padded]
        zeros.append(all(filled.get((position, factor), known) for factor in factors))
    call.operands, call.zeros = tuple(values), tuple(zeros)


def emit_local(call: LocalCall) -> Any:
    """Emit the program of a rank for this call: the rule's own program, or the operator itself on the shards."""
    fill_operands(call)
    return emit_program(call)


def zero_padded_results(rule: Rule, padded: Collection[int], zeros: Sequence[bool]) -> tuple[bool, ...]:
    """Return, for every result, if all padding along some factors is known to be zero.

    It is zero where elements are only moved, and where the operator runs unchanged and is linear in all operands with
    the padded factor: a step that is zero in these is zero in the result, as long as other operands are finite.

    Args:
        rule: the rule, or its chosen variant.
        padded: the factors.
        zeros: for every operand, True if all of its padding is zero.
    """
    if not any(zeros) or (rule.local is not None and not rule.free):  # results of local programs have unknown padding
        return tuple(
            dims is not None and not any(factor in padded for dim in dims for factor in dim) for dims in rule.results
        )
    linear = frozenset().union(*rule.linear)

    def is_zero(factor: int) -> bool:
        having = {position for position, dims in enumerate(rule.operands) if any(factor in dim for dim in dims)}
        if not having or not all(zeros[position] for position in having):
            return False
        return rule.free or (having <= linear and any(group <= having for group in rule.linear))

    return tuple(
        dims is not None and all(is_zero(factor) for dim in dims for factor in dim if factor in padded)
        for dims in rule.results
    )


def without_padding(call: LocalCall, operand: int, value: Any, names: Sequence[str], fill: float) -> Any:
    """Return a value with the dims of an operand, with its padding along the factors `names` replaced.

    Args:
        call: the call.
        operand: position of the operand.
        value: its local value, or one with the same dims.
        names: the factors; those without padding are ignored.
        fill: the replacement; for integers, infinities become the ends of the range.
    """
    factors = [index for name in names for index in call.rule.indices(name)]
    return _replace_padding(call, value, call.rule.operands[operand], factors, fill)


def without_padded_steps(call: LocalCall, value: Any, dims: Sequence[str]) -> Any:
    """Return a value with its padding, along all factors in its dims, replaced by zeros.

    Args:
        call: the call.
        value: a local value, such as one number for every step of some factors.
        dims: the factors of every dim, major to minor, such as `"n"` or `"k s0"`; `""` for dims without padding.
    """
    placed = tuple(tuple(index for name in dim.split() for index in call.rule.indices(name)) for dim in dims)
    return _replace_padding(call, value, placed, [factor for dim in placed for factor in dim], 0.0)


def is_padded(call: LocalCall, names: Sequence[str]) -> bool:
    """Return True if a rank may hold padding along any of the factors `names`."""
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
    """Return the number of true steps of each rank of an axis, of the factor that the axis splits.

    Returns:
        Integers `[ranks]` on `device`; None where the axis divides the factor.
    """
    emit, factor, ranks = call.emit, call.choices[axis], call.mesh.sizes[axis]
    if padded_factors(call.rule, call.choices, call.mesh).get(factor) != axis:
        return None
    true = local_size(call.rule, call.choices, call.mesh, factor, axis)
    base = emit.base
    if isinstance(base, EmitterWithShares) and is_share(base, axis, true):
        shares = [base.share(base.shared.share_of_rank(rank)) for rank in range(base.shared.ranks)]
        # One tensor per share: a share is a symbol of the program, which a list of numbers cannot hold.
        return emit.cat([emit.full([1], share, dtype=torch.int64, device=device) for share in shares])
    block = local_size(call.rule, call.choices, call.mesh, factor)
    # Rank r has clamp(true - r * block, 0, block) steps.
    starts = emit.arange(ranks, device=device) * block
    return (true - starts).clamp(0, block)


def _replace_padding(call: LocalCall, value: Any, dims: Dims, factors: Sequence[int], fill: float) -> Any:
    """Return `value`, a tensor of these dims, with padding along all of the factors replaced."""
    for factor, axis in padded_factors(call.rule, call.choices, call.mesh).items():
        # A factor that the tensor lacks has no padding in it.
        if factor in factors and any(factor in dim for dim in dims):
            value = _fill(call, value, dims, factor, axis, _fill_value(fill, value.dtype))
    return value


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not is_inexact(dtype)


def _fill_value(fill: float, dtype: torch.dtype) -> float | int:
    """Return `fill` as a number of a dtype: for integers, infinities become the ends of the range."""
    # The fill of a maximum of booleans is minus infinity, which is False.
    if dtype == torch.bool:
        return int(fill > 0)
    if not _is_integer(dtype):
        return fill
    if math.isinf(fill):
        ends = torch.iinfo(dtype)
        return int(ends.max if fill > 0 else ends.min)
    return int(fill)


def _fill(call: LocalCall, value: Any, dims: Dims, factor: int, axis: int, fill: float) -> Any:
    """Return `value`, a tensor of these dims, with padding along a factor replaced by `fill`."""
    emit = call.emit
    # Steps left by the axes before this one, which divide the factor: padding comes after.
    true = local_size(call.rule, call.choices, call.mesh, factor, axis)
    if is_share(emit.base, axis, true):  # a share has no padding
        return value
    place = next(position for position, dim in enumerate(dims) if factor in dim)
    sizes = [local_size(call.rule, call.choices, call.mesh, each) for each in dims[place]]
    at = dims[place].index(factor)
    # The dim is (above, steps, below): padding is at the end of `steps`, for each step of `above`.
    above, steps, below = math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])
    # An explicit overload, as in `stretch_start`: unequal shares are found by mul.Tensor.
    start = emit.call(aten.mul.Tensor, emit.coordinate(axis), steps)
    outside = emit.arange(steps, device=value.device) + start >= true
    if above * below > 1:
        outside = outside.view([1, steps, 1]).expand([above, steps, below])
    shape = [above * steps * below, *[1] * (len(dims) - place - 1)]
    return value.masked_fill(outside.reshape(shape), fill)


def is_share(emit: object, axis: int, size: int) -> bool:
    """Return True if the ranks of an axis hold unequal shares of a size, which need no padding."""
    return isinstance(emit, EmitterWithShares) and emit.shared.axis == axis and emit.shared.is_whole(size)
