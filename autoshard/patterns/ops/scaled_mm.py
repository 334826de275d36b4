"""Products of matrices in eight bits, with one scale for all of a matrix, or one per row and one per column.

Where the result has eight bits itself, or is scaled in its turn, it is rounded too early to be part of a sum.
"""

from __future__ import annotations

import math
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.matmul import keep_on_first_rank, unit_sizes
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta

_UNIT = 16
"""Kernels take so many elements of a row at a time."""

_ONE, _PER_ROW = 0, 1
"""How `_scaled_mm_v2` numbers its ways to scale."""


@rule_maker("aten._scaled_mm")
def _scaled_mm(call: OpCall) -> Rule | None:
    rounded = call.arg("scale_result") is not None
    return _product(call, call.arg("scale_a"), call.arg("scale_b"), rounded)


@rule_maker("aten._scaled_mm_v2")
def _scaled_mm_v2(call: OpCall) -> Rule | None:
    """Scales in lists, of which only plain ones split along with the rows: no blocks, nothing swizzled."""
    ways = {call.arg("recipe_a"), call.arg("recipe_b")}
    swizzled = any((*call.arg("swizzle_a"), *call.arg("swizzle_b")))
    if ways not in ({(_ONE,)}, {(_PER_ROW,)}) or swizzled or call.arg("contraction_dim"):
        return None
    (scale_a,), (scale_b,) = call.arg("scale_a"), call.arg("scale_b")
    return _product(call, scale_a, scale_b, rounded=False)


def _product(call: OpCall, scale_a: TensorMeta, scale_b: TensorMeta, rounded: bool) -> Rule | None:
    """The rule of a product; None where the scales are those of blocks."""
    (result,) = call.results
    assert result is not None
    single = math.prod(scale_a.shape) == math.prod(scale_b.shape) == 1
    if not single and (scale_a.shape, scale_b.shape) != ((result.shape[0], 1), (1, result.shape[1])):
        return None
    rows, columns = ("i 1", "1 (j j_lane!)") if not single else (_scalar_dims(scale_a), _scalar_dims(scale_b))
    operands = ["i (k k_lane!)", "(k k_lane!) (j j_lane!)", rows, columns]
    if call.arg("bias") is not None:
        operands.append("(j j_lane!)")
    operands += [_scalar_dims(meta) for meta in call.operands[len(operands) :]]
    return bind(
        f"{', '.join(operands)} -> i (j j_lane!)",
        call,
        whole=["k"] if rounded or result.dtype.itemsize == 1 else [],
        sizes=unit_sizes(call, _UNIT),
        local=_local,
    )


def _scalar_dims(meta: TensorMeta) -> str:
    """The dims of a tensor that holds one number."""
    return " ".join("1" * len(meta.shape))


def _local(call: LocalCall) -> Any:
    """Kernels want the first matrix by rows and the second by columns, however the shards came to lie."""
    emit = call.emit
    values = keep_on_first_rank(call, 4, ["k"]) if call.arg("bias") is not None else list(call.operands)
    values[0] = emit.contiguous(values[0])
    columns = emit.contiguous(emit.t(values[1]))
    values[1] = emit.t(columns)
    return call.run(operands=values)
