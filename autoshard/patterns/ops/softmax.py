"""Softmax, its logarithm, and their gradients, over a dim that may be sharded.

Each rank takes maximum and sum of its stretch; what is exchanged has one number per row (vocabulary-parallel
cross-entropy).
"""

from __future__ import annotations

import math
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import accumulation_dtype, aten, bind_named, cast, result_dtype
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule


def _operand_dims(call: OpCall, whole: str = "") -> str:
    """Dims of the tensor, the one of the softmax called `d`."""
    rank = len(call.operands[0].shape)
    names = [f"b{dim}" for dim in range(rank)]
    if rank:
        names[call.arg("dim")] = f"d{whole}"
    return " ".join(names)


def _row_bytes(call: OpCall) -> int:
    """Bytes of one number per row, in the dtype that sums are taken in."""
    meta = call.operands[0]
    length = meta.shape[call.arg("dim")] if meta.shape else 1
    return math.prod(meta.shape) // max(length, 1) * accumulation_dtype(meta.dtype).itemsize


@rule_maker("aten._softmax", "aten._log_softmax")
def softmax(call: OpCall) -> Rule:
    """Forward."""
    return _softmax_rule(call, _softmax if call.op is aten._softmax.default else _log_softmax)


def _softmax_rule(call: OpCall, local: LocalProgram) -> Rule:
    items, exchange, fill = _operand_dims(call), {"d": 2 * _row_bytes(call)}, {"d": -math.inf}
    return bind_named(call, {"self": items}, [items], exchange=exchange, local=local, uneven=True, fill=fill)


@rule_maker("aten._safe_softmax")
def safe_softmax(call: OpCall) -> Rule:
    """Softmax that gives zeros for rows that are masked out."""
    return _softmax_rule(call, _safe_softmax)


def _cast_operand(call: LocalCall) -> Any:
    return cast(call, call.operands[0], accumulation_dtype(call.call.operands[0].dtype))


def _maximum(call: LocalCall, value: Any) -> Any:
    """The largest number of every row, other ranks included."""
    return call.all_reduce(call.emit.amax(value, [call.arg("dim")], True), "d", "max")


def _exponentials(call: LocalCall, value: Any, maximum: Any) -> tuple[Any, Any]:
    """Exponentials of `value - maximum`, and their sum over the row."""
    emit = call.emit
    parts = emit.exp(value - maximum)
    return parts, call.all_reduce(emit.sum(parts, [call.arg("dim")], True), "d")


def _softmax(call: LocalCall) -> Any:
    if not call.axes("d"):
        return call.run()
    value = _cast_operand(call)
    parts, total = _exponentials(call, value, _maximum(call, value))
    return cast(call, parts / total, result_dtype(call))


def _safe_softmax(call: LocalCall) -> Any:
    if not call.axes("d"):
        return call.run()
    emit, value = call.emit, _cast_operand(call)
    maximum = _maximum(call, value)
    parts, total = _exponentials(call, value, maximum)
    result = parts / total
    masked = emit.eq(maximum, -math.inf)  # exp(-inf - -inf) is nan: such a row becomes zeros
    return cast(call, emit.masked_fill(result, masked, 0.0), result_dtype(call))


def _log_softmax(call: LocalCall) -> Any:
    """`value - log(sum(exp(value)))`, whose second term is known for a stretch from where its maximum is.

    The kernel of the whole operator finds a stretch's sum in one pass over it; maximum, exponentials and sum by
    themselves would take three times as many.
    """
    if not call.axes("d"):
        return call.run()
    emit, dim, value = call.emit, call.arg("dim"), _cast_operand(call)
    maximum, place = emit.max(value, dim, True)
    # At its maximum, a stretch's log-softmax is the maximum less the logarithm of the stretch's sum of exponentials.
    stretch_log = emit.gather(emit._log_softmax(value, dim, False), dim, place)
    nothing = emit.eq(maximum, -math.inf)  # of the row lies in this stretch: its sum is zero
    stretch_log = emit.masked_fill(maximum - stretch_log, nothing, -math.inf)
    largest = call.all_reduce(stretch_log, "d", "max")
    total = call.all_reduce(emit.exp(stretch_log - largest), "d")
    logarithm = largest + emit.log(total)
    return cast(call, value - logarithm, result_dtype(call))


@rule_maker("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(call: OpCall) -> Rule:
    """Gradient of the operand; linear in the incoming gradient."""
    items = _operand_dims(call)
    local = _softmax_backward if call.op is aten._softmax_backward_data.default else _log_softmax_backward
    return bind_named(
        call,
        {"grad_output": items, "output": items},
        [items],
        linear=[{"grad_output"}],
        exchange={"d": _row_bytes(call)},
        local=local,
        uneven=True,
        fill={"d": 0.0},
    )


def _row_sum(call: LocalCall, value: Any) -> Any:
    return call.all_reduce(call.emit.sum(value, [call.arg("dim")], True), "d")


def _cast_operands(call: LocalCall) -> tuple[Any, Any]:
    gradient, output = call.operands
    dtype = accumulation_dtype(call.call.operands[0].dtype)
    return cast(call, gradient, dtype), cast(call, output, dtype)


def _softmax_backward(call: LocalCall) -> Any:
    """`output · (gradient - sum(gradient · output))`."""
    if not call.axes("d"):
        return call.run()
    emit, (gradient, output) = call.emit, _cast_operands(call)
    parts = gradient * output
    result = emit.addcmul(parts, output, _row_sum(call, parts), value=-1)
    return cast(call, result, result_dtype(call))


def _log_softmax_backward(call: LocalCall) -> Any:
    """`gradient - exp(output) · sum(gradient)`."""
    if not call.axes("d"):
        return call.run()
    emit, (gradient, output) = call.emit, _cast_operands(call)
    parts = emit.exp(output)
    result = emit.addcmul(gradient, parts, _row_sum(call, gradient), value=-1)
    return cast(call, result, result_dtype(call))
