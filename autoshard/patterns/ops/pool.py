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
from autoshard.patterns.ops._helpers import bind_named, factor_names, named_values, shape_of
from autoshard.patterns.ops.halo import (
    Halo,
    WindowDim,
    extend_by_halo,
    fold_halo,
    halo_exchanges,
    sharded_halos,
    window_dim,
    window_setting,
)
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta


def _spatial_rank(call: OpCall) -> int:
    return 3 if "3d" in call.op.name() else 2


def _dims(call: OpCall) -> list[WindowDim]:
    """The dims of positions, last in the operand."""
    shape, spatial = shape_of(call, "self"), _spatial_rank(call)
    pooled = call.arg("grad_output") if "backward" in call.op.name() else call.results[0]
    assert isinstance(pooled, TensorMeta)
    dims = []
    for place in range(spatial):
        dim = len(shape) - spatial + place
        kernel = window_setting(call.arg("kernel_size"), place)
        # torch takes an empty stride for windows side by side.
        stride = window_setting(call.arg("stride") or call.arg("kernel_size"), place)
        padding = window_setting(call.arg("padding"), place)
        small = pooled.shape[dim] if _has_uniform_windows(call, padding) else 0
        reach = (kernel - 1) * (window_setting(call.arg("dilation"), place) if "max" in call.op.name() else 1)
        dims.append(window_dim(place, dim, small, shape[dim], stride, padding, reach))
    return dims


def _has_uniform_windows(call: OpCall, padding: int) -> bool:
    """Return True if windows at the ends are like all others, but for padding that does not count."""
    if call.arg("ceil_mode"):  # a last window may be cut off by the end
        return False
    if "max" in call.op.name():
        return call.operands[0].dtype.is_floating_point  # integers have nothing infinitely small to pad with
    return padding == 0 or bool(call.arg("count_include_pad")) or call.arg("divisor_override") is not None


def _image_dims(call: OpCall) -> tuple[str, str, dict[str, int]]:
    """Dims of the operand and of the pooled image, and the sizes of the names in them."""
    dims, lead = _dims(call), _leading_dims(call)
    sizes = {name: size for dim in dims for name, size in dim.sizes.items()}
    return " ".join([*lead, *(dim.large for dim in dims)]), " ".join([*lead, *(dim.small for dim in dims)]), sizes


def _leading_dims(call: OpCall) -> list[str]:
    """Names of the dims before the positions: batch and channels."""
    return factor_names("b", len(shape_of(call, "self")) - _spatial_rank(call))


@rule_maker("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def mean_pool(call: OpCall) -> Rule:
    """Means of windows."""
    large, small, sizes = _image_dims(call)
    exchange = halo_exchanges(_dims(call), call.operands[0])
    return bind_named(
        call,
        {"self": large},
        [small],
        linear=[{"self"}],
        sizes=sizes,
        exchange=exchange,
        local=_mean_pool,
        uneven=_leading_dims(call),
    )


def _window_padding(call: LocalCall, halos: Sequence[Halo]) -> list[int]:
    """The padding of the windows, none where a halo takes its place."""
    spatial = _spatial_rank(call.call)
    first = len(shape_of(call.call, "self")) - spatial
    bare = {halo.dim - first for halo in halos}
    return [0 if place in bare else window_setting(call.arg("padding"), place) for place in range(spatial)]


def _mean_pool(call: LocalCall) -> Any:
    halos, value = sharded_halos(call, _dims(call.call)), call.operands[0]
    for halo in halos:
        value = extend_by_halo(call, value, halo)
    return call.run(operands=[value], padding=_window_padding(call, halos))


@rule_maker("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default")
def mean_pool_backward(call: OpCall) -> Rule:
    """The gradient of the operand, of which only the shape is looked at."""
    large, small, sizes = _image_dims(call)
    return bind_named(
        call,
        {"grad_output": small, "self": large},
        [large],
        linear=[{"grad_output"}],
        sizes=sizes,
        exchange=halo_exchanges(_dims(call), call.operands[1]),
        local=_pool_backward,
        uneven=_leading_dims(call),
    )


def _pool_backward(call: LocalCall) -> Any:
    """The gradient of the operand with its halos, which goes back to the neighbours."""
    halos, values = sharded_halos(call, _dims(call.call)), named_values(call)
    if not halos:
        return call.run()
    values["self"] = call.emit.new_zeros(values["self"], _extended_shape(call, halos))
    if "indices" in values:
        values["indices"] = _translate_indices(call, values["indices"], halos, inwards=True)
    gradient = call.run(operands=list(values.values()), padding=_window_padding(call, halos))
    for halo in halos:
        gradient = fold_halo(call, gradient, halo)
    return gradient


def _extended_shape(call: LocalCall, halos: Sequence[Halo]) -> list[int]:
    shape = list(named_values(call)["self"].shape)
    for halo in halos:
        shape[halo.dim] += halo.before + halo.after
    return shape


@rule_maker("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(call: OpCall) -> Rule:
    """The largest numbers of windows, and where in the whole image each stands."""
    large, small, sizes = _image_dims(call)
    exchange = halo_exchanges(_dims(call), call.operands[0])
    return bind_named(
        call,
        {"self": large},
        [small, small],
        sizes=sizes,
        exchange=exchange,
        local=_max_pool,
        uneven=_leading_dims(call),
    )


def _max_pool(call: LocalCall) -> Any:
    halos, value = sharded_halos(call, _dims(call.call)), call.operands[0]
    if not halos:
        return call.run()
    for halo in halos:
        value = extend_by_halo(call, value, halo, -math.inf)
    result, indices = call.run(operands=[value], padding=_window_padding(call, halos))
    return result, _translate_indices(call, indices, halos, inwards=False)


def _translate_indices(call: LocalCall, indices: Any, halos: Sequence[Halo], *, inwards: bool) -> Any:
    """Places in the whole image from places in this rank's stretch and its halos, or the other way round (`inwards`).

    A place is the row-major number of a position among all of an image.
    """
    emit, spatial = call.emit, _spatial_rank(call.call)
    names = list(named_values(call))
    whole = shape_of(call.call, "self")
    local, extent = call.operand_shape(names.index("self")), _extended_shape(call, halos)
    total, scale = None, 1
    for dim in reversed(range(len(whole) - spatial, len(whole))):
        source, target = (whole[dim], extent[dim]) if inwards else (extent[dim], whole[dim])
        place = emit.remainder(indices, source)
        indices = emit.div(indices, source, rounding_mode="floor")
        halo = next((halo for halo in halos if halo.dim == dim), None)
        if halo is not None:
            start = call.position(halo.name) * local[dim]
            start = start - halo.before
            place = place - start if inwards else place + start
            # A window of which all numbers are infinitely small may point at what lies outside the image.
            place = emit.clamp(place, 0, target - 1)
        place = place * scale if scale > 1 else place
        total = place if total is None else total + place
        scale *= target
    return total


@rule_maker("aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default")
def max_pool_backward(call: OpCall) -> Rule:
    """The gradient of the operand, of which only the shape is looked at."""
    large, small, sizes = _image_dims(call)
    return bind_named(
        call,
        {"grad_output": small, "self": large, "indices": small},
        [large],
        linear=[{"grad_output"}],
        sizes=sizes,
        exchange=halo_exchanges(_dims(call), call.operands[1]),
        local=_pool_backward,
        uneven=_leading_dims(call),
    )


# Pooling to a given size, to random windows, and back: leading dims (batch, channels) are independent.
#
# A mean over windows of one size, which lie side by side, may be sharded by positions too.

_IMAGES = (("2d", "h! w!", "y! x!"), ("3d", "t! h! w!", "z! y! x!"))

for _kind, _large, _small in _IMAGES:
    rule(f"aten.adaptive_max_pool{_kind}.default", f"... {_large} -> ... {_small}, ... {_small}")
    rule(
        f"aten.adaptive_max_pool{_kind}_backward.default",
        f"... {_small}, ... {_large}, ... {_small} -> ... {_large}",
        linear="0",
    )
    rule(f"aten.fractional_max_pool{_kind}.default", f"... {_large}, ... r! -> ... {_small}, ... {_small}")
    rule(
        f"aten.fractional_max_pool{_kind}_backward.default",
        f"... {_small}, ... {_large}, ... {_small} -> ... {_large}",
        linear="0",
    )
    rule(f"aten.max_unpool{_kind}.default", f"... {_small}, ... {_small} -> ... {_large}")


def _adaptive_dims(call: OpCall) -> tuple[str, str, dict[str, int]]:
    """Dims of the operand and of the pooled image, and sizes of names; e are the positions of a window."""
    whole = shape_of(call, "self")
    pooled = call.arg("grad_output") if "backward" in call.op.name() else call.results[0]
    assert isinstance(pooled, TensorMeta)
    spatial = 3 if "3d" in call.op.name() else 2
    large = factor_names("b", len(whole) - spatial)
    small, sizes = list(large), dict[str, int]()
    for dim in range(len(whole) - spatial, len(whole)):
        windows = pooled.shape[dim]
        if windows > 1 and whole[dim] % windows == 0:
            large.append(f"(x{dim} e{dim}!)")
            small.append(f"x{dim}")
            sizes |= {f"x{dim}": windows, f"e{dim}": whole[dim] // windows}
        else:
            large.append(f"p{dim}!")
            small.append(f"q{dim}!")
    return " ".join(large), " ".join(small), sizes


@rule_maker("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_mean_pool(call: OpCall) -> Rule:
    """Means of windows."""
    large, small, sizes = _adaptive_dims(call)
    return bind_named(
        call, {"self": large}, [small], linear=[{"self"}], sizes=sizes, local=_adaptive_mean_pool, uneven=True
    )


def _adaptive_mean_pool(call: LocalCall) -> Any:
    return call.run(output_size=list(call.result_shape()[-len(call.arg("output_size")) :]))


@rule_maker("aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default")
def adaptive_mean_pool_backward(call: OpCall) -> Rule:
    """The gradient of the operand, of which only the shape is looked at."""
    large, small, sizes = _adaptive_dims(call)
    return bind_named(call, {"grad_output": small, "self": large}, [large], linear=[{"grad_output"}], sizes=sizes)


# Operators that move positions of images: patches side by side, pixels from channels, channels in another order.
#
# Dims are products, so that sharding channels or positions stays local.


@rule_maker("aten.im2col.default")
def im2col(call: OpCall) -> Rule:
    """Patches as columns; the channels of the result are those of the image times the positions of a patch."""
    return bind("... c h! w! -> ... (c k!) l!", call, linear="0", sizes={"k": math.prod(call.arg("kernel_size"))})


@rule_maker("aten.col2im.default")
def col2im(call: OpCall) -> Rule:
    """Patches added up to an image."""
    return bind("... (c k!) l! -> ... c h! w!", call, linear="0", sizes={"k": math.prod(call.arg("kernel_size"))})


@rule_maker("aten.pixel_shuffle.default")
def pixel_shuffle(call: OpCall) -> Rule:
    """Channels become positions."""
    factor = call.arg("upscale_factor")
    text = "... (c a! b!) h w -> ... c (h a!) (w b!)"
    return bind(text, call, linear="0", sizes={"a": factor, "b": factor})


@rule_maker("aten.pixel_unshuffle.default")
def pixel_unshuffle(call: OpCall) -> Rule:
    """Positions become channels."""
    factor = call.arg("downscale_factor")
    text = "... c (h a!) (w b!) -> ... (c a! b!) h w"
    return bind(text, call, linear="0", sizes={"a": factor, "b": factor})


@rule_maker("aten.channel_shuffle.default")
def channel_shuffle(call: OpCall) -> Rule:
    """Channels of all groups in turn: a product of groups and channels, turned round."""
    positions = " ".join(f"s{dim}" for dim in range(2, len(call.operands[0].shape)))
    text = f"n (g c) {positions} -> n (c g) {positions}"
    return bind(text, call, linear="0", sizes={"g": call.arg("groups")}, local=_channel_shuffle, uneven=True)


def _channel_shuffle(call: LocalCall) -> Any:
    return call.run(groups=call.size("g"))
