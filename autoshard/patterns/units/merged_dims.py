"""Views that cut a dim into parts none of which an axis divides, though it divides the dim.

Eight query heads on eight devices are one shard each; as two key heads of four queries they are none. Backward of a
repetition of key heads (`[b, 8, s, d]` seen as `[b, 2, 4, s, d]`, summed over the four) would gather them for that. The
variant takes the dim as one factor and leaves the view a partial sum: a rank's own stretch among zeros.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._positions import positions
from autoshard.patterns.rule import Dims, Factor, OpCall, Rule
from autoshard.specs.axes import MeshShape


def with_merged_dims(rule: Rule, call: OpCall, mesh: MeshShape) -> Rule:
    """The rule of a view with a variant for every dim of its operand that only as a whole can be sharded.

    Args:
        rule: the rule of a view: one operand, one result, the elements in the same order.
        call: the view on whole tensors.
        mesh: the axes, whose sizes say which dims these are.

    Returns:
        The same rule where there are none, or where the elements are no numbers that add up.
    """
    (operand,) = call.operands
    if not (operand.dtype.is_floating_point or operand.dtype.is_complex):
        return rule
    blocked = [dim for dim in range(len(operand.shape)) if _needs_merge(rule, dim, mesh)]
    return replace(rule, variants=tuple(_merged_variant(rule, dim) for dim in blocked)) if blocked else rule


def _needs_merge(rule: Rule, dim: int, mesh: MeshShape) -> bool:
    """Return True if the largest axis that divides the dim divides none of its factors."""
    sizes = [rule.factors[factor].size for factor in rule.operands[0][dim]]
    axes = [size for size in mesh.sizes if size > 1 and math.prod(sizes) % size == 0]
    return len(sizes) > 1 and bool(axes) and all(size % max(axes) for size in sizes)


def _merged_variant(rule: Rule, dim: int) -> Rule:
    """The variant that shards one dim of the operand as a single factor, which the result lacks."""
    parts = rule.operands[0][dim]
    factors = tuple(replace(each, shardable=False) if at in parts else each for at, each in enumerate(rule.factors))
    whole = Factor(f"whole{dim}", math.prod(rule.factors[part].size for part in parts), contiguous=True)
    dims: Dims = tuple((len(factors),) if at == dim else own for at, own in enumerate(rule.operands[0]))
    return replace(
        rule,
        factors=(*factors, whole),
        operands=(dims,),
        local=lambda call: _scatter_into_zeros(call, dim),
        free=False,
    )


def _scatter_into_zeros(call: LocalCall, dim: int) -> Any:
    emit, (value,), name = call.emit, call.operands, f"whole{dim}"
    shape = list(value.shape)
    held = positions(call, name, shape[dim], value.device)
    shape[dim] *= call.share(name)
    whole = emit.index_copy(emit.new_zeros(value, shape), dim, held, value)
    return emit.reshape(whole, list(call.result_shape()))
