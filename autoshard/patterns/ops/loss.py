"""Losses, softmax, log-softmax, and their gradients: the class dim may be sharded.

For a softmax over a sharded dim, each rank computes maximum and sum of its stretch, and ranks exchange these, one
number per row each (vocabulary-parallel cross-entropy). The mean of a shard is not a partial sum: each rank divides its
sum by the count or weight of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.operator_library import accumulation_dtype
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.helpers import (
    all_reduce_over,
    aten,
    bind_named,
    factor_names,
    if_sharded,
    local_positions,
    named_values,
    operand_names,
    operands_for_sums,
    result_dtype,
    shape_of,
)
from autoshard.patterns.padding import padded_factors, without_padded_steps, without_padding
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule


def _softmax_dims(call: OpCall) -> str:
    """Dims of the tensor; `d` is that of the softmax."""
    names = factor_names("b", len(call.operands[0].shape))
    if names:
        names[call.arg("dim")] = "d"
    return " ".join(names)


def _row_bytes(call: OpCall) -> int:
    """Bytes of one number per row, in the accumulation dtype."""
    meta = call.operands[0]
    length = meta.shape[call.arg("dim")] if meta.shape else 1
    return math.prod(meta.shape) // max(length, 1) * accumulation_dtype(meta.dtype).itemsize


def _row_sum(call: LocalCall, value: Any) -> Any:
    """The sum of every row over all ranks."""
    return call.all_reduce(value.sum([call.arg("dim")], True), "d")


@if_sharded("d")
def _softmax(call: LocalCall) -> Any:
    (value,) = operands_for_sums(call)
    # Subtract the maximum of the whole row, so that no exponential overflows.
    maximum = call.all_reduce(value.amax([call.arg("dim")], True), "d", "max")
    parts = (value - maximum).exp()
    result = parts / _row_sum(call, parts)
    if call.call.op is aten._safe_softmax.default:
        masked = maximum.eq(-math.inf)  # exp(-inf - -inf) is nan: a fully masked row becomes zeros
        result = result.masked_fill(masked, 0.0)
    return result.to(result_dtype(call))


@if_sharded("d")
def _log_softmax(call: LocalCall) -> Any:
    """`value - log(sum(exp(value)))`, with each stretch's sum from its own log-softmax at its maximum.

    The log-softmax kernel reads a stretch once; separate maximum, exponentials and sum would read it three times.
    """
    emit, dim, (value,) = call.emit, call.arg("dim"), operands_for_sums(call)
    maximum, place = value.max(dim, True)
    # At the maximum, a stretch's log-softmax is the maximum minus the logarithm of its sum of exponentials.
    stretch_log = emit._log_softmax(value, dim, False).gather(dim, place)
    nothing = maximum.eq(-math.inf)  # this stretch of the row is masked: its sum is zero
    stretch_log = (maximum - stretch_log).masked_fill(nothing, -math.inf)
    largest = call.all_reduce(stretch_log, "d", "max")
    total = call.all_reduce((stretch_log - largest).exp(), "d")
    logarithm = largest + total.log()
    return (value - logarithm).to(result_dtype(call))


@rule_maker("aten._softmax", "aten._safe_softmax", local=_softmax)
@rule_maker("aten._log_softmax", local=_log_softmax)
def softmax(call: OpCall, local: LocalProgram) -> Rule:
    """Forward; `_safe_softmax` returns zeros for fully masked rows."""
    items, exchange, fill = _softmax_dims(call), {"d": 2 * _row_bytes(call)}, {"d": -math.inf}
    return bind_named(call, {"self": items}, [items], exchange=exchange, local=local, uneven=True, fill=fill)


@if_sharded("d")
def _softmax_backward(call: LocalCall) -> Any:
    """`output · (gradient - sum(gradient · output))`."""
    gradient, output = operands_for_sums(call)
    parts = gradient * output
    result = parts.addcmul(output, _row_sum(call, parts), value=-1)
    return result.to(result_dtype(call))


@if_sharded("d")
def _log_softmax_backward(call: LocalCall) -> Any:
    """`gradient - exp(output) · sum(gradient)`."""
    gradient, output = operands_for_sums(call)
    parts = output.exp()
    result = gradient.addcmul(parts, _row_sum(call, gradient), value=-1)
    return result.to(result_dtype(call))


@rule_maker("aten._softmax_backward_data", local=_softmax_backward)
@rule_maker("aten._log_softmax_backward_data", local=_log_softmax_backward)
def softmax_backward(call: OpCall, local: LocalProgram) -> Rule:
    """Gradient of the operand; linear in the incoming gradient."""
    items = _softmax_dims(call)
    return bind_named(
        call,
        {"grad_output": items, "output": items},
        [items],
        linear=[{"grad_output"}],
        exchange={"d": _row_bytes(call)},
        local=local,
        uneven=True,
        fill={"d": 0.0},
    )


# Negative log-likelihood, whose classes may be sharded too, and elementwise losses.

_NONE, _MEAN, _SUM = 0, 1, 2  # what ATen's `reduction` arguments mean
_IGNORED_TARGET = -100  # a class that does not exist


def _likelihood_dims(call: OpCall) -> dict[str, str]:
    """Dims of the scores, the targets and the class weights; c are the classes."""
    rank = len(shape_of(call, "self"))
    samples = {1: [], 2: ["n"], 4: ["n", "h", "w"]}[rank]
    scores = [*samples[:1], "c^", *samples[1:]]
    target = " ".join(samples)
    return {
        "self": " ".join(scores),
        "target": target,
        "weight": "c^",
        "total_weight": "",
        "grad_output": target if call.arg("reduction") == _NONE else "",
    }


@rule_maker("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss(call: OpCall) -> Rule:
    """Loss and total weight: a rank's loss is its term of the sum; the total weight is reduced inside."""
    items = _likelihood_dims(call)
    samples = items["target"].split()
    return bind_named(
        call,
        items,
        [items["grad_output"], ""],
        reduce=dict.fromkeys([*samples, "c"], ("sum", None)),
        exchange=dict.fromkeys([*samples, "c"], call.operands[0].dtype.itemsize),
        local=_nll_loss,
        fill=dict.fromkeys([*samples, "c"]),
    )


@if_sharded("c", "n", "h", "w")
def _nll_loss(call: LocalCall) -> Any:
    names = ["c", *_likelihood_dims(call.call)["target"].split()]
    if call.arg("reduction") == _NONE and len(names) > 1:  # for a single sample, torch always returns the total weight
        return _run_on_local_classes(call)
    # Give padding samples the ignored target.
    _replace_padding(call, "target", names[1:], call.arg("ignore_index"))
    # Not the mean: it would divide by the weight of this rank's samples only.
    loss, weight = _run_on_local_classes(call, reduction=_SUM)
    weight = all_reduce_over(call, weight, names)
    if call.arg("reduction") == _MEAN:
        loss = loss / weight
    return loss, weight


def _replace_padding(call: LocalCall, name: str, factors: Sequence[str], fill: float) -> None:
    """Fill the padding of the operand passed as the argument `name`."""
    place = operand_names(call.call).index(name)
    values = list(call.operands)
    values[place] = without_padding(call, place, values[place], factors, fill)
    call.operands = tuple(values)


def _run_on_local_classes(call: LocalCall, **changed: Any) -> Any:
    """Run the operator on this rank's stretch of classes, ignoring targets outside of it."""
    if not call.axes("c"):
        return call.run(**changed)
    values = named_values(call)
    ignored = values["target"].eq(call.arg("ignore_index"))
    target, outside = local_positions(call, values["target"], "c", call.size("c"))
    values["target"] = target.masked_fill(outside.logical_or(ignored), _IGNORED_TARGET)
    return call.run(operands=list(values.values()), ignore_index=_IGNORED_TARGET, **changed)


@rule_maker("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(call: OpCall) -> Rule:
    """Gradient of the scores; its operand `total_weight` is already that of all samples."""
    items = _likelihood_dims(call)
    return bind_named(call, items, [items["self"]], linear=[{"grad_output"}], local=_run_on_local_classes, uneven=True)


_ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


@rule_maker(*(f"aten.{name}{half}.default" for name in _ELEMENTWISE for half in ("", "_backward")))
def elementwise_loss(call: OpCall) -> Rule | None:
    """A loss of two tensors of one shape, or its gradient; None where they are broadcast.

    The gradient is linear in the incoming gradient, which is a scalar or has one number per element.
    """
    shape, backward = shape_of(call, "self"), call.is_backward
    if any(meta.shape not in ((shape, ()) if backward else (shape,)) for meta in call.operands):
        return None
    items = dict.fromkeys(("self", "target", "weight"), "...")
    if backward:
        items["grad_output"] = "..." if shape_of(call, "grad_output") else ""
        return bind_named(call, items, ["..."], linear=[{"grad_output"}], local=_reduced_loss, uneven=True)
    whole = call.arg("reduction") == _NONE
    # Zeros have distance 0 and are probabilities. The soft margin's log(1 + exp(-x · y)) is zero for large numbers.
    fill = {"...": 100.0 if call.op is aten.soft_margin_loss.default else 0.0}
    return bind_named(call, items, ["..." if whole else ""], local=None if whole else _reduced_loss, fill=fill)


def _reduced_loss(call: LocalCall) -> Any:
    if call.arg("reduction") != _MEAN:
        return call.run()
    return call.run(reduction=_SUM) / math.prod(shape_of(call.call, "self"))


@rule_maker("aten.binary_cross_entropy_with_logits")
def loss_of_logits(call: OpCall) -> Rule:
    """Binary cross-entropy of logits; the weights of elements and of positive ones are broadcast."""
    items = dict.fromkeys(("self", "target", "weight", "pos_weight"), "...")
    whole = call.arg("reduction") == _NONE
    if whole:
        return bind_named(call, items, ["..."])
    return bind_named(call, items, [""], local=_reduced_loss_of_logits, fill={"...": 0.0})


_ZERO_PROBABILITY_LOGIT = -1e4
"""A logit whose probability is zero in every dtype: its loss for target 0 is exactly 0."""


def _reduced_loss_of_logits(call: LocalCall) -> Any:
    _replace_padding(call, "self", [factor.name for factor in call.rule.factors], _ZERO_PROBABILITY_LOGIT)
    return _reduced_loss(call)


# Margin losses compare the scores of a sample's classes: samples are independent, classes whole.


def _margin_loss_dims(call: OpCall) -> dict[str, str]:
    """Dims of the operands by argument name; a single sample has no sample dim."""
    samples = "n" if len(shape_of(call, "self")) == 2 else ""
    scores = f"{samples} c!"
    items = dict.fromkeys(("self", "is_target"), scores)
    items["target"] = scores if "multilabel" in call.name else samples
    items["weight"] = "c!"
    items["loss"] = items["grad_output"] = samples if call.arg("reduction") == _NONE else ""
    return items


@rule_maker(
    *("aten.multi_margin_loss.default", "aten.multi_margin_loss_backward.default"),
    *("aten.multilabel_margin_loss_forward.default", "aten.multilabel_margin_loss_backward.default"),
)
def margin_loss(call: OpCall) -> Rule:
    """The loss and, for multiple labels, a mask of these classes; or the gradient of the scores."""
    items, local = _margin_loss_dims(call), _local_margin_loss
    if call.is_backward:
        return bind_named(call, items, [items["self"]], linear=[{"grad_output"}], local=local, fill={"n": 0.0})
    return bind_named(
        call, items, [items["loss"], items["is_target"]][: len(call.results)], local=local, fill={"n": None}
    )


def _local_margin_loss(call: LocalCall) -> Any:
    """A mean over sharded samples: each rank's sum divided by the number of all samples."""
    reduction = call.arg("reduction")
    if reduction == _NONE or not call.axes("n"):
        return call.run()
    # No scores have zero loss for certain, so leave padding out of the sum.
    padded = not call.call.is_backward and bool(padded_factors(call.rule, call.choices, call.mesh))
    results = call.run(reduction=_NONE if padded else _SUM)
    first, *others = results if isinstance(results, tuple) else (results,)
    if padded:
        first = without_padded_steps(call, first, ["n"]).sum()
    if reduction == _MEAN:
        first = first / shape_of(call.call, "self")[0]
    return (first, *others) if others else first
