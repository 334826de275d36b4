"""Padding by reflected or repeated positions: dims that are not padded are independent."""

from __future__ import annotations

from autoshard.patterns.ops._helpers import bind_named, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_NAMES = [f"aten.{kind}_pad{spatial}d" for kind in ("reflection", "replication") for spatial in (1, 2, 3)]


def _image_dims(call: OpCall) -> tuple[str, str]:
    """Dims of the operand and of the padded image."""
    rank, padding = len(shape_of(call, "self")), call.arg("padding")
    source, padded = [], []
    for dim in range(rank):
        place = 2 * (rank - 1 - dim)  # the padding of the last dim comes first
        whole = any(padding[place : place + 2])
        source.append(f"p{dim}!" if whole else f"d{dim}")
        padded.append(f"q{dim}!" if whole else f"d{dim}")
    return " ".join(source), " ".join(padded)


@rule_maker(*(f"{name}.default" for name in _NAMES))
def edge_pad(call: OpCall) -> Rule:
    """Forward."""
    source, padded = _image_dims(call)
    return bind_named(call, {"self": source}, [padded], linear=[{"self"}])


@rule_maker(*(f"{name}_backward.default" for name in _NAMES))
def edge_pad_backward(call: OpCall) -> Rule:
    """The gradient of the operand, of which only the shape is looked at."""
    source, padded = _image_dims(call)
    return bind_named(call, {"grad_output": padded, "self": source}, [source], linear=[{"grad_output"}])
