"""Variance and deviation over sharded dims, in two passes: the mean of all first, then the deviations from it.

Sums of squares minus the square of the sum would need one exchange less, and lose all digits where the mean is large.
"""

from __future__ import annotations

import math
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import accumulation_dtype, aten, cast, reduced, result_dtype
from autoshard.patterns.ops.reduction import reduced_dims, reduction_rule, sharded_dims
from autoshard.patterns.padding import without_padding
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
def _moments(call: OpCall) -> Rule:
    dtype = call.operands[0].dtype
    if dtype.is_complex:
        return reduction_rule(call, split=False)
    assert call.results[0] is not None
    exchange = 2 * math.prod(call.results[0].shape) * accumulation_dtype(dtype).itemsize
    return reduction_rule(call, kinds=(None,), local=_local_moments, exchange=exchange, fill=0.0)


def _local_moments(call: LocalCall) -> Any:
    names = sharded_dims(call)
    if not names:
        return call.run()
    emit, dims = call.emit, list(reduced_dims(call.call))
    value = cast(call, call.operands[0], accumulation_dtype(call.call.operands[0].dtype))
    count = math.prod(call.call.operands[0].shape[dim] for dim in dims)
    mean = emit.call(aten.div.Scalar, emit.call(aten.sum.dim_IntList, value, dims, True), count)
    mean = reduced(call, mean, names)
    deviation = without_padding(call, 0, emit.call(aten.sub.Tensor, value, mean), names, 0.0)
    squares = emit.call(aten.sum.dim_IntList, emit.call(aten.mul.Tensor, deviation, deviation), dims, True)
    spread = emit.call(aten.div.Scalar, reduced(call, squares, names), max(0.0, count - _correction(call.call)))
    name = call.call.op._schema.name
    if name.startswith("aten::std"):
        spread = emit.call(aten.sqrt.default, spread)
    spread, mean = (
        cast(call, emit.call(aten.reshape.default, each, list(call.result_shape())), result_dtype(call))
        for each in (spread, mean)
    )
    return (spread, mean) if name.endswith("_mean") else spread


def _correction(call: OpCall) -> float:
    """What is taken off the number of elements before dividing by it."""
    if any(argument.name == "unbiased" for argument in call.op._schema.arguments):
        return float(call.arg("unbiased"))
    correction = call.arg("correction")
    return 1.0 if correction is None else float(correction)
