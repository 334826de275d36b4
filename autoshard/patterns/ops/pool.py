"""Pooling by windows of one size: leading dims (batch, channels) are independent, positions may be sharded.

As for convolutions, a dim of positions is sharded where the operand has exactly `stride` positions for each window;
ranks exchange the rows that windows reach beyond a stretch. Where windows lie in no such order, positions are whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import bind_named, factor_names, named_values, run_resized, shape_of
from autoshard.patterns.ops.halo import (
    Halo,
    Windows,
    extend_by_halos,
    fold_halos,
    padding_beside,
    window_settings,
    windows_over,
)
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule


def _spatial_rank(call: OpCall) -> int:
    return 3 if "3d" in call.op.name() else 2


def _pooled_shape(call: OpCall) -> tuple[int, ...]:
    return shape_of(call, "grad_output") if "backward" in call.op.name() else call.result.shape


def _windows(call: OpCall) -> Windows:
    """The dims of positions, last in the operand."""
    shape, pooled, spatial = shape_of(call, "self"), _pooled_shape(call), _spatial_rank(call)
    kernels, paddings = (window_settings(call.arg(name), spatial) for name in ("kernel_size", "padding"))
    # torch takes an empty stride for windows side by side.
    strides = window_settings(call.arg("stride") or kernels, spatial)
    dilations = window_settings(call.arg("dilation") if "max" in call.op.name() else 1, spatial)
    small = [
        size if _has_uniform_windows(call, padding) else 0
        for size, padding in zip(pooled[-spatial:], paddings, strict=True)
    ]
    reaches = [(kernel - 1) * dilation for kernel, dilation in zip(kernels, dilations, strict=True)]
    return windows_over(len(shape) - spatial, small, shape[-spatial:], strides, paddings, reaches)


def _has_uniform_windows(call: OpCall, padding: int) -> bool:
    """Return True if windows at the ends are like all others, but for padding that does not count."""
    if call.arg("ceil_mode"):  # a last window may be cut off by the end
        return False
    if "max" in call.op.name():
        return call.operands[0].dtype.is_floating_point  # integers have nothing infinitely small to pad with
    return padding == 0 or bool(call.arg("count_include_pad")) or call.arg("divisor_override") is not None


@rule_maker(
    *(f"aten.avg_pool{spatial}d{half}.default" for spatial in (2, 3) for half in ("", "_backward")),
    *(f"aten.max_pool{spatial}d_with_indices{half}.default" for spatial in (2, 3) for half in ("", "_backward")),
)
def pool(call: OpCall) -> Rule:
    """Means of windows; their largest numbers, and where in the whole image each stands; or the operand's gradient.

    Of the operand, the gradient looks at nothing but the shape.
    """
    lead, windows = factor_names("b", len(shape_of(call, "self")) - _spatial_rank(call)), _windows(call)
    large, small = (" ".join([*lead, *dims]) for dims in (windows.large, windows.small))
    backward, largest = "backward" in call.op.name(), "max" in call.op.name()
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
    """The padding of the windows, none where a halo takes its place."""
    spatial = _spatial_rank(call.call)
    padding = window_settings(call.arg("padding"), spatial)
    return padding_beside(halos, len(shape_of(call.call, "self")) - spatial, padding)


def _pool(call: LocalCall) -> Any:
    halos, largest = _windows(call.call).sharded_halos(call), "max" in call.call.op.name()
    if not halos:
        return call.run()
    value = extend_by_halos(call, call.operands[0], halos, -math.inf if largest else 0.0)
    results = call.run(operands=[value], padding=_window_padding(call, halos))
    if not largest:
        return results
    return results[0], _translate_indices(call, results[1], halos, inwards=False)


def _pool_backward(call: LocalCall) -> Any:
    """The gradient of the operand with its halos, which goes back to the neighbours."""
    halos, values = _windows(call.call).sharded_halos(call), named_values(call)
    if not halos:
        return call.run()
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
    """Places in the whole image from places in this rank's stretch and its halos, or the other way round (`inwards`).

    A place is the row-major number of a position among all of an image.
    """
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
            # A window of which all numbers are infinitely small may point at what lies outside the image.
            place = place.clamp(0, target - 1)
        place = place * scale if scale > 1 else place
        total = place if total is None else total + place
        scale *= target
    return total


# Pooling to a given size, to random windows, and back: leading dims (batch, channels) are independent.
#
# A mean over windows of one size, which lie side by side, may be sharded by positions too.

_IMAGES = (("2d", "h! w!", "y! x!"), ("3d", "t! h! w!", "z! y! x!"))

for _kind, _large, _small in _IMAGES:
    for _name, _samples in (("adaptive_max_pool", ""), ("fractional_max_pool", ", ... r!")):
        rule(f"aten.{_name}{_kind}.default", f"... {_large}{_samples} -> ... {_small}, ... {_small}")
        _backward = f"... {_small}, ... {_large}, ... {_small} -> ... {_large}"
        rule(f"aten.{_name}{_kind}_backward.default", _backward, linear="0")
    rule(f"aten.max_unpool{_kind}.default", f"... {_small}, ... {_small} -> ... {_large}")


def _adaptive_dims(call: OpCall) -> tuple[str, str, dict[str, int]]:
    """Dims of the operand and of the pooled image, and sizes of names; e are the positions of a window."""
    whole, pooled = shape_of(call, "self"), _pooled_shape(call)
    large = factor_names("b", len(whole) - _spatial_rank(call))
    small, sizes = list(large), dict[str, int]()
    for dim in range(len(large), len(whole)):
        windows = pooled[dim]
        if windows > 1 and whole[dim] % windows == 0:
            large.append(f"(x{dim} e{dim}!)")
            small.append(f"x{dim}")
            sizes |= {f"x{dim}": windows, f"e{dim}": whole[dim] // windows}
        else:
            large.append(f"p{dim}!")
            small.append(f"q{dim}!")
    return " ".join(large), " ".join(small), sizes


@rule_maker(*(f"aten._adaptive_avg_pool{spatial}d{half}.default" for spatial in (2, 3) for half in ("", "_backward")))
def adaptive_mean_pool(call: OpCall) -> Rule:
    """Means of windows, or the gradient of the operand, of which only the shape is looked at."""
    large, small, sizes = _adaptive_dims(call)
    if "backward" in call.op.name():
        return bind_named(call, {"grad_output": small, "self": large}, [large], linear=[{"grad_output"}], sizes=sizes)
    local = run_resized("output_size", -_spatial_rank(call))
    return bind_named(call, {"self": large}, [small], linear=[{"self"}], sizes=sizes, local=local, uneven=True)


# Operators that move positions of images: patches side by side, pixels from channels, channels in another order.
#
# Dims are products, so that sharding channels or positions stays local.


@rule_maker("aten.im2col.default", text="... c h! w! -> ... (c k!) l!")
@rule_maker("aten.col2im.default", text="... (c k!) l! -> ... c h! w!")
def _patches(call: OpCall, text: str) -> Rule:
    """Patches as columns, or added up to an image; the channels of patches are those of the image times positions."""
    return bind(text, call, linear="0", sizes={"k": math.prod(call.arg("kernel_size"))})


@rule_maker("aten.pixel_shuffle.default", text="... (c a! b!) h w -> ... c (h a!) (w b!)", by="upscale_factor")
@rule_maker("aten.pixel_unshuffle.default", text="... c (h a!) (w b!) -> ... (c a! b!) h w", by="downscale_factor")
def _pixels(call: OpCall, text: str, by: str) -> Rule:
    """Channels become positions, or positions channels."""
    return bind(text, call, linear="0", sizes=dict.fromkeys(("a", "b"), call.arg(by)))


@rule_maker("aten.channel_shuffle.default")
def channel_shuffle(call: OpCall) -> Rule:
    """Channels of all groups in turn: a product of groups and channels, turned round."""
    positions = " ".join(f"s{dim}" for dim in range(2, len(call.operands[0].shape)))
    text = f"n (g c) {positions} -> n (c g) {positions}"
    sizes, local = {"g": call.arg("groups")}, lambda program: program.run(groups=program.size("g"))
    return bind(text, call, linear="0", sizes=sizes, local=local, uneven=True)
