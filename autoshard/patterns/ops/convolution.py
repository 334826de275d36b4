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
    WindowDim,
    extend_by_halo,
    fold_halo,
    halo_exchanges,
    sharded_halos,
    window_dim,
    window_setting,
)
from autoshard.patterns.ops.matmul import keep_on_first_rank
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Exchange, OpCall, Rule, TensorMeta


def _dims(call: OpCall) -> list[WindowDim]:
    """The dims of positions; the larger image is the operand, or the result of a transposed convolution."""
    images = shape_of(call, "input"), _result_meta(call).shape
    small, large = images if call.arg("transposed") else reversed(images)
    dims = []
    for place, kernel in enumerate(shape_of(call, "weight")[2:]):
        stride, padding, dilation = (
            window_setting(call.arg(name), place) for name in ("stride", "padding", "dilation")
        )
        dim = 2 + place
        dims.append(window_dim(place, dim, small[dim], large[dim], stride, padding, dilation * (kernel - 1)))
    return dims


def _result_meta(call: OpCall) -> TensorMeta:
    """The result of the convolution; in the backward, its gradient."""
    result = call.arg("grad_output") if "backward" in call.op.name() else call.results[0]
    assert isinstance(result, TensorMeta)
    return result


def _operand_dims(call: OpCall) -> dict[str, str]:
    """Dims of input, weight, bias and result; g are the groups, i and o the channels of one group."""
    dims = _dims(call)
    small, large = (" ".join(getattr(dim, name) for dim in dims) for name in ("small", "large"))
    kernel = " ".join(f"k{place}!" for place in range(len(dims)))
    transposed = call.arg("transposed")
    return {
        "input": f"n (g i) {small if transposed else large}",
        "weight": f"(g i) o {kernel}" if transposed else f"(g o) i {kernel}",
        "bias": "(g o)",
        "result": f"n (g o) {large if transposed else small}",
    }


def _sizes(call: OpCall) -> dict[str, int]:
    groups = call.arg("groups")
    first, second = shape_of(call, "weight")[:2]
    ways = ("i", "o") if call.arg("transposed") else ("o", "i")
    sizes = {"g": groups, ways[0]: first // groups, ways[1]: second}
    for dim in _dims(call):
        sizes |= dim.sizes
    return sizes


def _exchange(call: OpCall, tensors: int) -> dict[str, list[Exchange]]:
    large = _result_meta(call) if call.arg("transposed") else call.arg("input")
    return halo_exchanges(_dims(call), large, tensors)


def _padding_arguments(call: LocalCall, halos: list[Halo]) -> dict[str, Any]:
    """Settings in which the sharded dims are padded by their halos alone."""
    spatial = len(shape_of(call.call, "weight")) - 2
    bare = {halo.dim - 2 for halo in halos}
    return {
        name: [0 if place in bare else window_setting(call.arg(name), place) for place in range(spatial)]
        for name in ("padding", "output_padding")
    }


@rule_maker("aten.convolution")
def convolution(call: OpCall) -> Rule:
    """Forward: input channels are contracted."""
    items = _operand_dims(call)
    return bind_named(
        call,
        items,
        [items["result"]],
        linear=[{"input", "bias"}, {"weight", "bias"}],
        sizes=_sizes(call),
        exchange=_exchange(call, 1),
        local=_convolution,
        uneven=("n", "g", "o"),  # positions are not: a neighbour's rows lie at the very end of its stretch
        fill={"i": 0.0},
    )


def _convolution(call: LocalCall) -> Any:
    emit, values, halos = call.emit, named_values(call), sharded_halos(call, _dims(call.call))
    changed = {"groups": call.size("g"), **_padding_arguments(call, halos)}
    position = call.position("i")
    if "bias" in values and position is not None:
        # Every rank of a contracted factor adds the bias: only the first may have one.
        values["bias"] = values["bias"] * emit.eq(position, 0)
    if not call.arg("transposed"):
        for halo in halos:
            values["input"] = extend_by_halo(call, values["input"], halo)
        return call.run(operands=list(values.values()), **changed)
    if not halos or "bias" not in values:
        return _fold_halos(call, call.run(operands=list(values.values()), **changed), halos)
    # Rows that go to a neighbour are added to rows that have the bias already.
    zeros = emit.zeros_like(values["bias"])
    result = call.run(operands=[values["input"], values["weight"], zeros], **changed)
    bias = emit.view(values["bias"], [-1, *[1] * (len(result.shape) - 2)])
    return _fold_halos(call, result, halos) + bias


def _fold_halos(call: LocalCall, value: Any, halos: list[Halo]) -> Any:
    for halo in halos:
        value = fold_halo(call, value, halo)
    return value


@rule_maker("aten.convolution_backward")
def convolution_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias.

    The input's is partial over output channels, the weight's and the bias's over batch and positions. Ranks that hold
    different input channels all see the whole incoming gradient, so the bias's gradient is whole on each.
    """
    items = _operand_dims(call)
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
        exchange=_exchange(call, 1 if call.arg("transposed") else 1 + wanted[0]),
        local=_convolution_backward,
        uneven=("n", "g", "o"),
        fill={"i": None},
    )


def _convolution_backward(call: LocalCall) -> Any:
    values, halos = named_values(call), sharded_halos(call, _dims(call.call))
    changed = {"groups": call.size("g"), **_padding_arguments(call, halos)}
    channels = call.arg("bias_sizes")
    if channels is not None:
        changed["bias_sizes"] = [call.operand_shape(0)[1]]
    if not halos:
        return call.run(**changed)
    transposed, wanted = call.arg("transposed"), call.arg("output_mask")
    large = "grad_output" if transposed else "input"
    gradient = values["grad_output"]
    for halo in halos:
        values[large] = extend_by_halo(call, values[large], halo)
    # The bias is summed apart: the rows of a halo are the neighbours' to sum.
    mask = [wanted[0], wanted[1], wanted[2] and not transposed]
    grad_input, grad_weight, grad_bias = call.run(operands=list(values.values()), output_mask=mask, **changed)
    if wanted[0] and not transposed:
        grad_input = _fold_halos(call, grad_input, list(reversed(halos)))
    if wanted[2] and transposed:
        dims = [dim for dim in range(len(gradient.shape)) if dim != 1]
        grad_bias = call.emit.sum(gradient, dims)
    return grad_input, grad_weight, grad_bias


# Convolution along time of tensors laid out as (time, batch, channels).


@rule_maker("aten.conv_tbc")
def _conv_tbc(call: OpCall) -> Rule:
    """Input channels are contracted; the bias counts once."""
    text = "t! b i, k! i o, o -> time! b o"
    fill = {"i": 0.0}
    return bind(text, call, linear="0+2, 1+2", local=_local_conv_tbc, uneven=("b", "o"), fill=fill)


def _local_conv_tbc(call: LocalCall) -> Any:
    return call.run(operands=keep_on_first_rank(call, 2, ["i"]))


@rule_maker("aten.conv_tbc_backward")
def _conv_tbc_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias; whatever input channels a rank has, it sums the whole gradient of the bias.

    The bias is read for its shape alone.
    """
    text = "time! b o, t! b i, k! i o, o -> t! b i, k! i o, o"
    return bind(text, call, linear="0", reduce={"i": ("sum", "sum", None)})
