"""Statistics of logits that are made in pieces (`loss_operator.py`), and their gradients.

Rows are independent, and so are the classes but for two numbers per row. A rank that holds a stretch of the classes
takes its own `logsumexp`, of which the ranks exchange maximum and sum, as of a softmax over a sharded dim; what it
expects of a row is its part of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.cluster.cost import Shape, TensorLike, Work, flops, price_by_flops, price_by_work
from autoshard.operator_library import accumulation_dtype
from autoshard.operators.large_losses.loss_operator import piece_step
from autoshard.patterns._torch import OpOverload
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.helpers import bind_named, if_sharded, local_positions, named_values
from autoshard.patterns.padding import is_padded, without_padded_steps
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_DIMS = {
    "hidden": "... d!",
    "weight": "v^ d!",
    **dict.fromkeys(("bias", "class_weights"), "v^"),
    **dict.fromkeys(("targets", "logsumexp", "grad_logsumexp", "grad_expected"), "..."),
}
"""Dims by argument: v the classes, d the width of the layer's input, of which every rank needs all."""


@rule_maker("autoshard::logit_statistics")
def logit_statistics(call: OpCall) -> Rule:
    """The logarithm of the sum of exponentials, which is reduced inside, and what is expected, a partial sum."""
    hidden = call.operands[0]
    row_bytes = math.prod(hidden.shape[:-1]) * accumulation_dtype(hidden.dtype).itemsize
    return bind_named(
        call,
        _DIMS,
        ["...", "..."],
        reduce={"v": (None, "sum")},
        exchange={"v": [("all_reduce", row_bytes), ("all_reduce", row_bytes)]},
        local=_statistics,
        uneven=["..."],
        # Nothing is expected of classes whose weights are zero.
        fill={"v": 0.0},
    )


@if_sharded("v")
def _statistics(call: LocalCall) -> Any:
    logsumexp, expected = _run_on_local_classes(call)
    largest = call.all_reduce(logsumexp, "v", "max")
    total = call.all_reduce((logsumexp - largest).exp(), "v")
    return largest + total.log(), expected


@if_sharded("v")
def _run_on_local_classes(call: LocalCall) -> Any:
    """The operator on this rank's stretch of the classes: targets outside it become negative, and no class."""
    values, stretch = named_values(call), call.size("v")
    target, outside = local_positions(call, values["targets"], "v", stretch)
    values["targets"] = target.masked_fill(outside, -1)
    is_class = {}
    if is_padded(call, ["v"]):
        ones = call.emit.ones([stretch], dtype=torch.bool, device=target.device)
        is_class = {"is_class": without_padded_steps(call, ones, ["v"])}
    return call.run(operands=list(values.values()), **is_class)


@rule_maker("autoshard::logit_statistics_backward")
def logit_statistics_backward(call: OpCall) -> Rule:
    """The gradients that are asked for: partial over what they lack; linear in the incoming ones together."""
    wanted = zip(("... d!", "v^ d!", "v^"), call.arg("output_mask"), strict=True)
    return bind_named(
        call,
        _DIMS,
        [dims if asked else f"none{index}!" for index, (dims, asked) in enumerate(wanted)],
        linear=[{"grad_logsumexp", "grad_expected"}],
        local=_run_on_local_classes,
        uneven=True,
        fill={"v": 0.0},
    )


# Prices.


@price_by_flops("logit_statistics")
def _logits(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Count the product of a loss in pieces."""
    return 2 * math.prod(operands[0]) * operands[1][0]


@price_by_flops("logit_statistics_backward")
def _logits_backward(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Count the same product again, and one for each of the gradients of input and weight that are asked for."""
    return 2 * math.prod(operands[2]) * operands[3][0] * (1 + sum(len(shape) > 1 for shape in results[:2]))


# By position of the layer's input, the bytes that are written and read of every logit. The forward casts, takes maximum
# and log-softmax; the backward subtracts, takes exponentials, and multiplies.
_FORWARD, _BACKWARD = (0, 18), (2, 22)


@price_by_work("logit_statistics", "logit_statistics_backward")
def _work(
    op: OpOverload, operands: Sequence[TensorLike], results: Sequence[TensorLike], args: Sequence[object] = ()
) -> Work:
    name = op.overloadpacket.__name__
    hidden, bytes = _BACKWARD if name.endswith("_backward") else _FORWARD
    count = flops(op, [tensor.shape for tensor in operands], [tensor.shape for tensor in results], args)
    dtype, width = operands[hidden].dtype, operands[hidden].shape[-1]
    logits = math.prod(operands[hidden].shape[:-1]) * operands[hidden + 1].shape[0]
    if not hidden:
        return Work(count, dtype, name, float(bytes * logits))
    # A gradient gets a part of every piece. It is read and written, and so is the part if its dtype is another one.
    wide = accumulation_dtype(dtype).itemsize
    sums = 2 * wide + (2 * dtype.itemsize if dtype.itemsize != wide else 0)
    streamed = logits * (bytes + sums * width / piece_step(width))
    # The backward makes the logits a second time.
    return Work(count, dtype, name, streamed, repeated=2.0 * logits * width)
