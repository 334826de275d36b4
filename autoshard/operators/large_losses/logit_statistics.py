"""Rules of the statistics of logits computed in pieces (`loss_operator.py`), and of their gradients.

Rows are independent, and so are classes except for two numbers per row. A rank computes the `logsumexp` of its stretch
of the classes; ranks exchange maximum and sum, as for a softmax over a sharded dim. The expected logit of a row is a
partial sum.
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
"""Dims by argument: v the classes, d the width of the layer's input, which is whole."""


@rule_maker("autoshard::logit_statistics")
def logit_statistics(call: OpCall) -> Rule:
    """The logsumexp, which is reduced inside, and the expected logit, a partial sum."""
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
        # Classes with zero weights add nothing to the expected logit.
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
    """Run the operator on this rank's stretch of classes; targets outside become negative, which is no class."""
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
    """The wanted gradients: partial over the factors they lack; jointly linear in the incoming gradients."""
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
    """Count the same product again, and one for each wanted gradient of input and weight."""
    return 2 * math.prod(operands[2]) * operands[3][0] * (1 + sum(len(shape) > 1 for shape in results[:2]))


# Position of the layer's input, and bytes written and read per logit. The forward casts, takes maximum and log-softmax;
# the backward subtracts, takes exponentials, and multiplies.
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
    # Every piece is added to a gradient, which is read and written, and so is the piece's part in another dtype.
    wide = accumulation_dtype(dtype).itemsize
    sums = 2 * wide + (2 * dtype.itemsize if dtype.itemsize != wide else 0)
    streamed = logits * (bytes + sums * width / piece_step(width))
    # The backward recomputes the logits.
    return Work(count, dtype, name, streamed, repeated=2.0 * logits * width)
