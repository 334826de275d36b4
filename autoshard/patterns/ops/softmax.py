"""Softmax, its logarithm, and their gradients, over a dim that may be sharded.

Each rank takes maximum and sum of its stretch; what is exchanged has one number per row (vocabulary-parallel
cross-entropy).
"""

from __future__ import annotations

import math
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import (
    accumulation_dtype,
    aten,
    bind_named,
    factor_names,
    if_sharded,
    result_dtype,
)
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule


def _operand_dims(call: OpCall) -> str:
    """Dims of the tensor, the one of the softmax called `d`."""
    names = factor_names("b", len(call.operands[0].shape))
    if names:
        names[call.arg("dim")] = "d"
    return " ".join(names)


def _row_bytes(call: OpCall) -> int:
    """Bytes of one number per row, in the dtype that sums are taken in."""
    meta = call.operands[0]
    length = meta.shape[call.arg("dim")] if meta.shape else 1
    return math.prod(meta.shape) // max(length, 1) * accumulation_dtype(meta.dtype).itemsize


def _accumulated(call: LocalCall) -> list[Any]:
    """The operands in the dtype that sums are taken in."""
    return [value.to(accumulation_dtype(call.call.operands[0].dtype)) for value in call.operands]


def _row_sum(call: LocalCall, value: Any) -> Any:
    """The sum of every row, other ranks included."""
    return call.all_reduce(value.sum([call.arg("dim")], True), "d")


@if_sharded("d")
def _softmax(call: LocalCall) -> Any:
    (value,) = _accumulated(call)
    maximum = call.all_reduce(value.amax([call.arg("dim")], True), "d", "max")
    parts = (value - maximum).exp()
    result = parts / _row_sum(call, parts)
    if call.call.op is aten._safe_softmax.default:
        masked = maximum.eq(-math.inf)  # exp(-inf - -inf) is nan: a row that is masked out becomes zeros
        result = result.masked_fill(masked, 0.0)
    return result.to(result_dtype(call))


@if_sharded("d")
def _log_softmax(call: LocalCall) -> Any:
    """`value - log(sum(exp(value)))`, whose second term is known for a stretch from where its maximum is.

    The kernel of the whole operator finds a stretch's sum in one pass over it; maximum, exponentials and sum by
    themselves would take three times as many.
    """
    emit, dim, (value,) = call.emit, call.arg("dim"), _accumulated(call)
    maximum, place = value.max(dim, True)
    # At its maximum, a stretch's log-softmax is the maximum less the logarithm of the stretch's sum of exponentials.
    stretch_log = emit._log_softmax(value, dim, False).gather(dim, place)
    nothing = maximum.eq(-math.inf)  # of the row lies in this stretch: its sum is zero
    stretch_log = (maximum - stretch_log).masked_fill(nothing, -math.inf)
    largest = call.all_reduce(stretch_log, "d", "max")
    total = call.all_reduce((stretch_log - largest).exp(), "d")
    logarithm = largest + total.log()
    return (value - logarithm).to(result_dtype(call))


@rule_maker("aten._softmax", "aten._safe_softmax", local=_softmax)
@rule_maker("aten._log_softmax", local=_log_softmax)
def softmax(call: OpCall, local: LocalProgram) -> Rule:
    """Forward; the safe one gives zeros for rows that are masked out."""
    items, exchange, fill = _operand_dims(call), {"d": 2 * _row_bytes(call)}, {"d": -math.inf}
    return bind_named(call, {"self": items}, [items], exchange=exchange, local=local, uneven=True, fill=fill)


@if_sharded("d")
def _softmax_backward(call: LocalCall) -> Any:
    """`output · (gradient - sum(gradient · output))`."""
    gradient, output = _accumulated(call)
    parts = gradient * output
    result = parts.addcmul(output, _row_sum(call, parts), value=-1)
    return result.to(result_dtype(call))


@if_sharded("d")
def _log_softmax_backward(call: LocalCall) -> Any:
    """`gradient - exp(output) · sum(gradient)`."""
    gradient, output = _accumulated(call)
    parts = output.exp()
    result = gradient.addcmul(parts, _row_sum(call, gradient), value=-1)
    return result.to(result_dtype(call))


@rule_maker("aten._softmax_backward_data", local=_softmax_backward)
@rule_maker("aten._log_softmax_backward_data", local=_log_softmax_backward)
def softmax_backward(call: OpCall, local: LocalProgram) -> Rule:
    """Gradient of the operand; linear in the incoming gradient."""
    items = _operand_dims(call)
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
