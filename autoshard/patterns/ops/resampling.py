"""Images at other positions: upsampling, and sampling at the points of a grid. Batch and channels are independent.

Where every position becomes a whole number of copies, or one of several is kept, positions may be sharded too.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import bind_named, run_resized, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule

_NEAREST = [f"{kind}{spatial}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for spatial in (1, 2, 3)]
_SMOOTH = [
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
]


def _names(prefix: str, spatial: int) -> str:
    return " ".join(f"{prefix}{place}!" for place in range(spatial))


@rule_maker(
    *(f"aten.{name}{half}.default" for name in _SMOOTH for half in ("", "_backward")),
    *(f"aten.{name}.vec" for name in (*_SMOOTH, *_NEAREST)),
)
def upsample_smooth(call: OpCall) -> Rule:
    """Interpolated images, a position of the result between several of the operand; or sizes given by scales alone."""
    spatial = len(call.operands[0].shape) - 2
    return _resampling_rule(call, _names("p", spatial), _names("q", spatial), {}, None)


def _resampling_rule(
    call: OpCall, source: str, result: str, sizes: dict[str, int], forward: LocalProgram | None
) -> Rule:
    """The rule of either half, positions of the image written `source` and `result`; a backward is told local sizes."""
    if call.op._schema.name.endswith("_backward"):
        source, result, forward = result, source, _local_upsample_backward
    uneven = None if forward is None else True
    return bind(f"n c {source} -> n c {result}", call, linear="0", sizes=sizes, local=forward, uneven=uneven)


def _local_upsample_backward(call: LocalCall) -> Any:
    return call.run(output_size=list(call.operand_shape(0)[2:]), input_size=list(call.result_shape()))


@rule_maker(*(f"aten.{name}{half}.default" for name in _NEAREST for half in ("", "_backward")))
def upsample_nearest(call: OpCall) -> Rule:
    """Copies of positions, or a choice of them."""
    shape = call.arg("input_size") if call.op._schema.name.endswith("_backward") else call.operands[0].shape
    source, result, sizes = _image_dims(call, shape, call.arg("output_size"))
    return _resampling_rule(call, source, result, sizes, run_resized("output_size", 2))


def _image_dims(call: OpCall, shape: tuple[int, ...], resampled: tuple[int, ...]) -> tuple[str, str, dict[str, int]]:
    """Dims of positions of the operand and of the result, and the sizes of names; e are the copies."""
    source, result = [], []
    sizes: dict[str, int] = {}
    for place, (before, after) in enumerate(zip(shape[2:], resampled, strict=True)):
        copies, step = divmod(max(before, after), min(before, after))
        ratio = _given_scale(call, place, len(resampled))
        if step == 0 and ratio in (None, after / before):
            many, single = f"(x{place} e{place}!)", f"x{place}"
            source.append(single if after > before else many)
            result.append(many if after > before else single)
            sizes |= {f"x{place}": min(before, after), f"e{place}": copies}
        else:
            source.append(f"p{place}!")
            result.append(f"q{place}!")
    return " ".join(source), " ".join(result), sizes


def _given_scale(call: OpCall, place: int, spatial: int) -> float | None:
    """The scale that the call names for a dim of positions, if any."""
    name = "scales" if spatial == 1 else ("scales_d", "scales_h", "scales_w")[3 - spatial + place]
    scale: float | None = call.arg(name)
    return scale


# Images sampled at the points of a grid: batch, channels and points are independent; the image's positions are whole.
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
    """Zeros for the padding of batch and points: kernels take numbers of the grid for places, and check none."""
    return dict.fromkeys((name for name in items["grid"].split() if "!" not in name), 0.0)


_SAMPLERS = [f"aten.{name}" for name in ("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")]


@rule_maker(*(f"{name}.default" for name in _SAMPLERS), "aten.cudnn_grid_sampler.default")
def grid_sample(call: OpCall) -> Rule:
    """Forward; linear in the image."""
    items = _operand_dims(call)
    return bind_named(call, items, [items["grad_output"]], linear=[{"input", "self"}], fill=_fill(items))


@rule_maker(*(f"{name}_backward.default" for name in _SAMPLERS))
def grid_sample_backward(call: OpCall) -> Rule:
    """Gradients of image and grid; linear in the incoming one."""
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
