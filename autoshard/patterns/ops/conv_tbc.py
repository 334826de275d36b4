"""Convolution along time of tensors laid out as (time, batch, channels)."""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.matmul import keep_on_first_rank
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


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
