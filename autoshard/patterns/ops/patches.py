"""Operators that move positions of images: patches side by side, pixels from channels, channels in another order.

Dims are products, so that sharding channels or positions stays local.
"""

from __future__ import annotations

import math
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


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
