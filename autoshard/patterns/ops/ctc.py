"""The connectionist temporal classification loss: samples are independent where each has a row of targets."""

from __future__ import annotations

from autoshard.patterns.ops._helpers import bind_named, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("autoshard::ctc_loss", "autoshard::ctc_loss_backward")
def ctc_loss(call: OpCall) -> Rule:
    """Loss of every sample, and the gradient of the log-probabilities, which is linear in the incoming one.

    Targets that stand in one row, one sample after another, are cut by lengths that are not known: all stays whole.
    """
    rows = len(shape_of(call, "targets")) == 2
    items = {"log_probs": "t! n c!", "targets": "n s!" if rows else "s!", "grad": "n"}
    items |= dict.fromkeys(("input_lengths", "target_lengths"), "n")
    backward = call.op._schema.name.endswith("backward")
    result = items["log_probs"] if backward else "n"
    linear = [{"grad"}] if backward else []
    # A sample that is padding has no steps and no targets.
    return bind_named(call, items, [result], linear=linear, whole=() if rows else ("n",), fill={"n": 0.0})
