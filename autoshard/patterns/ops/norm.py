"""Layer, root-mean-square, group, batch and weight normalisation, and their gradients.

Statistics are taken over some dims of the input; all other dims are independent. The dims of the statistics may be
sharded too: ranks then exchange moments or sums, one number per row, group or channel. The gradients of weight and bias
are partial over the dims that weight and bias lack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.operator_library import accumulation_dtype
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import (
    all_reduce_over,
    all_reduce_stacked,
    bind_named,
    cast_results,
    factor_names,
    if_sharded,
    localize_index,
    named_values,
    operands_for_sums,
    result_dtype,
    shape_of,
    split_axes,
)
from autoshard.patterns.ops.reduction import joined_moments, moments_exchange
from autoshard.patterns.ops.scattering import append_spare, drop_spare
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Exchange, OpCall, Rule


@dataclass(frozen=True, slots=True)
class _Family:
    """The dims of a normalisation, in the notation of rules.

    Attributes:
        image: dims of the input.
        parameter: dims of weight and bias.
        statistic: dims of the saved statistics.
        layout: for every dim of the input (in the shape of `_rows`), the factors that statistics are taken over.
        statistics: number of statistics.
        count: number of elements per statistic.
        sizes: sizes of factors that no shape determines.
    """

    image: str
    parameter: str
    statistic: str
    layout: list[str]
    statistics: int
    count: int
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The factors that statistics are taken over."""
        return [name for dim in self.layout for name in dim.split()]

    @property
    def dims(self) -> list[int]:
        """The dims that statistics are taken over."""
        return [dim for dim, names in enumerate(self.layout) if names]


def _family(call: OpCall) -> _Family:
    """Return the dims of a call: statistics per row, per sample and group of channels, or per channel."""
    shape, arguments = shape_of(call, "input"), call.argument_names
    if "normalized_shape" in arguments:
        names = factor_names("n", len(call.arg("normalized_shape")))
        batch, inner = len(shape) - len(names), " ".join(names)
        kept, layout = f"... {' '.join('1' for _ in names)}", [""] * batch + names
        return _Family(f"... {inner}", inner, kept, layout, math.prod(shape[:batch]), math.prod(shape[batch:]))
    spatial = factor_names("s", len(shape) - 2)
    if "group" in arguments:
        groups, samples = call.arg("group"), call.arg("N")
        sizes = {"g": groups, "k": call.arg("C") // groups}
        image, layout = " ".join(["n (g k)", *spatial]), ["", "", " ".join(["k", *spatial])]
        return _Family(image, "(g k)", "n g", layout, samples * groups, math.prod(shape[1:]) // groups, sizes)
    image, count = " ".join(["n", "c", *spatial]), math.prod(shape) // max(shape[1], 1)
    return _Family(image, "c", "c", ["n", "", *spatial], shape[1], count)


def _center(gradient: Any, normal: Any, mean: Any, mean_along: Any) -> Any:
    """Return `g - mean(g) - normal · mean(g · normal)`, the input's gradient without its scale.

    Source: Ioffe and Szegedy, "Batch Normalization" (2015), section 3: the derivatives through mean and variance.
    """
    if mean is not None:
        gradient = gradient - mean
    return gradient - normal * mean_along


def _per_channel(call: LocalCall, value: Any) -> Any:
    """A value per channel, shaped to broadcast over an image, in the accumulation dtype."""
    spatial = len(shape_of(call.call, "input")) - 2
    return value.to(accumulation_dtype(value.dtype)).view([-1, *[1] * spatial])


# Layer and RMS norm, with statistics per row, and group norm, with statistics per sample and group of channels.


def _is_root_mean_square(call: OpCall) -> bool:
    return call.op.namespace == "autoshard"


def _is_grouped(call: LocalCall) -> bool:
    return "group" in call.call.name


@rule_maker("aten.native_layer_norm", "aten.native_group_norm")
def normalization(call: OpCall) -> Rule:
    """Result, mean and reciprocal standard deviation; for an RMS norm, result and reciprocal root mean square."""
    family, dtype = _family(call), call.operands[0].dtype
    exchange: int | list[Exchange] = moments_exchange(family.statistics, dtype)
    if _is_root_mean_square(call):  # RMS sums squares; the others join moments
        exchange = family.statistics * accumulation_dtype(dtype).itemsize
    return bind_named(
        call,
        {"input": family.image, "weight": family.parameter, "bias": family.parameter},
        [family.image, *[family.statistic] * (len(call.results) - 1)],
        sizes=family.sizes,
        reduce=dict.fromkeys(family.names),
        exchange=dict.fromkeys(family.names, exchange),
        local=_normalize,
        uneven=True,
        fill=dict.fromkeys(family.names, 0.0),
    )


def _normalize(call: LocalCall) -> Any:
    family, values = _family(call.call), named_values(call)
    if not split_axes(call, family.names):
        return _run_with_local_groups(call)
    x = values["input"]
    if _is_root_mean_square(call.call):
        x = x.to(accumulation_dtype(x.dtype))
        (variance,) = _means(call, [x * x])
        statistics = [(variance + call.arg("eps")).rsqrt()]
    else:
        x = _rows(call, x)
        mean, variance = joined_moments(call, x, family.layout)
        statistics = [mean, (variance + call.arg("eps")).rsqrt()]
        x = x - mean
    result = _image(call, x * statistics[-1])
    if "weight" in values:
        result = result * _parameter(call, values["weight"])
    if "bias" in values:
        result = result + _parameter(call, values["bias"])
    if _is_grouped(call):
        statistics = [value.squeeze(2) for value in statistics]
    return cast_results(call, [result, *statistics])


def _run_with_local_groups(call: LocalCall, operands: Sequence[Any] | None = None) -> Any:
    """Run the operator itself; a group norm with the local numbers of samples, channels and groups."""
    if not _is_grouped(call):
        return call.run(operands=operands)
    groups = call.size("g")
    return call.run(None, operands, N=call.size("n"), C=call.arg("C") // call.arg("group") * groups, group=groups)


def _rows(call: LocalCall, value: Any) -> Any:
    """For a group norm, the image as `[n, g, channels of the group and positions]` in the accumulation dtype."""
    if not _is_grouped(call):
        return value
    value = value.to(accumulation_dtype(value.dtype))
    return value.reshape([value.shape[0], call.size("g"), -1])


def _image(call: LocalCall, rows: Any) -> Any:
    """The inverse of `_rows`."""
    return rows.view(list(named_values(call)["input"].shape)) if _is_grouped(call) else rows


def _parameter(call: LocalCall, value: Any) -> Any:
    """Weight or bias, shaped to broadcast over the input."""
    return _per_channel(call, value) if _is_grouped(call) else value


def _means(call: LocalCall, values: Sequence[Any]) -> list[Any]:
    """Means of several values over the elements of each statistic, on all ranks."""
    family = _family(call.call)
    sums = [value.sum(family.dims, True) for value in values]
    # The count is that of the whole tensor: padding is zero, and does not count.
    return [value / family.count for value in all_reduce_stacked(call, sums, family.names)]


@rule_maker("aten.native_layer_norm_backward", "aten.native_group_norm_backward")
def normalization_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and, except for RMS norms, bias; linear in the incoming gradient."""
    family = _family(call)
    results = [family.image, *[family.parameter] * (len(call.results) - 1)]
    sums = 2
    if _is_root_mean_square(call):
        sums = 1  # the gradient's mean is not subtracted
        # Gradients that are not requested are empty tensors.
        wanted = zip(results, call.arg("output_mask"), strict=True)
        results = [dims if asked else f"none{index}!" for index, (dims, asked) in enumerate(wanted)]
    itemsize = accumulation_dtype(call.operands[0].dtype).itemsize
    return bind_named(
        call,
        dict.fromkeys(("grad_out", "input"), family.image)
        | dict.fromkeys(("mean", "rstd"), family.statistic)
        | dict.fromkeys(("weight", "bias"), family.parameter),
        results,
        linear=[{"grad_out"}],
        sizes=family.sizes,
        exchange=dict.fromkeys(family.names, sums * family.statistics * itemsize),
        local=_normalize_backward,
        uneven=True,
        fill=dict.fromkeys(family.names, 0.0),
    )


def _normalize_backward(call: LocalCall) -> Any:
    values = named_values(call)
    if not split_axes(call, _family(call.call).names):
        # The kernel of group norms assumes one layout of both images. Fake tensors give the gradient of a loss the
        # layout of the loss's input, but kernels such as that of `mse_loss_backward` return it contiguous.
        images = [image.contiguous() for image in call.operands[:2]] if _is_grouped(call) else call.operands[:2]
        return _run_with_local_groups(call, [*images, *call.operands[2:]])
    dtype = accumulation_dtype(values["input"].dtype)
    gradient, x = values["grad_out"].to(dtype), values["input"].to(dtype)
    statistics = [values[name].to(dtype) for name in ("mean", "rstd") if name in values]
    if _is_grouped(call):
        statistics = [value.unsqueeze(-1) for value in statistics]
    *mean, scale = statistics
    normal = _rows(call, x)
    normal = (normal - mean[0] if mean else normal) * scale
    along, wanted = gradient * _image(call, normal), call.arg("output_mask")
    results = [_input_gradient(call, gradient, normal, scale, bool(mean)) if wanted[0] else None]
    # Local sums over the dims that the parameters lack: the results are partial.
    parameter_dims = [1] if _is_grouped(call) else _family(call.call).dims
    dims = [dim for dim in range(len(gradient.shape)) if dim not in parameter_dims]
    for asked, value in zip(wanted[1:], (along, gradient), strict=False):
        results.append((value.sum(dims) if dims else value) if asked else None)
    return tuple(_cast_or_empty(call, index, value) for index, value in enumerate(results))


def _input_gradient(call: LocalCall, gradient: Any, normal: Any, scale: Any, has_mean: bool) -> Any:
    """The gradient of the input, including the weight, centered over the elements of each statistic."""
    values = named_values(call)
    if "weight" in values:
        gradient = gradient * _parameter(call, values["weight"])
    gradient = _rows(call, gradient)
    along = gradient * normal
    *mean, mean_along = _means(call, [gradient, along] if has_mean else [along])
    return _image(call, _center(gradient, normal, mean[0] if mean else None, mean_along) * scale)


def _cast_or_empty(call: LocalCall, index: int, value: Any) -> Any:
    """A gradient in the dtype of its result, or the operator's placeholder for one that is not requested."""
    if value is not None:
        return value.to(result_dtype(call, index))
    # The operator of RMS norms returns an empty tensor, ATen's operators None.
    return None if call.call.results[index] is None else call.operands[0].new_empty([0])


# Batch norm, in all operators of functional graphs: statistics per channel, over samples and positions. In training,
# statistics, running statistics and gradients are those of the whole batch, as on one device.

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


@rule_maker(
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_no_training",
    "aten._batch_norm_with_update_functional",
    "aten._batch_norm_no_update",
)
def batch_norm(call: OpCall) -> Rule:
    """Forward; the results after the first are statistics per channel, or empty placeholders."""
    family, training = _family(call), _is_training(call)
    names, channels = family.names, family.statistics
    # `z` is the dim of empty results.
    later = ["c" if meta is None or meta.shape == (channels,) else f"z{i}!" for i, meta in enumerate(call.results)]
    return bind_named(
        call,
        {"input": family.image, **dict.fromkeys(_CHANNELS, "c")},
        [family.image, *later[1:]],
        reduce={**dict.fromkeys(names), "c": None},
        exchange=dict.fromkeys(names, moments_exchange(channels, call.operands[0].dtype) if training else 0),
        local=_batch_norm if training else None,
        uneven=True,
        fill={"c": None} | dict.fromkeys(names, 0.0 if training else None),
    )


@if_sharded(by=lambda call: _family(call).names)
def _batch_norm(call: LocalCall) -> Any:
    values, x = named_values(call), named_values(call)["input"]
    mean, variance = (value.view([-1]) for value in joined_moments(call, x, _family(call.call).layout))
    scale = (variance + call.arg("eps")).rsqrt()
    parameters = [values[name].to(mean.dtype) if name in values else None for name in ("weight", "bias")]
    # With known statistics, the inference kernel normalises in one pass.
    result, _, _ = x._native_batch_norm_legit_no_training(*parameters, mean, variance, 0.0, call.arg("eps"))
    results = [result, mean, scale]
    if len(call.call.results) == 6:
        # The reserve space of cuDNN's backward kernel: empty, since cuDNN did not run.
        results.append(call.operands[0].new_empty([0], dtype=result_dtype(call, 3), layout=None, device=None))
    if "running_mean" in values:
        results += _update_running_statistics(call, mean, variance)
    return cast_results(call, results)


def _update_running_statistics(call: LocalCall, mean: Any, variance: Any) -> list[Any]:
    """The running statistics, updated by those of the batch, with the unbiased variance."""
    values, momentum, count = named_values(call), call.arg("momentum"), _family(call.call).count
    # As in torch; the biased variance normalises the batch.
    unbiased = variance * (count / max(count - 1, 1))
    fresh = {"running_mean": mean, "running_var": unbiased}
    return [values[name] * (1.0 - momentum) + value * momentum for name, value in fresh.items()]


@rule_maker("aten.native_batch_norm_backward", "aten.batch_norm_backward")
def batch_norm_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias, linear in the incoming gradient.

    In training, sums over the batch are reduced inside, and are the gradients of weight and bias; in inference, the
    gradients of weight and bias are partial over the batch.
    """
    family = _family(call)
    names, image = family.names, family.image
    training = bool(call.arg("update" if call.name == "aten::batch_norm_backward" else "train"))
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


@if_sharded(by=lambda call: _family(call).names)
def _batch_norm_backward(call: LocalCall) -> Any:
    values, family = named_values(call), _family(call.call)
    dtype = accumulation_dtype(values["input"].dtype)
    gradient, x = values["grad_out"].to(dtype), values["input"].to(dtype)
    # Both kernels save the reciprocal standard deviation; one of them calls it a variance.
    deviation = values["save_invstd" if "save_invstd" in values else "save_var"].to(dtype)
    mean, scale = _per_channel(call, values["save_mean"].to(dtype)), _per_channel(call, deviation)
    normal = (x - mean) * scale
    sums = [value.sum(family.dims) for value in (gradient * normal, gradient)]
    sums = all_reduce_stacked(call, sums, family.names)
    results = zip(call.arg("output_mask"), [_channel_gradient(call, gradient, normal, scale, sums), *sums], strict=True)
    return cast_results(call, [value if wanted else None for wanted, value in results])


def _channel_gradient(call: LocalCall, gradient: Any, normal: Any, scale: Any, sums: Sequence[Any]) -> Any:
    """Gradient of the input, centered per channel; the weight, one number per channel, is part of the scale."""
    values, count = named_values(call), _family(call.call).count
    along, straight = (_per_channel(call, value / count) for value in sums)
    gradient = _center(gradient, normal, straight, along)
    if "weight" in values:
        scale = scale * _per_channel(call, values["weight"].to(scale.dtype))
    return gradient * scale


# Weight normalisation: the direction of a weight and its length, one number per slice of the dim `dim`.
#
# The other dims may be sharded too: ranks then exchange sums, one number per slice.


def _weight_dims(call: OpCall) -> tuple[str, str, list[str]]:
    """Dims of the weight, dims of its lengths, and the names of the dims summed over."""
    names = factor_names("d", len(call.operands[0].shape))
    kept = names[call.arg("dim")]
    weight = " ".join("o" if name == kept else name for name in names)
    lengths = " ".join("o" if name == kept else "1" for name in names)
    return weight, lengths, [name for name in names if name != kept]


def _summed_names(call: OpCall) -> list[str]:
    return _weight_dims(call)[2]


@rule_maker("aten._weight_norm_interface", "aten._weight_norm_interface_backward")
def weight_norm(call: OpCall) -> Rule:
    """The weight `v · g / |v|` and the lengths `|v|`; or the gradients of `v` and `g`, linear in the incoming."""
    weight, lengths, summed = _weight_dims(call)
    backward = call.is_backward
    return bind_named(
        call,
        dict.fromkeys(("v", "grad_w", "saved_v"), weight) | dict.fromkeys(("g", "saved_g", "saved_norms"), lengths),
        [weight, lengths],
        linear=[{"grad_w"}] if backward else [],
        reduce=dict.fromkeys(summed),
        exchange=dict.fromkeys(summed, 4 * call.operands[0].shape[call.arg("dim")]),
        local=_weight_norm_backward if backward else _weight_norm,
        uneven=True,
        fill=dict.fromkeys(summed, 0.0),
    )


def _slice_sum(call: LocalCall, value: Any) -> Any:
    """Sum over all dims but the argument `dim`, on all ranks, keeping dims of size 1."""
    rank = len(value.shape)
    dims = [dim for dim in range(rank) if dim != call.arg("dim") % rank]
    return all_reduce_over(call, value.sum(dims, True), _summed_names(call.call))


@if_sharded(by=_summed_names)
def _weight_norm(call: LocalCall) -> Any:
    v, g = operands_for_sums(call)
    lengths = _slice_sum(call, v * v).sqrt()
    return cast_results(call, [v * (g / lengths), lengths])


@if_sharded(by=_summed_names)
def _weight_norm_backward(call: LocalCall) -> Any:
    """`grad_g = sum(grad · v) / |v|` and `grad_v = g / |v| · (grad - v · grad_g / |v|)`."""
    gradient, v, g, lengths = operands_for_sums(call)
    grad_g = _slice_sum(call, gradient * v) / lengths
    across = gradient - v * (grad_g / lengths)
    return cast_results(call, [across * (g / lengths), grad_g])


# Rows scaled down to a maximum norm: rows are independent, and each must be whole.


@rule_maker("aten.renorm")
def _renorm(call: OpCall) -> Rule:
    """Slices along one dim."""
    ndim = len(call.operands[0].shape)
    kept = call.arg("dim") % ndim
    dims = " ".join(f"d{dim}" if dim == kept else f"d{dim}!" for dim in range(ndim))
    return bind(f"{dims} -> {dims}", call)


@rule_maker("aten.embedding_renorm")
def _embedding_renorm(call: OpCall) -> Rule:
    """Rows of a table, by index; a rank of a sharded table scales its own rows."""
    return bind("v^ d!, ...! -> v d!", call, local=_local_embedding_renorm)


@if_sharded("v")
def _local_embedding_renorm(call: LocalCall) -> Any:
    table, indices = call.operands
    stretch = call.operand_shape(0)[0]
    # Indices of other ranks' rows refer to a spare row after the end.
    place, _ = localize_index(call, indices, "v", stretch, stretch)
    return drop_spare(call.run(operands=[append_spare(table, [0]), place]), [0])
