"""Images: pooling, rearrangements of positions, and resampling.

Leading dims (batch, channels) are independent. As for convolutions, a position dim may be sharded where the operand has
exactly `stride` positions for each window; ranks exchange the rows that windows reach beyond a stretch. Elsewhere
positions are whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.convolution import (
    Halo,
    Windows,
    extend_by_halos,
    fold_halos,
    padding_beside,
    window_settings,
    windows_over,
)
from autoshard.patterns.ops.helpers import bind_named, factor_names, named_values, run_resized, shape_of
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule


def _spatial_rank(call: OpCall) -> int:
    return 3 if "3d" in call.name else 2


def _pooled_shape(call: OpCall) -> tuple[int, ...]:
    return shape_of(call, "grad_output") if call.is_backward else call.result.shape


def _windows(call: OpCall) -> Windows:
    """The position dims, last in the operand."""
    shape, pooled, spatial = shape_of(call, "self"), _pooled_shape(call), _spatial_rank(call)
    kernels, paddings = (window_settings(call.arg(name), spatial) for name in ("kernel_size", "padding"))
    # In torch, an empty stride is the window's size.
    strides = window_settings(call.arg("stride") or kernels, spatial)
    dilations = window_settings(call.arg("dilation") if "max" in call.name else 1, spatial)
    small = [
        size if _has_uniform_windows(call, padding) else 0
        for size, padding in zip(pooled[-spatial:], paddings, strict=True)
    ]
    reaches = [(kernel - 1) * dilation for kernel, dilation in zip(kernels, dilations, strict=True)]
    return windows_over(len(shape) - spatial, small, shape[-spatial:], strides, paddings, reaches)


def _has_uniform_windows(call: OpCall, padding: int) -> bool:
    """Return True if windows at the ends are computed as all others, with padding as ordinary numbers."""
    if call.arg("ceil_mode"):  # the last window may be cut off by the end
        return False
    if "max" in call.name:
        return call.operands[0].dtype.is_floating_point  # integers have no -inf to pad with
    return padding == 0 or bool(call.arg("count_include_pad")) or call.arg("divisor_override") is not None


@rule_maker(
    *(f"aten.avg_pool{spatial}d{half}.default" for spatial in (2, 3) for half in ("", "_backward")),
    *(f"aten.max_pool{spatial}d_with_indices{half}.default" for spatial in (2, 3) for half in ("", "_backward")),
)
def pool(call: OpCall) -> Rule:
    """Average pooling; max pooling, with indices in the whole image; or gradients, which read the operand's shape."""
    lead, windows = factor_names("b", len(shape_of(call, "self")) - _spatial_rank(call)), _windows(call)
    large, small = (" ".join([*lead, *dims]) for dims in (windows.large, windows.small))
    backward, largest = call.is_backward, "max" in call.name
    return bind_named(
        call,
        {"grad_output": small, "self": large, "indices": small},
        [large] if backward else [small] * len(call.results),
        linear=[{"grad_output"}] if backward else [] if largest else [{"self"}],
        sizes=windows.sizes,
        exchange=windows.exchanges(call.arg("self")),
        local=_pool_backward if backward else _pool,
        uneven=lead,
    )


def _window_padding(call: LocalCall, halos: Sequence[Halo]) -> list[int]:
    """The padding of the windows, 0 where a halo replaces it."""
    spatial = _spatial_rank(call.call)
    padding = window_settings(call.arg("padding"), spatial)
    return padding_beside(halos, len(shape_of(call.call, "self")) - spatial, padding)


def _pool(call: LocalCall) -> Any:
    halos, largest = _windows(call.call).sharded_halos(call), "max" in call.call.name
    if not halos:
        return call.run()
    value = extend_by_halos(call, call.operands[0], halos, -math.inf if largest else 0.0)
    results = call.run(operands=[value], padding=_window_padding(call, halos))
    if not largest:
        return results
    return results[0], _translate_indices(call, results[1], halos, inwards=False)


def _pool_backward(call: LocalCall) -> Any:
    """The gradient of the operand with its halos, which are sent to the neighbours."""
    halos, values = _windows(call.call).sharded_halos(call), named_values(call)
    if not halos:
        return call.run()
    # Only its shape is read.
    values["self"] = values["self"].new_zeros(_extended_shape(call, halos))
    if "indices" in values:
        values["indices"] = _translate_indices(call, values["indices"], halos, inwards=True)
    gradient = call.run(operands=list(values.values()), padding=_window_padding(call, halos))
    return fold_halos(call, gradient, halos)


def _extended_shape(call: LocalCall, halos: Sequence[Halo]) -> list[int]:
    shape = list(named_values(call)["self"].shape)
    for halo in halos:
        shape[halo.dim] += halo.before + halo.after
    return shape


def _translate_indices(call: LocalCall, indices: Any, halos: Sequence[Halo], *, inwards: bool) -> Any:
    """Convert row-major indices in this rank's stretch with halos to the whole image, or the reverse (`inwards`)."""
    spatial = _spatial_rank(call.call)
    names = list(named_values(call))
    whole = shape_of(call.call, "self")
    local, extent = call.operand_shape(names.index("self")), _extended_shape(call, halos)
    total, scale = None, 1
    for dim in reversed(range(len(whole) - spatial, len(whole))):
        source, target = (whole[dim], extent[dim]) if inwards else (extent[dim], whole[dim])
        place = indices.remainder(source)
        indices = indices.div(source, rounding_mode="floor")
        halo = next((halo for halo in halos if halo.dim == dim), None)
        if halo is not None:
            start = call.position(halo.name) * local[dim]
            start = start - halo.before
            place = place - start if inwards else place + start
            # The index of a window of -inf may be outside the image.
            place = place.clamp(0, target - 1)
        place = place * scale if scale > 1 else place
        total = place if total is None else total + place
        scale *= target
    return total


# Adaptive, fractional and inverse pooling: leading dims (batch, channels) are independent.
#
# Positions of an average over adjacent windows of equal size may be sharded too.

_IMAGES = (("2d", "h! w!", "y! x!"), ("3d", "t! h! w!", "z! y! x!"))

for _kind, _large, _small in _IMAGES:
    for _name, _samples in (("adaptive_max_pool", ""), ("fractional_max_pool", ", ... r!")):
        rule(f"aten.{_name}{_kind}.default", f"... {_large}{_samples} -> ... {_small}, ... {_small}")
        _backward = f"... {_small}, ... {_large}, ... {_small} -> ... {_large}"
        rule(f"aten.{_name}{_kind}_backward.default", _backward, linear="0")
    rule(f"aten.max_unpool{_kind}.default", f"... {_small}, ... {_small} -> ... {_large}")


def _divided_dims(
    first: int, source: Sequence[int], result: Sequence[int], aligned: Sequence[bool]
) -> tuple[list[str], list[str], dict[str, int]]:
    """Position dims of an image and of its result, numbered from `first` on, and sizes of names.

    An aligned dim of the larger image has `e` positions for each position `x` of the smaller one.
    """
    dims: tuple[list[str], list[str]] = ([], [])
    sizes: dict[str, int] = {}
    for number, (pair, is_aligned) in enumerate(zip(zip(source, result, strict=True), aligned, strict=True), first):
        least = min(pair)
        if is_aligned:
            sizes |= {f"x{number}": least, f"e{number}": max(pair) // least}
        for image, size, name in zip(dims, pair, "pq", strict=True):
            scaled = f"x{number}" if size == least else f"(x{number} e{number}!)"
            image.append(scaled if is_aligned else f"{name}{number}!")
    return *dims, sizes


@rule_maker(*(f"aten._adaptive_avg_pool{spatial}d{half}.default" for spatial in (2, 3) for half in ("", "_backward")))
def adaptive_mean_pool(call: OpCall) -> Rule:
    """Adaptive average pooling, or its gradient, which reads only the operand's shape."""
    lead = factor_names("b", len(shape_of(call, "self")) - _spatial_rank(call))
    whole, pooled = (shape[len(lead) :] for shape in (shape_of(call, "self"), _pooled_shape(call)))
    aligned = [windows > 1 and size % windows == 0 for size, windows in zip(whole, pooled, strict=True)]
    *images, sizes = _divided_dims(len(lead), whole, pooled, aligned)
    large, small = (" ".join([*lead, *dims]) for dims in images)
    if call.is_backward:
        return bind_named(call, {"grad_output": small, "self": large}, [large], linear=[{"grad_output"}], sizes=sizes)
    local = run_resized("output_size", -_spatial_rank(call))
    return bind_named(call, {"self": large}, [small], linear=[{"self"}], sizes=sizes, local=local, uneven=True)


# Operators that rearrange images: patches to columns, pixel shuffles, and channel shuffles.
#
# Dims are products, so that sharding channels or positions stays local.


@rule_maker("aten.im2col.default", text="... c h! w! -> ... (c k!) l!")
@rule_maker("aten.col2im.default", text="... (c k!) l! -> ... c h! w!")
def _patches(call: OpCall, text: str) -> Rule:
    """`im2col` or `col2im`; the channels of columns are those of the image times positions in the kernel."""
    return bind(text, call, linear="0", sizes={"k": math.prod(call.arg("kernel_size"))})


@rule_maker("aten.pixel_shuffle.default", text="... (c a! b!) h w -> ... c (h a!) (w b!)", by="upscale_factor")
@rule_maker("aten.pixel_unshuffle.default", text="... c (h a!) (w b!) -> ... (c a! b!) h w", by="downscale_factor")
def _pixels(call: OpCall, text: str, by: str) -> Rule:
    """Channels become positions, or positions channels."""
    return bind(text, call, linear="0", sizes=dict.fromkeys(("a", "b"), call.arg(by)))


@rule_maker("aten.channel_shuffle.default")
def channel_shuffle(call: OpCall) -> Rule:
    """Transpose groups and channels in the channel dim."""
    positions = " ".join(f"s{dim}" for dim in range(2, len(call.operands[0].shape)))
    text = f"n (g c) {positions} -> n (c g) {positions}"
    sizes, local = {"g": call.arg("groups")}, lambda program: program.run(groups=program.size("g"))
    return bind(text, call, linear="0", sizes=sizes, local=local, uneven=True)


# Resampling: upsampling, and sampling at the points of a grid. Batch and channels are independent.
#
# Positions may be sharded too if every position becomes an integer number of copies, or one of several is kept.


_NEAREST = [f"{kind}{spatial}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for spatial in (1, 2, 3)]
_SMOOTH = [
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
]


@rule_maker(
    *(f"aten.{name}{half}.default" for name in _SMOOTH for half in ("", "_backward")),
    *(f"aten.{name}.vec" for name in (*_SMOOTH, *_NEAREST)),
)
def upsample_smooth(call: OpCall) -> Rule:
    """Interpolation, which mixes positions; or nearest neighbours with sizes given only by scales."""
    spatial = range(len(call.operands[0].shape) - 2)
    source, result = (" ".join(f"{prefix}{place}!" for place in spatial) for prefix in "pq")
    return _resampling_rule(call, source, result, {}, None)


def _resampling_rule(
    call: OpCall, source: str, result: str, sizes: dict[str, int], forward: LocalProgram | None
) -> Rule:
    """The rule of forward or backward, with position dims `source` and `result`; backward takes local sizes."""
    # Interpolation mixes adjacent positions, so they may not be padded without a local program.
    if call.is_backward:
        source, result, forward = result, source, _local_upsample_backward
    uneven = None if forward is None else True
    return bind(f"n c {source} -> n c {result}", call, linear="0", sizes=sizes, local=forward, uneven=uneven)


def _local_upsample_backward(call: LocalCall) -> Any:
    return call.run(output_size=list(call.operand_shape(0)[2:]), input_size=list(call.result_shape()))


@rule_maker(*(f"aten.{name}{half}.default" for name in _NEAREST for half in ("", "_backward")))
def upsample_nearest(call: OpCall) -> Rule:
    """Copies of positions, or a subset of them."""
    shape = call.arg("input_size") if call.is_backward else call.operands[0].shape
    source, result = shape[2:], call.arg("output_size")
    aligned = [
        max(pair) % min(pair) == 0 and _given_scale(call, place, len(source)) in (None, pair[1] / pair[0])
        for place, pair in enumerate(zip(source, result, strict=True))
    ]
    before, after, sizes = _divided_dims(0, source, result, aligned)
    return _resampling_rule(call, " ".join(before), " ".join(after), sizes, run_resized("output_size", 2))


def _given_scale(call: OpCall, place: int, spatial: int) -> float | None:
    """The scale of a position dim in the call's arguments, if any."""
    # Kernels compute positions by a given scale, which may not be the ratio of the sizes.
    name = "scales" if spatial == 1 else ("scales_d", "scales_h", "scales_w")[3 - spatial + place]
    scale: float | None = call.arg(name)
    return scale


# Sampling at the points of a grid: batch, channels and points are independent; the image's positions are whole.
#
# The gradient of the image is partial over the points, that of the grid over the channels.


def _operand_dims(call: OpCall) -> dict[str, str]:
    """Dims of image, grid and result; x are the dims of the grid's points."""
    spatial = len(shape_of(call, "grid")) - 2
    points = " ".join(f"x{place}" for place in range(spatial))
    image = " ".join(f"p{place}!" for place in range(spatial))
    result = f"n c {points}"
    return {"input": f"n c {image}", "self": f"n c {image}", "grid": f"n {points} v!", "grad_output": result}


def _fill(items: dict[str, str]) -> dict[str, float]:
    """Zeros for the padding of batch and points: kernels use grid values as positions, unchecked."""
    return dict.fromkeys((name for name in items["grid"].split() if "!" not in name), 0.0)


_SAMPLERS = [f"aten.{name}" for name in ("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")]


@rule_maker(*(f"{name}.default" for name in _SAMPLERS), "aten.cudnn_grid_sampler.default")
def grid_sample(call: OpCall) -> Rule:
    """Forward; linear in the image."""
    items = _operand_dims(call)
    return bind_named(call, items, [items["grad_output"]], linear=[{"input", "self"}], fill=_fill(items))


@rule_maker(*(f"{name}_backward.default" for name in _SAMPLERS))
def grid_sample_backward(call: OpCall) -> Rule:
    """Gradients of image and grid; linear in the incoming gradient."""
    items = _operand_dims(call)
    return bind_named(call, items, [items["input"], items["grid"]], linear=[{"grad_output"}], fill=_fill(items))


@rule_maker("aten.affine_grid_generator.default")
def affine_grid(call: OpCall) -> Rule:
    """The grid of an affine map; linear in the map."""
    spatial = len(call.arg("size")) - 2
    points = " ".join(f"x{place}!" for place in range(spatial))

    def local(program: LocalCall) -> Any:
        return program.run(size=[program.operand_shape(0)[0], *program.arg("size")[1:]])

    return bind(f"n r! k! -> n {points} v!", call, linear="0", local=local, uneven=True)
