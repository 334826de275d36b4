"""Reductions of segments of a dim: the dim and the list of segments are whole, all other dims run side by side."""

from __future__ import annotations

from autoshard.patterns.ops._helpers import bind_named, factor_names
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten.segment_reduce", "aten._segment_reduce_backward")
def _segments(call: OpCall) -> Rule | None:
    """Segments are given by their lengths, or by their ends, which are one more; those by index are replicated."""
    backward = call.op._schema.name == "aten::_segment_reduce_backward"
    if not backward and call.arg("indices") is not None:
        return None
    data = call.arg("data")
    axis = call.arg("axis") % len(data.shape)
    before = " ".join(factor_names("b", axis))
    after = " ".join(factor_names("d", len(data.shape) - axis - 1))
    elements, reduced = f"{before} n! {after}", f"{before} s! {after}"
    sums = call.arg("reduce") in ("sum", "mean") and call.arg("initial") is None
    return bind_named(
        call,
        {
            "data": elements,
            "grad": reduced,
            "output": reduced,
            "lengths": f"{before} s!",
            "offsets": f"{before} ends!",
        },
        [elements if backward else reduced],
        linear=[{"grad"}] if backward else [{"data"}] if sums else [],
        uneven=factor_names("d", len(data.shape) - axis - 1),  # lengths in padding would have to add up
    )
