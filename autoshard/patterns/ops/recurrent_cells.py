"""One step of LSTM and GRU behind its products: the operators of capture, and the kernels of CUDA that they run.

Samples and hidden units are independent. Gates stand side by side in one dim, and so does what a cell keeps for its
backward: a strided shard of such a dim is all gates of some units, on which the cell runs as it is.
"""

from __future__ import annotations

from autoshard.patterns.ops._helpers import bind_named
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_UNITS, _GATES, _BIAS, _KEPT = "b h", "b (g! h)", "(g! h)", "b (w! h)"
_OPERAND_DIMS = {
    **dict.fromkeys(("input_gates", "hidden_gates"), _GATES),
    **dict.fromkeys(("input_bias", "hidden_bias"), _BIAS),
    **dict.fromkeys(("hx", "cx", "cy", "grad_hy", "grad_cy"), _UNITS),
    "workspace": _KEPT,
}
"""Dims by argument: b samples, h hidden units, g gates of each, w numbers that are kept of each."""

_RESULTS = {
    **dict.fromkeys(("autoshard::lstm_cell", "aten::_thnn_fused_lstm_cell"), (_UNITS, _UNITS, _KEPT)),
    **dict.fromkeys(("autoshard::gru_cell", "aten::_thnn_fused_gru_cell"), (_UNITS, _KEPT)),
    "autoshard::lstm_cell_backward": (_GATES, _UNITS),
    "aten::_thnn_fused_lstm_cell_backward": (_GATES, _GATES, _UNITS, _BIAS, _BIAS),
    "aten::_thnn_fused_lstm_cell_backward_impl": (_GATES, _UNITS, _BIAS),
    "autoshard::gru_cell_backward": (_GATES, _GATES, _UNITS),
    "aten::_thnn_fused_gru_cell_backward": (_GATES, _GATES, _UNITS, _BIAS, _BIAS),
}
"""Dims of the results by operator: new states and what is kept, or gradients of gates, state and biases."""


@rule_maker(*_RESULTS)
def cell(call: OpCall) -> Rule:
    """A forward or backward; a gradient is linear in the incoming ones together."""
    name = call.op._schema.name
    gates, kept = (4, 4) if "lstm" in name else (3, 5)
    backward = "backward" in name
    return bind_named(
        call,
        _OPERAND_DIMS,
        _RESULTS[name],
        linear=[{"grad_hy", "grad_cy"}] if backward else (),
        sizes={"g": gates, "w": kept},
        uneven=True,
        fill={"b": 0.0} if backward else None,  # gradients of biases are summed over samples
    )
