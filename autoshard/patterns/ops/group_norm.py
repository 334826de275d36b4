"""Group normalisation and its gradients.

Batch and groups are independent. The channels of a group and the positions may be sharded as well: the ranks then
exchange moments, one number per group and sample. The gradients of weight and bias are partial over batch and
positions.
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
from autoshard.patterns.rule import OpCall, Rule


def _reduced_dims(call: OpCall) -> list[str]:
    """Names of the dims over which statistics are taken: the channels of a group and the positions."""
    return ["k", *factor_names("s", len(shape_of(call, "input")) - 2)]


def _image_dims(call: OpCall) -> str:
    return " ".join(["n (g k)", *_reduced_dims(call)[1:]])


def _sizes(call: OpCall) -> dict[str, int]:
    return {"g": call.arg("group"), "k": call.arg("C") // call.arg("group")}


@rule_maker("aten.native_group_norm")
def group_norm(call: OpCall) -> Rule:
    """Result, mean and reciprocal deviation."""
    names, means = _reduced_dims(call), call.arg("N") * call.arg("group")
    return bind_named(
        call,
        {"input": _image_dims(call), "weight": "(g k)", "bias": "(g k)"},
        [_image_dims(call), "n g", "n g"],
        sizes=_sizes(call),
        reduce=dict.fromkeys(names),
        exchange=dict.fromkeys(names, moments_exchange(means, call.operands[0].dtype)),
        local=_group_norm,
        uneven=True,
        fill=dict.fromkeys(names, 0.0),
    )


def _group_norm(call: LocalCall) -> Any:
    names = _reduced_dims(call.call)
    if not split_axes(call, names):
        return _run(call)
    emit, values = call.emit, named_values(call)
    x = _reshape_to_groups(call, values["input"])
    moments = joined_moments(call, x, ["", "", " ".join(names)])
    mean, variance = (emit.squeeze(value, 2) for value in moments)
    scale = emit.rsqrt(variance + call.arg("eps"))
    result = (x - _column(call, mean)) * _column(call, scale)
    result = emit.view(result, list(values["input"].shape))
    if "weight" in values:
        result = result * _per_channel(call, values["weight"])
    if "bias" in values:
        result = result + _per_channel(call, values["bias"])
    return tuple(cast(call, value, result_dtype(call, index)) for index, value in enumerate((result, mean, scale)))


def _run(call: LocalCall, operands: Sequence[Any] | None = None) -> Any:
    """The operator itself, told the local numbers of samples, channels and groups."""
    groups = call.size("g")
    return call.run(None, operands, N=call.size("n"), C=call.arg("C") // call.arg("group") * groups, group=groups)


def _reshape_to_groups(call: LocalCall, value: Any) -> Any:
    """An image as `[n, g, channels of the group and positions]`, in the dtype that sums are taken in."""
    emit = call.emit
    groups = call.size("g")
    value = cast(call, value, accumulation_dtype(value.dtype))
    return emit.reshape(value, [value.shape[0], groups, -1])


def _column(call: LocalCall, value: Any) -> Any:
    return call.emit.unsqueeze(value, -1)


def _per_channel(call: LocalCall, value: Any) -> Any:
    """A value per channel, shaped to broadcast over an image."""
    positions = len(shape_of(call.call, "input")) - 2
    value = cast(call, value, accumulation_dtype(value.dtype))
    return call.emit.view(value, [-1, *[1] * positions])


@rule_maker("aten.native_group_norm_backward")
def group_norm_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias, linear in the incoming one."""
    image = _image_dims(call)
    itemsize = accumulation_dtype(call.operands[0].dtype).itemsize
    return bind_named(
        call,
        {"grad_out": image, "input": image, "mean": "n g", "rstd": "n g", "weight": "(g k)"},
        [image, "(g k)", "(g k)"],
        linear=[{"grad_out"}],
        sizes=_sizes(call),
        exchange=dict.fromkeys(_reduced_dims(call), 2 * itemsize * call.arg("N") * call.arg("group")),
        local=_group_norm_backward,
        uneven=True,
        fill=dict.fromkeys(_reduced_dims(call), 0.0),
    )


def _group_norm_backward(call: LocalCall) -> Any:
    if not split_axes(call, _reduced_dims(call.call)):
        # The kernel reads both images as if they lay alike. By fake tensors the gradient of a loss lies as the loss's
        # input; kernels of `mse_loss_backward` and others of its kind make it row-major.
        images = [call.emit.contiguous(image) for image in call.operands[:2]]
        return _run(call, [*images, *call.operands[2:]])
    emit, values = call.emit, named_values(call)
    local = list(values["input"].shape)
    mean, scale = (_column(call, cast(call, values[name], _accumulation_dtype(call))) for name in ("mean", "rstd"))
    normal = (_reshape_to_groups(call, values["input"]) - mean) * scale
    gradient = cast(call, values["grad_out"], _accumulation_dtype(call))
    along = gradient * emit.view(normal, local)
    mask = call.arg("output_mask")
    whole = _input_gradient(call, gradient, normal, scale) if mask[0] else None
    dims = [dim for dim in range(len(local)) if dim != 1]
    sums = [emit.sum(value, dims) for value in (along, gradient)]
    results = [whole, *(value if asked else None for asked, value in zip(mask[1:], sums, strict=True))]
    return tuple(
        None if value is None else cast(call, value, result_dtype(call, index)) for index, value in enumerate(results)
    )


def _accumulation_dtype(call: LocalCall) -> Any:
    return accumulation_dtype(call.call.operands[0].dtype)


def _input_gradient(call: LocalCall, gradient: Any, normal: Any, scale: Any) -> Any:
    """`scale · (g - mean(g) - normal · mean(g · normal))` over each group, where g has the weight in it."""
    emit, values = call.emit, named_values(call)
    if "weight" in values:
        gradient = gradient * _per_channel(call, values["weight"])
    gradient = _reshape_to_groups(call, gradient)
    sums = _group_means(call, [gradient, gradient * normal])
    gradient = gradient - sums[0]
    gradient = gradient - normal * sums[1]
    result = gradient * scale
    return emit.view(result, list(values["input"].shape))


def _group_means(call: LocalCall, values: Sequence[Any]) -> list[Any]:
    """Means over all elements of each group, those on other ranks included: `[n, g, 1]`."""
    emit = call.emit
    count = math.prod(shape_of(call.call, "input")[1:]) // call.arg("group")
    sums = [emit.sum(value, [2], True) for value in values]
    sums = all_reduce_stacked(call, sums, _reduced_dims(call.call))
    return [value / count for value in sums]
