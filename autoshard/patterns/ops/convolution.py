"""Convolutions: batch, input and output channels, groups and positions may be sharded.

Positions are sharded where the larger image has exactly `stride` positions for each of the smaller one, as with "same"
padding: every rank then computes its stretch of the result from its stretch of the operand and a halo. A convolution
extends its operand by the halo; a transposed one gives back what it computed for the neighbours.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import bind_named, named_values, shape_of
from autoshard.patterns.ops.halo import (
    Halo,
    Windows,
    extend_by_halos,
    fold_halos,
    padding_beside,
    window_settings,
    windows_over,
)
from autoshard.patterns.ops.matmul import with_added
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta


def _windows(call: OpCall) -> Windows:
    """The dims of positions; the larger image is the operand, or the result of a transposed convolution."""
    images = shape_of(call, "input")[2:], _result_meta(call).shape[2:]
    small, large = images if call.arg("transposed") else reversed(images)
    kernels = shape_of(call, "weight")[2:]
    strides, padding, dilations = (
        window_settings(call.arg(name), len(kernels)) for name in ("stride", "padding", "dilation")
    )
    reaches = [dilation * (kernel - 1) for dilation, kernel in zip(dilations, kernels, strict=True)]
    return windows_over(2, small, large, strides, padding, reaches)


def _result_meta(call: OpCall) -> TensorMeta:
    """The result of the convolution; in the backward, its gradient."""
    result = call.arg("grad_output") if "backward" in call.op.name() else call.result
    assert isinstance(result, TensorMeta)
    return result


def _operand_dims(call: OpCall, windows: Windows) -> dict[str, str]:
    """Dims of input, weight, bias and result; g are the groups, i and o the channels of one group."""
    small, large = " ".join(windows.small), " ".join(windows.large)
    kernel = " ".join(f"k{place}!" for place in range(len(windows.small)))
    transposed = call.arg("transposed")
    return {
        "input": f"n (g i) {small if transposed else large}",
        "weight": f"(g i) o {kernel}" if transposed else f"(g o) i {kernel}",
        "bias": "(g o)",
        "result": f"n (g o) {large if transposed else small}",
    }


def _convolution_rule(call: OpCall, windows: Windows, tensors: int, **options: Any) -> Rule:
    """The rule of either half, which exchanges the halos of so many tensors; other options as in `bind_named`."""
    first, second = shape_of(call, "weight")[:2]
    groups, transposed = call.arg("groups"), call.arg("transposed")
    ways = ("i", "o") if transposed else ("o", "i")
    large = _result_meta(call) if transposed else call.arg("input")
    return bind_named(
        call,
        sizes={"g": groups, ways[0]: first // groups, ways[1]: second} | windows.sizes,
        exchange=windows.exchanges(large, tensors),
        uneven=("n", "g", "o"),  # positions are not: a neighbour's rows lie at the very end of its stretch
        **options,
    )


def _padding_arguments(call: LocalCall, halos: list[Halo]) -> dict[str, Any]:
    """Settings in which the sharded dims are padded by their halos alone."""
    spatial = len(shape_of(call.call, "weight")) - 2
    return {
        name: padding_beside(halos, 2, window_settings(call.arg(name), spatial))
        for name in ("padding", "output_padding")
    }


@rule_maker("aten.convolution")
def convolution(call: OpCall) -> Rule:
    """Forward: input channels are contracted."""
    windows = _windows(call)
    items = _operand_dims(call, windows)
    return _convolution_rule(
        call,
        windows,
        1,
        operands=items,
        results=[items["result"]],
        linear=[{"input", "bias"}, {"weight", "bias"}],
        local=_convolution,
        fill={"i": 0.0},
    )


def _convolution(call: LocalCall) -> Any:
    values, halos = named_values(call), _windows(call.call).sharded_halos(call)
    changed = {"groups": call.size("g"), **_padding_arguments(call, halos)}
    position = call.position("i")
    if "bias" in values and position is not None:
        # Every rank of a contracted factor adds the bias: only the first may have one.
        values["bias"] = values["bias"] * position.eq(0)
    if not call.arg("transposed"):
        values["input"] = extend_by_halos(call, values["input"], halos)
        return call.run(operands=list(values.values()), **changed)
    if not halos or "bias" not in values:
        return fold_halos(call, call.run(operands=list(values.values()), **changed), halos)
    # Rows that go to a neighbour are added to rows that have the bias already.
    zeros = call.emit.zeros_like(values["bias"])
    result = call.run(operands=[values["input"], values["weight"], zeros], **changed)
    bias = values["bias"].view([-1, *[1] * (len(result.shape) - 2)])
    return fold_halos(call, result, halos) + bias


@rule_maker("aten.convolution_backward")
def convolution_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias.

    The input's is partial over output channels, the weight's and the bias's over batch and positions. Ranks that hold
    different input channels all see the whole incoming gradient, so the bias's gradient is whole on each.
    """
    windows = _windows(call)
    items = _operand_dims(call, windows)
    wanted = tuple(call.arg("output_mask"))
    linear = [{"grad_output"}]
    if wanted == (False, True, False):
        linear.append({"input"})
    if wanted == (True, False, False):
        linear.append({"weight"})
    return _convolution_rule(
        call,
        windows,
        1 if call.arg("transposed") else 1 + wanted[0],
        operands={"grad_output": items["result"], "input": items["input"], "weight": items["weight"]},
        results=[items["input"], items["weight"], items["bias"]],
        linear=linear,
        reduce={"i": ("sum", "sum", None)},
        local=_convolution_backward,
        fill={"i": None},
    )


def _convolution_backward(call: LocalCall) -> Any:
    values, halos = named_values(call), _windows(call.call).sharded_halos(call)
    changed = {"groups": call.size("g"), **_padding_arguments(call, halos)}
    channels = call.arg("bias_sizes")
    if channels is not None:
        changed["bias_sizes"] = [call.operand_shape(0)[1]]
    if not halos:
        return call.run(**changed)
    transposed, wanted = call.arg("transposed"), call.arg("output_mask")
    large = "grad_output" if transposed else "input"
    gradient = values["grad_output"]
    values[large] = extend_by_halos(call, values[large], halos)
    # The bias is summed apart: the rows of a halo are the neighbours' to sum.
    mask = [wanted[0], wanted[1], wanted[2] and not transposed]
    grad_input, grad_weight, grad_bias = call.run(operands=list(values.values()), output_mask=mask, **changed)
    if wanted[0] and not transposed:
        grad_input = fold_halos(call, grad_input, list(reversed(halos)))
    if wanted[2] and transposed:
        dims = [dim for dim in range(len(gradient.shape)) if dim != 1]
        grad_bias = gradient.sum(dims)
    return grad_input, grad_weight, grad_bias


# Convolution along time of tensors laid out as (time, batch, channels).


@rule_maker("aten.conv_tbc")
def _conv_tbc(call: OpCall) -> Rule:
    """Input channels are contracted; the bias counts once."""
    text, local = "t! b i, k! i o, o -> time! b o", with_added(2, "i")
    return bind(text, call, linear="0+2, 1+2", local=local, uneven=("b", "o"), fill={"i": 0.0})


# Gradients of input, weight and bias, which is read for its shape alone. Whatever input channels a rank has, it sums
# the whole gradient of the bias.
rule(
    "aten.conv_tbc_backward",
    "time! b o, t! b i, k! i o, o -> t! b i, k! i o, o",
    linear="0",
    reduce={"i": ("sum", "sum", None)},
)
