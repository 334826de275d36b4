"""Batch normalisation in all spellings that functional graphs have of it.

Channels are independent. In training, batch and spatial dims may be sharded too: the ranks exchange moments, so that
statistics, running statistics and gradients are those of the whole batch, as on one device.
"""

from __future__ import annotations

import math
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

_CHANNELS = ("weight", "bias", "running_mean", "running_var")
_SAVED = ("save_mean", "save_invstd", "save_var")
_ALWAYS_TRAINING = (
    "aten::_batch_norm_with_update_functional",
    "aten::_native_batch_norm_legit.no_stats",
)
_NEVER_TRAINING = ("aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_no_update")


def _is_training(call: OpCall) -> bool:
    """Whether the call takes its statistics from the batch."""
    name = call.op.name()
    if name.startswith(_NEVER_TRAINING):
        return False
    return name in _ALWAYS_TRAINING or bool(call.arg("training"))


def _reduced_dims(call: OpCall) -> list[str]:
    """Names of the dims over which statistics are taken: all but the channels."""
    return ["n", *factor_names("s", len(call.operands[0].shape) - 2)]


def _image_dims(call: OpCall) -> str:
    batch, *spatial = _reduced_dims(call)
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
    names = _reduced_dims(call)
    channels = call.operands[0].shape[1]
    later = ["c" if meta is None or meta.shape == (channels,) else f"z{i}!" for i, meta in enumerate(call.results)]
    return bind_named(
        call,
        {"input": _image_dims(call), **dict.fromkeys(_CHANNELS, "c")},
        [_image_dims(call), *later[1:]],
        reduce={**dict.fromkeys(names), "c": None},
        exchange=dict.fromkeys(names, moments_exchange(channels, call.operands[0].dtype) if _is_training(call) else 0),
        local=_batch_norm if _is_training(call) else None,
        uneven=True,
        fill={"c": None} | dict.fromkeys(names, 0.0 if _is_training(call) else None),
    )


def _batch_norm(call: LocalCall) -> Any:
    names = _reduced_dims(call.call)
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
    result, _, _ = emit._native_batch_norm_legit_no_training(*(x, *parameters, mean, variance, 0.0, call.arg("eps")))
    results = [result, mean, scale]
    if len(call.call.results) == 6:
        results.append(_empty_reserve(call))
    if "running_mean" in values:
        results += _update_running_statistics(call, mean, variance)
    return tuple(cast(call, value, result_dtype(call, index)) for index, value in enumerate(results))


def _empty_reserve(call: LocalCall) -> Any:
    """The space that cuDNN keeps for its backward kernel: without elements, since that kernel did not run."""
    return call.emit.new_empty(call.operands[0], [0], dtype=result_dtype(call, 3), layout=None, device=None)


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
    names = _reduced_dims(call)
    training = _backward_training(call)
    sums = 2 * call.operands[0].shape[1] * accumulation_dtype(call.operands[0].dtype).itemsize
    return bind_named(
        call,
        {"grad_out": _image_dims(call), "input": _image_dims(call), "reserve": "r!"}
        | dict.fromkeys(_CHANNELS, "c")
        | dict.fromkeys(_SAVED, "c" if training else "z!"),  # in inference nothing was saved
        [_image_dims(call), "c", "c"],
        linear=[{"grad_out"}],
        reduce=dict.fromkeys(names) if training else None,
        exchange=dict.fromkeys(names, sums if training else 0),
        local=_batch_norm_backward if training else None,
        uneven=True,
        fill=dict.fromkeys(names, 0.0),
    )


def _backward_training(call: OpCall) -> bool:
    return bool(call.arg("update" if call.op.name() == "aten::batch_norm_backward" else "train"))


def _batch_norm_backward(call: LocalCall) -> Any:
    names = _reduced_dims(call.call)
    if not split_axes(call, names):
        return call.run()
    emit, values = call.emit, named_values(call)
    shape = shape_of(call.call, "input")
    dtype = accumulation_dtype(values["input"].dtype)
    gradient, x = cast(call, values["grad_out"], dtype), cast(call, values["input"], dtype)
    dims = [dim for dim in range(len(shape)) if dim != 1]
    deviation = cast(call, values["save_invstd" if "save_invstd" in values else "save_var"], dtype)
    mean, scale = _per_channel(call, cast(call, values["save_mean"], dtype)), _per_channel(call, deviation)
    normal = (x - mean) * scale
    sums = [emit.sum(value, dims) for value in (gradient * normal, gradient)]
    sums = all_reduce_stacked(call, sums, names)
    results = [_input_gradient(call, gradient, normal, scale, sums), *sums]
    return tuple(
        cast(call, value, result_dtype(call, index)) if asked else None
        for index, (asked, value) in enumerate(zip(call.arg("output_mask"), results, strict=True))
    )


def _per_channel(call: LocalCall, value: Any) -> Any:
    """A value per channel, shaped to broadcast over an image."""
    spatial = len(shape_of(call.call, "input")) - 2
    return call.emit.view(value, [-1, *[1] * spatial])


def _input_gradient(call: LocalCall, gradient: Any, normal: Any, scale: Any, sums: list[Any]) -> Any:
    """`weight · scale · (g - mean(g) - normal · mean(g · normal))`."""
    values, shape = named_values(call), shape_of(call.call, "input")
    count = math.prod(shape) // shape[1]
    along, straight = (_per_channel(call, value / count) for value in sums)
    gradient = gradient - straight
    gradient = gradient - normal * along
    if "weight" in values:
        weight = cast(call, values["weight"], scale.dtype)
        scale = scale * _per_channel(call, weight)
    return gradient * scale
