"""Layer, root-mean-square, group and batch normalisation, and their gradients.

Statistics are taken over some dims of the input; all other dims are independent. The dims of the statistics may be
sharded as well: the ranks then exchange moments or sums, which have one number per row, group or channel. The gradients
of weight and bias are partial over the dims that weight and bias lack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import (
    accumulation_dtype,
    all_reduce_stacked,
    bind_named,
    cast,
    cast_results,
    factor_names,
    named_values,
    result_dtype,
    shape_of,
    split_axes,
)
from autoshard.patterns.ops.moments import joined_moments, moments_exchange
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Exchange, OpCall, Rule


def _affine(call: LocalCall, value: Any, broadcast: Callable[[Any], Any]) -> Any:
    """Return `value` times the weight, plus the bias, each where the call has it and made to fit by `broadcast`."""
    values = named_values(call)
    if "weight" in values:
        value = value * broadcast(values["weight"])
    if "bias" in values:
        value = value + broadcast(values["bias"])
    return value


def _center(gradient: Any, normal: Any, mean: Any, mean_along: Any) -> Any:
    """Return `g - mean(g) - normal · mean(g · normal)`, which is the input's gradient but for the scale.

    Source: Ioffe and Szegedy, "Batch Normalization" (2015), section 3: the derivatives through mean and variance.
    """
    if mean is not None:
        gradient = gradient - mean
    return gradient - normal * mean_along


def _means(call: LocalCall, values: Sequence[Any], dims: Sequence[int], names: Sequence[str], count: int) -> list[Any]:
    """Means of several values over `dims`, whose factors are `names`, other ranks' elements included."""
    sums = [call.emit.sum(value, list(dims), True) for value in values]
    # `count` is that of the whole tensor: padding has been replaced by zeros, and does not count.
    return [value / count for value in all_reduce_stacked(call, sums, names)]


def _per_channel(call: LocalCall, value: Any) -> Any:
    """A value per channel, shaped to broadcast over an image, in the dtype that sums are taken in."""
    spatial = len(shape_of(call.call, "input")) - 2
    value = cast(call, value, accumulation_dtype(value.dtype))
    return call.emit.view(value, [-1, *[1] * spatial])


# Layer and root-mean-square norm: statistics per row, over the last dims.


def _normalized_dims(call: OpCall) -> list[str]:
    """Names of the normalised dims."""
    return factor_names("n", len(call.arg("normalized_shape")))


def _row_count(call: OpCall) -> int:
    """Number of rows, each of which is normalised."""
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
    x = named_values(call)["input"]
    batch = len(x.shape) - len(names)
    mean, variance = joined_moments(call, x, [*[""] * batch, *names])
    scale = call.emit.rsqrt(variance + call.arg("eps"))
    result = _affine(call, (x - mean) * scale, lambda parameter: parameter)
    return cast_results(call, [result, mean, scale])


def _rms_norm(call: LocalCall) -> Any:
    if not split_axes(call, _normalized_dims(call.call)):
        return call.run()
    x = named_values(call)["input"]
    x = cast(call, x, accumulation_dtype(x.dtype))
    (square,) = _row_means(call, [x * x])
    scale = call.emit.rsqrt(square + call.arg("eps"))
    return cast_results(call, [_affine(call, x * scale, lambda parameter: parameter), scale])


def _row_means(call: LocalCall, values: Sequence[Any]) -> list[Any]:
    shape, names = call.arg("normalized_shape"), _normalized_dims(call.call)
    return _means(call, values, range(-len(shape), 0), names, math.prod(shape))


@rule_maker("aten.native_layer_norm_backward", "autoshard.rms_norm_backward")
def normalization_backward(call: OpCall) -> Rule:
    """Gradients of the input, the weight and, for layer norm, the bias; linear in the incoming gradient."""
    names = _normalized_dims(call)
    inner, ones = " ".join(names), " ".join("1" for _ in names)
    statistics, whole = f"... {ones}", f"... {inner}"
    sums = 1 if call.op.namespace == "autoshard" else 2  # a root-mean-square norm takes no mean off the gradient
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
    results = [_row_gradient(call, gradient, normal) * scale if mask[0] else None]
    results += [
        _batch_sum(call, value) if wanted else None for wanted, value in zip(mask[1:], (along, gradient), strict=False)
    ]
    return tuple(_cast_or_empty(call, index, value) for index, value in enumerate(results))


def _cast_or_empty(call: LocalCall, index: int, value: Any) -> Any:
    """A gradient in the dtype of its result; of one that is not asked for, what the operator gives in its place."""
    if value is not None:
        return cast(call, value, result_dtype(call, index))
    # The operator of root-mean-square norms gives a tensor without elements, ATen's gives None.
    return None if call.call.results[index] is None else call.emit.new_empty(call.operands[0], [0])


def _row_gradient(call: LocalCall, gradient: Any, normal: Any) -> Any:
    """The centered gradient, the weight in it; without a mean of rows, none is taken off the gradient."""
    values = named_values(call)
    if "weight" in values:
        gradient = gradient * cast(call, values["weight"], gradient.dtype)
    along = gradient * normal
    *mean, mean_along = _row_means(call, [gradient, along] if "mean" in values else [along])
    return _center(gradient, normal, mean[0] if mean else None, mean_along)


def _batch_sum(call: LocalCall, value: Any) -> Any:
    """Sum over the dims that are not normalised."""
    dims = list(range(len(value.shape) - len(call.arg("normalized_shape"))))
    return call.emit.sum(value, dims) if dims else value


# Group norm: statistics per sample and group, over the channels `k` of the group and the positions.


def _group_dims(call: OpCall) -> list[str]:
    """Names of the dims that statistics are taken over."""
    return ["k", *factor_names("s", len(shape_of(call, "input")) - 2)]


def _group_image(call: OpCall) -> str:
    return " ".join(["n (g k)", *_group_dims(call)[1:]])


def _group_sizes(call: OpCall) -> dict[str, int]:
    return {"g": call.arg("group"), "k": call.arg("C") // call.arg("group")}


@rule_maker("aten.native_group_norm")
def group_norm(call: OpCall) -> Rule:
    """Result, mean and reciprocal deviation."""
    names, means = _group_dims(call), call.arg("N") * call.arg("group")
    return bind_named(
        call,
        {"input": _group_image(call), "weight": "(g k)", "bias": "(g k)"},
        [_group_image(call), "n g", "n g"],
        sizes=_group_sizes(call),
        reduce=dict.fromkeys(names),
        exchange=dict.fromkeys(names, moments_exchange(means, call.operands[0].dtype)),
        local=_group_norm,
        uneven=True,
        fill=dict.fromkeys(names, 0.0),
    )


def _group_norm(call: LocalCall) -> Any:
    names = _group_dims(call.call)
    if not split_axes(call, names):
        return _run_group_norm(call)
    emit, image = call.emit, named_values(call)["input"]
    x = _reshape_to_groups(call, image)
    moments = joined_moments(call, x, ["", "", " ".join(names)])
    mean, variance = (emit.squeeze(value, 2) for value in moments)
    scale = emit.rsqrt(variance + call.arg("eps"))
    result = (x - emit.unsqueeze(mean, -1)) * emit.unsqueeze(scale, -1)
    result = _affine(call, emit.view(result, list(image.shape)), lambda parameter: _per_channel(call, parameter))
    return cast_results(call, [result, mean, scale])


def _run_group_norm(call: LocalCall, operands: Sequence[Any] | None = None) -> Any:
    """The operator itself, given the local numbers of samples, channels and groups."""
    groups = call.size("g")
    return call.run(None, operands, N=call.size("n"), C=call.arg("C") // call.arg("group") * groups, group=groups)


def _reshape_to_groups(call: LocalCall, value: Any) -> Any:
    """An image as `[n, g, channels of the group and positions]`, in the dtype that sums are taken in."""
    value = cast(call, value, accumulation_dtype(value.dtype))
    return call.emit.reshape(value, [value.shape[0], call.size("g"), -1])


@rule_maker("aten.native_group_norm_backward")
def group_norm_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias, linear in the incoming one."""
    image, names = _group_image(call), _group_dims(call)
    itemsize = accumulation_dtype(call.operands[0].dtype).itemsize
    return bind_named(
        call,
        {"grad_out": image, "input": image, "mean": "n g", "rstd": "n g", "weight": "(g k)"},
        [image, "(g k)", "(g k)"],
        linear=[{"grad_out"}],
        sizes=_group_sizes(call),
        exchange=dict.fromkeys(names, 2 * itemsize * call.arg("N") * call.arg("group")),
        local=_group_norm_backward,
        uneven=True,
        fill=dict.fromkeys(names, 0.0),
    )


def _group_norm_backward(call: LocalCall) -> Any:
    emit = call.emit
    if not split_axes(call, _group_dims(call.call)):
        # The kernel reads both images as if they lay alike. By fake tensors the gradient of a loss lies as the loss's
        # input; kernels of `mse_loss_backward` and others of its kind make it row-major.
        images = [emit.contiguous(image) for image in call.operands[:2]]
        return _run_group_norm(call, [*images, *call.operands[2:]])
    values, dtype = named_values(call), accumulation_dtype(call.call.operands[0].dtype)
    local = list(values["input"].shape)
    mean, scale = (emit.unsqueeze(cast(call, values[name], dtype), -1) for name in ("mean", "rstd"))
    normal = (_reshape_to_groups(call, values["input"]) - mean) * scale
    gradient = cast(call, values["grad_out"], dtype)
    along = gradient * emit.view(normal, local)
    mask = call.arg("output_mask")
    whole = _group_gradient(call, gradient, normal, scale) if mask[0] else None
    dims = [dim for dim in range(len(local)) if dim != 1]
    sums = [emit.sum(value, dims) for value in (along, gradient)]
    return cast_results(
        call, [whole, *(value if wanted else None for wanted, value in zip(mask[1:], sums, strict=True))]
    )


def _group_gradient(call: LocalCall, gradient: Any, normal: Any, scale: Any) -> Any:
    """Gradient of the input, centered over each group, the weight in it."""
    values, shape = named_values(call), shape_of(call.call, "input")
    if "weight" in values:
        gradient = gradient * _per_channel(call, values["weight"])
    gradient = _reshape_to_groups(call, gradient)
    count = math.prod(shape[1:]) // call.arg("group")
    means = _means(call, [gradient, gradient * normal], [2], _group_dims(call.call), count)
    return call.emit.view(_center(gradient, normal, *means) * scale, list(values["input"].shape))


# Batch norm, in all spellings that functional graphs have of it: statistics per channel, over samples and positions. In
# training, statistics, running statistics and gradients are those of the whole batch, as on one device.

_CHANNELS = ("weight", "bias", "running_mean", "running_var")
_SAVED = ("save_mean", "save_invstd", "save_var")
_ALWAYS_TRAINING = ("aten::_batch_norm_with_update_functional", "aten::_native_batch_norm_legit.no_stats")
_NEVER_TRAINING = ("aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_no_update")


def _is_training(call: OpCall) -> bool:
    """Return True if the call takes its statistics from the batch."""
    name = call.op.name()
    if name.startswith(_NEVER_TRAINING):
        return False
    return name in _ALWAYS_TRAINING or bool(call.arg("training"))


def _batch_dims(call: OpCall) -> list[str]:
    """Names of the dims that statistics are taken over: all but the channels."""
    return ["n", *factor_names("s", len(call.operands[0].shape) - 2)]


def _batch_image(call: OpCall) -> str:
    batch, *spatial = _batch_dims(call)
    return " ".join([batch, "c", *spatial])


@rule_maker(
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_no_training",
    "aten._batch_norm_with_update_functional",
    "aten._batch_norm_no_update",
)
def batch_norm(call: OpCall) -> Rule:
    """Forward; the results after the first are statistics per channel, or placeholders without elements."""
    names, training = _batch_dims(call), _is_training(call)
    channels = call.operands[0].shape[1]
    later = ["c" if meta is None or meta.shape == (channels,) else f"z{i}!" for i, meta in enumerate(call.results)]
    return bind_named(
        call,
        {"input": _batch_image(call), **dict.fromkeys(_CHANNELS, "c")},
        [_batch_image(call), *later[1:]],
        reduce={**dict.fromkeys(names), "c": None},
        exchange=dict.fromkeys(names, moments_exchange(channels, call.operands[0].dtype) if training else 0),
        local=_batch_norm if training else None,
        uneven=True,
        fill={"c": None} | dict.fromkeys(names, 0.0 if training else None),
    )


def _batch_norm(call: LocalCall) -> Any:
    names = _batch_dims(call.call)
    if not split_axes(call, names):
        return call.run()
    emit, values = call.emit, named_values(call)
    x = values["input"]
    batch, *spatial = names
    moments = joined_moments(call, x, [batch, "", *spatial])
    mean, variance = (emit.view(value, [-1]) for value in moments)
    scale = emit.rsqrt(variance + call.arg("eps"))
    parameters = [cast(call, values[name], mean.dtype) if name in values else None for name in ("weight", "bias")]
    # The statistics are known now: the inference kernel applies them in one pass.
    result, _, _ = emit._native_batch_norm_legit_no_training(x, *parameters, mean, variance, 0.0, call.arg("eps"))
    results = [result, mean, scale]
    if len(call.call.results) == 6:
        # The space that cuDNN keeps for its backward kernel: without elements, since that kernel did not run.
        results.append(emit.new_empty(call.operands[0], [0], dtype=result_dtype(call, 3), layout=None, device=None))
    if "running_mean" in values:
        results += _update_running_statistics(call, mean, variance)
    return cast_results(call, results)


def _update_running_statistics(call: LocalCall, mean: Any, variance: Any) -> list[Any]:
    """The running statistics moved towards those of the batch; the variance kept is the unbiased one."""
    shape = shape_of(call.call, "input")
    count = math.prod(shape) // shape[1]
    unbiased = variance * (count / max(count - 1, 1))
    values, momentum = named_values(call), call.arg("momentum")
    moved = []
    for name, fresh in (("running_mean", mean), ("running_var", unbiased)):
        kept = values[name] * (1.0 - momentum)
        moved.append(kept + fresh * momentum)
    return moved


@rule_maker("aten.native_batch_norm_backward", "aten.batch_norm_backward")
def batch_norm_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias, linear in the incoming one.

    In training the sums over the batch are exchanged inside, and are the gradients of weight and bias; in inference
    those are left partial over the batch.
    """
    names, image = _batch_dims(call), _batch_image(call)
    training = bool(call.arg("update" if call.op.name() == "aten::batch_norm_backward" else "train"))
    sums = 2 * call.operands[0].shape[1] * accumulation_dtype(call.operands[0].dtype).itemsize
    return bind_named(
        call,
        {"grad_out": image, "input": image, "reserve": "r!"}
        | dict.fromkeys(_CHANNELS, "c")
        | dict.fromkeys(_SAVED, "c" if training else "z!"),  # in inference nothing was saved
        [image, "c", "c"],
        linear=[{"grad_out"}],
        reduce=dict.fromkeys(names) if training else None,
        exchange=dict.fromkeys(names, sums if training else 0),
        local=_batch_norm_backward if training else None,
        uneven=True,
        fill=dict.fromkeys(names, 0.0),
    )


def _batch_norm_backward(call: LocalCall) -> Any:
    names = _batch_dims(call.call)
    if not split_axes(call, names):
        return call.run()
    emit, values = call.emit, named_values(call)
    shape = shape_of(call.call, "input")
    dtype = accumulation_dtype(values["input"].dtype)
    gradient, x = cast(call, values["grad_out"], dtype), cast(call, values["input"], dtype)
    dims = [dim for dim in range(len(shape)) if dim != 1]
    # Both kernels save the reciprocal deviation; one of them calls it a variance.
    deviation = cast(call, values["save_invstd" if "save_invstd" in values else "save_var"], dtype)
    mean, scale = _per_channel(call, cast(call, values["save_mean"], dtype)), _per_channel(call, deviation)
    normal = (x - mean) * scale
    sums = [emit.sum(value, dims) for value in (gradient * normal, gradient)]
    sums = all_reduce_stacked(call, sums, names)
    results = [_channel_gradient(call, gradient, normal, scale, sums), *sums]
    mask = call.arg("output_mask")
    return cast_results(call, [value if wanted else None for wanted, value in zip(mask, results, strict=True)])


def _channel_gradient(call: LocalCall, gradient: Any, normal: Any, scale: Any, sums: Sequence[Any]) -> Any:
    """Gradient of the input, centered over each channel: the weight, one number of it, is part of the scale."""
    values, shape = named_values(call), shape_of(call.call, "input")
    count = math.prod(shape) // shape[1]
    along, straight = (_per_channel(call, value / count) for value in sums)
    gradient = _center(gradient, normal, straight, along)
    if "weight" in values:
        scale = scale * _per_channel(call, cast(call, values["weight"], scale.dtype))
    return gradient * scale
