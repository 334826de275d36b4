"""The fused cells of LSTM and GRU that CUDA has: one step of a recurrent layer behind its products.

Samples and hidden units are independent. Gates stand side by side in one dim, and so does what a cell keeps for its
backward: a strided shard of such a dim is all gates of some units, on which the cell runs as it is.
"""

from __future__ import annotations

from autoshard.patterns.ops._helpers import bind_named
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_UNITS, _GATES, _BIAS, _KEPT = "b h", "b (g! h)", "(g! h)", "b (w! h)"
_ITEMS = {
    **dict.fromkeys(("input_gates", "hidden_gates"), _GATES),
    **dict.fromkeys(("input_bias", "hidden_bias"), _BIAS),
    **dict.fromkeys(("hx", "cx", "cy", "grad_hy", "grad_cy"), _UNITS),
    "workspace": _KEPT,
}
"""Dims by argument: b samples, h hidden units, g gates of each, w numbers that are kept of each."""


@rule_maker("aten._thnn_fused_lstm_cell", "aten._thnn_fused_gru_cell")
def cell(call: OpCall) -> Rule:
    """The new state, of an LSTM the new cell too, and what is kept."""
    states = [_UNITS] * (len(call.results) - 1)
    return bind_named(call, _ITEMS, [*states, _KEPT], sizes=_sizes(call), uneven=True)


@rule_maker(
    "aten._thnn_fused_lstm_cell_backward",
    "aten._thnn_fused_lstm_cell_backward_impl",
    "aten._thnn_fused_gru_cell_backward",
)
def cell_backward(call: OpCall) -> Rule:
    """Gradients of gates, state and biases; linear in the incoming ones together."""
    results = [_GATES, _UNITS, _BIAS] if len(call.results) == 3 else [_GATES, _GATES, _UNITS, _BIAS, _BIAS]
    return bind_named(
        call, _ITEMS, results, linear=[{"grad_hy", "grad_cy"}], sizes=_sizes(call), uneven=True, fill={"b": 0.0}
    )


def _sizes(call: OpCall) -> dict[str, int]:
    """How many gates there are of a hidden unit, and how many numbers are kept of it."""
    if "lstm" in call.op.name():
        return {"g": 4, "w": 4}
    return {"g": 3, "w": 5}
