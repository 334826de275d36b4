"""Pooling and resampling: leading dims (batch, channels) are independent, positions stay together."""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule

_PLANES = "... h! w! -> ... y! x!"
_PLANES_BACK = "... y! x!, ... h! w! -> ... h! w!"

rule("aten.max_pool2d_with_indices", "... h! w! -> ... y! x!, ... y! x!")
rule(
    "aten.max_pool2d_with_indices_backward.default",
    "... y! x!, ... h! w!, ... y! x! -> ... h! w!",
    linear="0",
)
rule("aten.max_pool3d_with_indices", "... t! h! w! -> ... z! y! x!, ... z! y! x!")
rule(
    "aten.max_pool3d_with_indices_backward.default",
    "... z! y! x!, ... t! h! w!, ... z! y! x! -> ... t! h! w!",
    linear="0",
)
rule(["aten.adaptive_max_pool2d.default"], "... h! w! -> ... y! x!, ... y! x!")
rule(
    "aten.adaptive_max_pool2d_backward.default",
    "... y! x!, ... h! w!, ... y! x! -> ... h! w!",
    linear="0",
)
rule(["aten.avg_pool2d.default", "aten._adaptive_avg_pool2d.default"], _PLANES, linear="0")
rule(["aten.avg_pool2d_backward.default", "aten._adaptive_avg_pool2d_backward.default"], _PLANES_BACK, linear="0")
rule(["aten.avg_pool3d.default", "aten._adaptive_avg_pool3d.default"], "... t! h! w! -> ... z! y! x!", linear="0")
rule(
    ["aten.avg_pool3d_backward.default", "aten._adaptive_avg_pool3d_backward.default"],
    "... z! y! x!, ... t! h! w! -> ... t! h! w!",
    linear="0",
)
rule(
    ["aten.upsample_nearest2d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d", "aten.reflection_pad2d.default"],
    _PLANES,
    linear="0",
)
rule("aten.reflection_pad2d_backward.default", _PLANES_BACK, linear="0")


@rule_maker(
    "aten.upsample_nearest2d_backward.default",
    "aten.upsample_bilinear2d_backward.default",
    "aten.upsample_bicubic2d_backward.default",
)
def upsample_backward(call: OpCall) -> Rule:
    """The gradient of a resampled image: the operator is told the size of the local image."""
    return bind("n c y! x! -> n c h! w!", call, linear="0", local=_upsample_backward)


def _upsample_backward(call: LocalCall) -> Any:
    return call.run(input_size=list(call.result_shape()))
