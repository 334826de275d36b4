"""Convolutions: batch, input and output channels and groups may be sharded; positions stay together."""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import aten, bind_named, named_values, numbered, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


def _items(call: OpCall) -> dict[str, str]:
    """Dims of input, weight, bias and result; g are the groups, i and o the channels of one group."""
    spatial = len(shape_of(call, "weight")) - 2
    positions, kernel, out = (" ".join(f"{name}!" for name in numbered(prefix, spatial)) for prefix in "pkq")
    weight = f"(g i) o {kernel}" if call.arg("transposed") else f"(g o) i {kernel}"
    return {"input": f"n (g i) {positions}", "weight": weight, "bias": "(g o)", "result": f"n (g o) {out}"}


def _sizes(call: OpCall) -> dict[str, int]:
    groups = call.arg("groups")
    first, second = shape_of(call, "weight")[:2]
    ways = ("i", "o") if call.arg("transposed") else ("o", "i")
    return {"g": groups, ways[0]: first // groups, ways[1]: second}


@rule_maker("aten.convolution")
def convolution(call: OpCall) -> Rule:
    """Forward: input channels are contracted."""
    items = _items(call)
    return bind_named(
        call,
        items,
        [items["result"]],
        linear=[{"input", "bias"}, {"weight", "bias"}],
        sizes=_sizes(call),
        local=_convolution,
    )


def _convolution(call: LocalCall) -> Any:
    groups = call.arg("groups") // call.share("g")
    values, position = named_values(call), call.position("i")
    if "bias" not in values or position is None:
        return call.run(groups=groups)
    # Every rank of a contracted factor adds the bias: only the first may have one.
    emit = call.emit
    first = emit.call(aten.eq.Scalar, position, 0)
    values["bias"] = emit.call(aten.mul.Tensor, values["bias"], first)
    return call.run(operands=list(values.values()), groups=groups)


@rule_maker("aten.convolution_backward")
def convolution_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias.

    The input's is partial over output channels, the weight's and the bias's over the batch. Ranks that hold different
    input channels all see the whole incoming gradient, so the bias's gradient is whole on each.
    """
    items = _items(call)
    wanted = tuple(call.arg("output_mask"))
    linear = [{"grad_output"}]
    if wanted == (False, True, False):
        linear.append({"input"})
    if wanted == (True, False, False):
        linear.append({"weight"})
    return bind_named(
        call,
        {"grad_output": items["result"], "input": items["input"], "weight": items["weight"]},
        [items["input"], items["weight"], items["bias"]],
        linear=linear,
        reduce={"i": ("sum", "sum", None)},
        sizes=_sizes(call),
        local=_convolution_backward,
    )


def _convolution_backward(call: LocalCall) -> Any:
    groups = call.arg("groups") // call.share("g")
    channels = call.arg("bias_sizes")
    if channels is not None:
        channels = [call.operand_shape(0)[1]]
    return call.run(groups=groups, bias_sizes=channels)
