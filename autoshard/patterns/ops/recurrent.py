"""The recurrent part of LSTM, GRU and plain RNN layers: samples are independent.

Every step needs all of the state before it, so steps and units stay together; the products that a layer makes for all
steps at once, and the gradients of its weights, are ordinary operators with rules of their own.
"""

from __future__ import annotations

from autoshard.capture import recurrence as recurrence  # it defines the operators
from autoshard.patterns.ops._helpers import bind_named
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_ITEMS = {
    "gates": "t! b g!",
    "active": "t! b g!",
    "cells": "t! b h!",
    "grad_cells": "t! b h!",
    "candidates": "t! b h!",
    "output": "t! b p!",
    "grad_output": "t! b p!",
    "h": "b p!",
    "c": "b h!",
    "weight": "g! p!",
    "projection": "p! h!",
    "bias": "g!",
}
"""Dims by the names of the operators' arguments; p are the units of the output, h those of the cell."""

_RESULTS = {
    "lstm_steps": ("output", "cells", "active"),
    "lstm_steps_backward": ("gates", "h", "c", "output"),
    "gru_steps": ("output", "active", "candidates"),
    "gru_steps_backward": ("gates", "gates", "h"),
    "rnn_steps": ("output",),
    "rnn_steps_backward": ("gates", "h"),
}


@rule_maker(*(f"autoshard::{name}" for name in _RESULTS))
def recurrent(call: OpCall) -> Rule:
    """Forward and backward; a gradient is linear in the incoming ones together."""
    name = call.op._schema.name.partition("::")[2]
    linear = [{"grad_output", "grad_cells"}] if name.endswith("backward") else []
    return bind_named(call, _ITEMS, [_ITEMS[result] for result in _RESULTS[name]], linear=linear)
