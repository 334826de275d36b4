"""Distances between all points of one set and all points of another: coordinates must be whole, points need not."""

from __future__ import annotations

from autoshard.patterns.notation import bind
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule

rule("aten._cdist_forward", "... i k!, ... j k! -> ... i j")
rule("aten._euclidean_dist", "... i k!, ... j k! -> ... i j")


@rule_maker("aten._cdist_backward")
def _cdist_backward(call: OpCall) -> Rule | None:
    """None for an empty batch: its gradient has the size of a batch that was broadcast to nothing."""
    if any(0 in meta.shape for meta in call.operands):
        return None
    return bind("... i j, ... i k, ... j k, ... i j -> ... i k", call, linear="0")
