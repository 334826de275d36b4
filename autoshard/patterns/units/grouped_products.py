"""Hugging Face's product of groups of rows with a matrix each, which mixtures of experts call where
`aten._grouped_mm` does not serve (`transformers::grouped_mm_fallback`): rows, columns, contracted dim, and the groups.

The rows lie sorted by their group, and `offs` says where each group ends. A rank that holds a stretch of the rows cuts
the ends to its stretch. A rank that holds some of the groups turns the rows round until its own come first; the rows of
other groups are zero in its result, which is a partial sum. So expert weights may lie by expert, or by any of their
other dims, and are never gathered.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._positions import local_group_bounds, stretch_start
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

aten = torch.ops.aten


@rule_maker("transformers::grouped_mm_fallback")
def grouped_product(call: OpCall) -> Rule:
    """`(rows [i, k], weights [g, k, j], ends [g]) -> [i, j]`."""
    text = "i^ k, g^ k j, ends! -> i^ j"
    return bind(text, call, linear="0, 1", local=_product, uneven=True, fill={"g": None})


@rule_maker("transformers::grouped_mm_fallback_backward")
def grouped_product_backward(call: OpCall) -> Rule:
    """`(rows [i, k], weights [g, k, j], ends [g], gradient [i, j]) -> [i, k], [g, k, j]`."""
    text = "i^ k, g^ k j, ends!, i^ j -> i^ k, g^ k j"
    return bind(text, call, linear="3", local=_product_backward, uneven=True, fill={"g": None, "i": None})


def _product(call: LocalCall) -> Any:
    rows, weights, ends = call.operands
    ends = _ends_in_stretch(call, ends)
    if not call.axes("g"):
        return call.run(operands=[rows, weights, ends])
    start, ends = local_group_bounds(call, ends, call.operand_shape(1)[0])
    product = call.run(operands=[_rotate_rows(call, rows, start), weights, ends])
    return _rotate_rows(call, product, call.emit.call(aten.neg.default, start))


def _product_backward(call: LocalCall) -> Any:
    rows, weights, ends, gradient = call.operands
    ends = _ends_in_stretch(call, ends)
    if not call.axes("g"):
        return call.run(operands=[rows, weights, ends, gradient])
    start, ends = local_group_bounds(call, ends, call.operand_shape(1)[0])
    turned = [_rotate_rows(call, value, start) for value in (rows, gradient)]
    to_rows, to_weights = call.run(operands=[turned[0], weights, ends, turned[1]])
    return _rotate_rows(call, to_rows, call.emit.call(aten.neg.default, start)), to_weights


def _ends_in_stretch(call: LocalCall, ends: Any) -> Any:
    """Where the groups end, counted from the first row that this rank holds."""
    if not call.axes("i"):
        return ends
    length = call.operand_shape(0)[0]
    moved = call.emit.call(aten.sub.Tensor, ends, stretch_start(call, "i", length))
    clamped = call.emit.call(aten.clamp.default, moved, 0, length)
    return call.emit.call(aten._to_copy.default, clamped, dtype=call.emit.dtype(ends))


def _rotate_rows(call: LocalCall, rows: Any, start: Any) -> Any:
    """The rows with the one at `start` moved to the front, and those before it behind the last."""
    emit = call.emit
    length = emit.shape(rows)[0]
    order = emit.call(aten.arange.default, length, dtype=torch.int64, device=emit.device(start))
    order = emit.call(aten.remainder.Scalar, emit.call(aten.add.Tensor, order, start), length)
    return emit.call(aten.index_select.default, rows, 0, order)
