"""Losses that compare the scores of a sample's classes with each other: samples are independent, classes whole."""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import bind_named, shape_of
from autoshard.patterns.padding import padded_factors, without_padded_steps
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_NONE, _MEAN, _SUM = 0, 1, 2  # what ATen's `reduction` arguments mean


def _operand_dims(call: OpCall) -> dict[str, str]:
    """Dims of the operands by argument name; a single sample has no dim of its own."""
    samples = "n" if len(shape_of(call, "self")) == 2 else ""
    scores = f"{samples} c!"
    items = dict.fromkeys(("self", "is_target"), scores)
    items["target"] = scores if "multilabel" in call.op.name() else samples
    items["weight"] = "c!"
    items["loss"] = items["grad_output"] = samples if call.arg("reduction") == _NONE else ""
    return items


@rule_maker("aten.multi_margin_loss.default", "aten.multilabel_margin_loss_forward.default")
def margin_loss(call: OpCall) -> Rule:
    """The loss and, for several labels, which classes are among them."""
    items = _operand_dims(call)
    results = [items["loss"], items["is_target"]][: len(call.results)]
    return bind_named(call, items, results, local=_local_margin_loss, fill={"n": None})


@rule_maker("aten.multi_margin_loss_backward.default", "aten.multilabel_margin_loss_backward.default")
def margin_loss_backward(call: OpCall) -> Rule:
    """The gradient of the scores, linear in the incoming one."""
    items = _operand_dims(call)
    return bind_named(call, items, [items["self"]], linear=[{"grad_output"}], local=_local_margin_loss, fill={"n": 0.0})


def _local_margin_loss(call: LocalCall) -> Any:
    """A mean over samples is the sum over a rank's samples divided by the number of all."""
    reduction = call.arg("reduction")
    if reduction == _NONE or not call.axes("n"):
        return call.run()
    emit = call.emit
    if "backward" in call.call.op.name() or not padded_factors(call.rule, call.choices, call.mesh):
        results = call.run(reduction=_SUM)
        first, *others = results if isinstance(results, tuple) else (results,)
    else:  # no scores of a sample are known to cost nothing: padding is left out of the sum
        results = call.run(reduction=_NONE)
        first, *others = results if isinstance(results, tuple) else (results,)
        first = emit.sum(without_padded_steps(call, first, ["n"]))
    if reduction == _MEAN:
        first = first / shape_of(call.call, "self")[0]
    return (first, *others) if others else first
