"""Layer and root-mean-square normalisation.

Dims of the batch are independent. The normalised dims may be sharded as well: the ranks then exchange moments, which
have one number per row. The gradients of weight and bias are partial over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import (
    accumulation_dtype,
    all_reduce_stacked,
    bind_named,
    cast,
    factor_names,
    named_values,
    result_dtype,
    shape_of,
    split_axes,
)
from autoshard.patterns.ops.moments import joined_moments, moments_exchange
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Exchange, OpCall, Rule


def _normalized_dims(call: OpCall) -> list[str]:
    """Names of the normalised dims."""
    return factor_names("n", len(call.arg("normalized_shape")))


def _last_dims(call: OpCall) -> list[int]:
    return list(range(-len(call.arg("normalized_shape")), 0))


def _row_count(call: OpCall) -> int:
    """How many there are of what is normalised."""
    shape = shape_of(call, "input")
    return math.prod(shape[: len(shape) - len(call.arg("normalized_shape"))])


def _forward_exchange(call: OpCall) -> int | list[Exchange]:
    """Moments are joined; mean squares are summed."""
    dtype = call.operands[0].dtype
    if call.op.namespace == "autoshard":
        return _row_count(call) * accumulation_dtype(dtype).itemsize
    return moments_exchange(_row_count(call), dtype)


@rule_maker("aten.native_layer_norm", "autoshard.rms_norm")
def normalization(call: OpCall) -> Rule:
    """Layer norm `(result, mean, reciprocal deviation)` or root-mean-square norm `(result, reciprocal root)`."""
    names = _normalized_dims(call)
    inner, ones = " ".join(names), " ".join("1" for _ in names)
    statistics = len(call.results) - 1
    return bind_named(
        call,
        {"input": f"... {inner}", "weight": inner, "bias": inner},
        [f"... {inner}", *[f"... {ones}"] * statistics],
        reduce=dict.fromkeys(names),
        exchange=dict.fromkeys(names, _forward_exchange(call)),
        local=_layer_norm if statistics == 2 else _rms_norm,
        uneven=True,
        fill=dict.fromkeys(names, 0.0),
    )


def _layer_norm(call: LocalCall) -> Any:
    names = _normalized_dims(call.call)
    if not split_axes(call, names):
        return call.run()
    emit, values = call.emit, named_values(call)
    x = values["input"]
    batch = len(x.shape) - len(names)
    mean, variance = joined_moments(call, x, [*[""] * batch, *names])
    scale = emit.rsqrt(variance + call.arg("eps"))
    result = (x - mean) * scale
    result = _affine(call, result)
    return tuple(cast(call, value, result_dtype(call, index)) for index, value in enumerate((result, mean, scale)))


def _affine(call: LocalCall, value: Any) -> Any:
    """`value` times the weight, plus the bias, where there are such."""
    values = named_values(call)
    if "weight" in values:
        value = value * values["weight"]
    if "bias" in values:
        value = value + values["bias"]
    return value


def _rms_norm(call: LocalCall) -> Any:
    names = _normalized_dims(call.call)
    if not split_axes(call, names):
        return call.run()
    emit, values = call.emit, named_values(call)
    source = values["input"].dtype
    x = cast(call, values["input"], accumulation_dtype(source))
    square = _mean(call, x * x)
    scale = emit.rsqrt(square + call.arg("eps"))
    result = _affine(call, x * scale)
    return tuple(cast(call, value, result_dtype(call, index)) for index, value in enumerate((result, scale)))


def _mean(call: LocalCall, value: Any) -> Any:
    """Mean over the normalised dims, those on other ranks included."""
    return _means(call, [value])[0]


def _means(call: LocalCall, values: Sequence[Any]) -> list[Any]:
    emit, dims = call.emit, _last_dims(call.call)
    count = math.prod(call.arg("normalized_shape"))
    sums = [emit.sum(value, dims, True) for value in values]
    sums = all_reduce_stacked(call, sums, _normalized_dims(call.call))
    return [value / count for value in sums]


@rule_maker("aten.native_layer_norm_backward", "autoshard.rms_norm_backward")
def normalization_backward(call: OpCall) -> Rule:
    """Gradients of the input, the weight and, for layer norm, the bias; linear in the incoming gradient."""
    names = _normalized_dims(call)
    inner, ones = " ".join(names), " ".join("1" for _ in names)
    statistics, whole = f"... {ones}", f"... {inner}"
    sums = 1 if call.op.namespace == "autoshard" else 2
    itemsize = accumulation_dtype(call.operands[0].dtype).itemsize
    results = [whole, *[inner] * (len(call.results) - 1)]
    return bind_named(
        call,
        {"grad_out": whole, "input": whole, "mean": statistics, "rstd": statistics, "weight": inner, "bias": inner},
        [_gradient_dims(call, index, dims) for index, dims in enumerate(results)],
        linear=[{"grad_out"}],
        exchange=dict.fromkeys(names, sums * _row_count(call) * itemsize),
        local=_normalization_backward,
        uneven=True,
        fill=dict.fromkeys(names, 0.0),
    )


def _gradient_dims(call: OpCall, result: int, dims: str) -> str:
    """Dims of a gradient; the operator of root-mean-square norms gives no elements where none is asked for."""
    absent = call.op.namespace == "autoshard" and not call.arg("output_mask")[result]
    return f"none{result}!" if absent else dims


def _normalization_backward(call: LocalCall) -> Any:
    if not split_axes(call, _normalized_dims(call.call)):
        return call.run()
    values = named_values(call)
    dtype = accumulation_dtype(values["input"].dtype)
    gradient, x = cast(call, values["grad_out"], dtype), cast(call, values["input"], dtype)
    scale = cast(call, values["rstd"], dtype)
    centered = x - cast(call, values["mean"], dtype) if "mean" in values else x
    normal = centered * scale
    along = gradient * normal
    mask = call.arg("output_mask")
    results = [_input_gradient(call, gradient, normal, scale) if mask[0] else None]
    results += [
        _batch_sum(call, value) if asked else None for asked, value in zip(mask[1:], (along, gradient), strict=False)
    ]
    return tuple(_cast_to_result(call, index, value) for index, value in enumerate(results))


def _cast_to_result(call: LocalCall, index: int, value: Any) -> Any:
    """A gradient in the element type of its result; where none is asked for, what stands for it."""
    if value is not None:
        return cast(call, value, result_dtype(call, index))
    if call.call.results[index] is None:
        return None
    return call.emit.new_empty(call.operands[0], [0])


def _input_gradient(call: LocalCall, gradient: Any, normal: Any, scale: Any) -> Any:
    """`scale · (g - mean(g) - normal · mean(g · normal))`, where g has the weight in it; no mean(g) without a mean."""
    values = named_values(call)
    if "weight" in values:
        gradient = gradient * cast(call, values["weight"], gradient.dtype)
    along = gradient * normal
    if "mean" in values:
        mean, mean_along = _means(call, [gradient, along])
        gradient = gradient - mean
    else:
        mean_along = _mean(call, along)
    gradient = gradient - normal * mean_along
    return gradient * scale


def _batch_sum(call: LocalCall, value: Any) -> Any:
    """Sum over the dims that are not normalised."""
    dims = list(range(len(value.shape) - len(call.arg("normalized_shape"))))
    return call.emit.sum(value, dims) if dims else value
