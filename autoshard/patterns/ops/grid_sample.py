"""Images sampled at the points of a grid: batch, channels and points are independent; the image's positions are whole.

The gradient of the image is partial over the points, that of the grid over the channels.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import bind_named, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


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


@rule_maker(
    "aten.grid_sampler_2d.default",
    "aten.grid_sampler_3d.default",
    "aten._grid_sampler_2d_cpu_fallback.default",
    "aten.cudnn_grid_sampler.default",
)
def grid_sample(call: OpCall) -> Rule:
    """Forward; linear in the image."""
    items = _operand_dims(call)
    image = "self" if "cudnn" in call.op.name() else "input"
    return bind_named(call, items, [items["grad_output"]], linear=[{image}], fill=_fill(items))


@rule_maker(
    "aten.grid_sampler_2d_backward.default",
    "aten.grid_sampler_3d_backward.default",
    "aten._grid_sampler_2d_cpu_fallback_backward.default",
)
def grid_sample_backward(call: OpCall) -> Rule:
    """Gradients of image and grid; linear in the incoming one."""
    items = _operand_dims(call)
    return bind_named(call, items, [items["input"], items["grid"]], linear=[{"grad_output"}], fill=_fill(items))


@rule_maker("aten.affine_grid_generator.default")
def affine_grid(call: OpCall) -> Rule:
    """The grid of an affine map; linear in the map."""
    spatial = len(call.arg("size")) - 2
    points = " ".join(f"x{place}!" for place in range(spatial))
    return bind(f"n r! k! -> n {points} v!", call, linear="0", local=_affine_grid, uneven=True)


def _affine_grid(call: LocalCall) -> Any:
    return call.run(size=[call.operand_shape(0)[0], *call.arg("size")[1:]])
