"""The recurrent part of LSTM, GRU and plain RNN layers: samples are independent, hidden units exchange the state.

Every step needs all of the previous state, so the time dim is whole. Hidden units may be sharded over ranks that gather
the state at every step; gates are concatenated in one dim, and a strided shard of it is all gates of some units. An
LSTM that projects its state only shards samples. The products of a layer for all steps at once, and the gradients of
its weights, are ordinary operators with separate rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from autoshard.cluster.cost import Count, Shape, price_by_flops
from autoshard.operators.recurrent.recurrence import OPERATORS, steps
from autoshard.patterns._torch import OpOverload
from autoshard.patterns.exchanging import CollectiveRunner, define
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.helpers import bind_named, operand_names, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Exchange, OpCall, Rule
from autoshard.patterns.strategy import local_size
from autoshard.specs.emitter import collectives

_PROJECTION_DIMS = {
    "gates": "t! b g!",
    "active": "t! b g!",
    "cells": "t! b h!",
    "grad_cells": "t! b h!",
    "output": "t! b p!",
    "grad_output": "t! b p!",
    "h": "b p!",
    "c": "b h!",
    "weight": "g! p!",
    "projection": "p! h!",
}
"""Dims by the names of the operators' arguments; p are the units of the output, h those of the cell."""

_OPERAND_DIMS = {
    **dict.fromkeys(("gates", "active"), "t! b (g! h^)"),
    **dict.fromkeys(("cells", "grad_cells", "candidates", "output", "grad_output"), "t! b h^"),
    **dict.fromkeys(("h", "c"), "b h^"),
    "weight": "(g! h^) p!",
    "bias": "(g! h^)",
}
"""Dims without a projection; h are the hidden units, g the gates of each, and p the units that a step reads."""

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
    """Forward and backward; a gradient is jointly linear in the incoming ones."""
    name = call.name.partition("::")[2]
    backward = name.endswith("backward")
    linear = [{"grad_output", "grad_cells"}] if backward else []
    if "projection" in operand_names(call):
        results = [_PROJECTION_DIMS[result] for result in _RESULTS[name]]
        return _mark_sequential(bind_named(call, _PROJECTION_DIMS, results, linear=linear))
    rule = bind_named(
        call,
        _OPERAND_DIMS,
        [_OPERAND_DIMS[result] for result in _RESULTS[name]],
        linear=linear,
        exchange={"h": _exchanges(call)},
        local=_run_shared_units,
        uneven=True,
        fill={"h": 0.0} if backward else None,  # the gates of padding are summed over
    )
    return _mark_sequential(rule)


def _mark_sequential(rule: Rule) -> Rule:
    """Every time step rereads the weight, which takes the time of a step with few samples."""
    return replace(rule, factors=tuple(replace(factor, sequential=factor.name == "t") for factor in rule.factors))


# Hidden units sharded over the ranks of an axis.
#
# Every rank has the gates of its own units, so a strided shard of every tensor whose dim is concatenated gates. Before
# each time step ranks gather the state, and in backward each step sums the gradients of the previous state over ranks.
# These collectives are inside the time loop, which is one operator, so that a graph does not grow with the sequence.
# `autoshard::lstm_steps_shared` and the like are the operators of `recurrence` with groups of ranks as further
# arguments.


@dataclass(frozen=True, slots=True)
class SharedUnits:
    """Hidden units in blocks over the ranks of some groups; the last block may be padded.

    Attributes:
        groups: names of process groups, that of the innermost axis first.
        ranks: size of each group.
        units: number of hidden units of the ranks of each group together.
        collective: runs a collective and waits for it.
    """

    groups: Sequence[str]
    ranks: Sequence[int]
    units: Sequence[int]
    collective: CollectiveRunner

    def all_gather(self, state: Tensor) -> Tensor:
        """See `time_loops.HiddenUnits`."""
        rows = state.t()  # collectives stack and scatter the first dim
        for group, ranks, units in zip(self.groups, self.ranks, self.units, strict=True):
            op = collectives.all_gather_into_tensor.default
            rows = self.collective(op, rows.contiguous(), ranks, group)[:units]
        return rows.t()

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        """See `time_loops.HiddenUnits`."""
        rows = gradient.t()
        for group, ranks, units in reversed(list(zip(self.groups, self.ranks, self.units, strict=True))):
            rows = pad(rows, (0, 0, 0, -units % ranks)).contiguous()
            rows = self.collective(collectives.reduce_scatter_tensor.default, rows, "sum", ranks, group)
        return rows.t()


def _exchanges(call: OpCall) -> list[Exchange]:
    """The state of all samples, or its gradient, exchanged at every time step if hidden units are sharded."""
    times, samples, _ = call.result.shape
    state = samples * shape_of(call, "weight")[1] * call.result.dtype.itemsize
    return [("reduce_scatter" if call.is_backward else "all_gather", state, times)]


def _run_shared_units(call: LocalCall) -> Any:
    """The local program: the operator itself where no axis shards its hidden units `h`."""
    axes = call.axes("h")[::-1]
    if not axes:
        return call.run()
    (factor,) = call.rule.indices("h")
    return call.run(
        _SHARED_OPS[call.call.op],
        groups=[call.emit.group(axis) for axis in axes],
        ranks=[call.mesh.sizes[axis] for axis in axes],
        units=[local_size(call.rule, call.choices, call.mesh, factor, axis) for axis in axes],
    )


def _define_shared_op(name: str, loop: Callable[..., Any], shapes: Callable[..., Any]) -> OpOverload:
    """The operator `name` with groups of ranks as further arguments."""

    def program(*args: Any, collective: CollectiveRunner, **shared: Any) -> Any:
        return loop(*args, units=SharedUnits(**shared, collective=collective))

    text = str(getattr(steps, name).default._schema).replace(name, f"{name}_shared").partition("::")[2]
    schema = text.replace(") ->", ", *, str[] groups, int[] ranks, int[] units) ->", 1)
    return define(schema, program, lambda *args, **shared: shapes(*args))


_SHARED_OPS = {getattr(steps, name).default: _define_shared_op(name, *pair) for name, pair in OPERATORS.items()}


# One step of LSTM and GRU after its products: the operators of capture, and the kernels of CUDA that they run.
#
# Samples and hidden units are independent. Gates are concatenated in one dim, and so is what a cell saves for its
# backward: a strided shard of such a dim is all gates of some units, on which the cell runs unchanged.

_UNITS, _GATES, _BIAS, _KEPT = "b h", "b (g! h)", "(g! h)", "b (w! h)"
_CELL_DIMS = {
    **dict.fromkeys(("input_gates", "hidden_gates"), _GATES),
    **dict.fromkeys(("input_bias", "hidden_bias"), _BIAS),
    **dict.fromkeys(("hx", "cx", "cy", "grad_hy", "grad_cy"), _UNITS),
    "workspace": _KEPT,
}
"""Dims by argument: b samples, h hidden units, g gates of each, w saved numbers of each."""

_CELL_RESULTS = {
    **dict.fromkeys(("autoshard::lstm_cell", "aten::_thnn_fused_lstm_cell"), (_UNITS, _UNITS, _KEPT)),
    **dict.fromkeys(("autoshard::gru_cell", "aten::_thnn_fused_gru_cell"), (_UNITS, _KEPT)),
    "autoshard::lstm_cell_backward": (_GATES, _UNITS),
    "aten::_thnn_fused_lstm_cell_backward": (_GATES, _GATES, _UNITS, _BIAS, _BIAS),
    "aten::_thnn_fused_lstm_cell_backward_impl": (_GATES, _UNITS, _BIAS),
    "autoshard::gru_cell_backward": (_GATES, _GATES, _UNITS),
    "aten::_thnn_fused_gru_cell_backward": (_GATES, _GATES, _UNITS, _BIAS, _BIAS),
}
"""Dims of the results by operator: new states and saved numbers, or gradients of gates, state and biases."""


@rule_maker(*_CELL_RESULTS)
def cell(call: OpCall) -> Rule:
    """Forward or backward; a gradient is jointly linear in the incoming ones."""
    name = call.name
    gates, kept = (4, 4) if "lstm" in name else (3, 5)
    backward = "backward" in name
    return bind_named(
        call,
        _CELL_DIMS,
        _CELL_RESULTS[name],
        linear=[{"grad_hy", "grad_cy"}] if backward else (),
        sizes={"g": gates, "w": kept},
        uneven=True,
        fill={"b": 0.0} if backward else None,  # gradients of biases are summed over samples
    )


# Prices.


@price_by_flops("lstm_steps", "gru_steps", "rnn_steps")
def _steps(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Count the state times its weight, once per time step of the gates."""
    gates, state = operands[:2]
    return 2 * math.prod(gates) * state[-1]


def _steps_backward(state: int) -> Count:
    """Count the gates' gradient times the weight; the gradient of the state is the result at `state`."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        return 2 * math.prod(results[0]) * results[state][-1]

    return count


price_by_flops("lstm_steps_backward", "rnn_steps_backward")(_steps_backward(1))
price_by_flops("gru_steps_backward")(_steps_backward(2))
