"""LSTM, GRU and plain RNN layers as calls of operators of the `autoshard` namespace.

One operator runs one direction of one layer over all time steps, so a graph has a handful of nodes per layer for any
length of the sequence. Ordinary operators compute the rest for all steps at once, such as the product of the inputs
with their weight and the gradients of the weights. Shapes are those of `time_loops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as apply_dropout
from torch.nn.functional import linear

from autoshard.operator_library import define, define_backward
from autoshard.operators.recurrent import time_loops

steps = torch.ops.autoshard


def _lstm_like(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, projection: Tensor | None) -> tuple[Tensor, ...]:
    length = gates.shape[0]
    return gates.new_empty(length, *h.shape), gates.new_empty(length, *c.shape), gates.new_empty(gates.shape)


def _lstm_backward_like(
    grad_output: Tensor | None,
    grad_cells: Tensor | None,
    c: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    cells: Tensor,
    active: Tensor,
) -> tuple[Tensor, ...]:
    h = (c.shape[0], c.shape[1] if projection is None else projection.shape[0])
    return active.new_empty(active.shape), c.new_empty(h), c.new_empty(c.shape), c.new_empty(cells.shape[0], *h)


def _gru_like(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    output = gates.new_empty(gates.shape[0], *h.shape)
    return output, gates.new_empty(gates.shape), gates.new_empty(output.shape)


def _gru_backward_like(
    grad_output: Tensor, h: Tensor, weight: Tensor, output: Tensor, active: Tensor, candidates: Tensor
) -> tuple[Tensor, ...]:
    return active.new_empty(active.shape), active.new_empty(active.shape), h.new_empty(h.shape)


OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""Operator -> its loop, with the further argument `units`, and the function that returns its fake results."""

for _schema, _loop, _results_like in (
    (
        "lstm_steps(Tensor gates, Tensor h, Tensor c, Tensor weight, Tensor? projection) -> (Tensor, Tensor, Tensor)",
        time_loops.lstm,
        _lstm_like,
    ),
    (
        "lstm_steps_backward(Tensor? grad_output, Tensor? grad_cells, Tensor c, Tensor weight, Tensor? projection, "
        "Tensor cells, Tensor active) -> (Tensor, Tensor, Tensor, Tensor)",
        time_loops.lstm_backward,
        _lstm_backward_like,
    ),
    (
        "gru_steps(Tensor gates, Tensor h, Tensor weight, Tensor? bias) -> (Tensor, Tensor, Tensor)",
        time_loops.gru,
        _gru_like,
    ),
    (
        "gru_steps_backward(Tensor grad_output, Tensor h, Tensor weight, Tensor output, Tensor active, "
        "Tensor candidates) -> (Tensor, Tensor, Tensor)",
        time_loops.gru_backward,
        _gru_backward_like,
    ),
    (
        "rnn_steps(Tensor gates, Tensor h, Tensor weight, bool relu) -> Tensor",
        time_loops.rnn,
        lambda gates, *_: gates.new_empty(gates.shape),
    ),
    (
        "rnn_steps_backward(Tensor grad_output, Tensor weight, Tensor output, bool relu) -> (Tensor, Tensor)",
        time_loops.rnn_backward,
        lambda grad, weight, output, relu: (output.new_empty(output.shape), output.new_empty(output.shape[1:])),
    ),
):
    define(_schema, _loop, _results_like)
    OPERATORS[_schema.partition("(")[0]] = _loop, _results_like


def _previous(first: Tensor, states: Tensor) -> Tensor:
    """Return the state before every step: `first`, then all but the last of `states`."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _weight_gradient(left: Tensor, right: Tensor) -> Tensor:
    """Return the gradient of a weight that all steps share: the sum of outer products over steps and samples."""
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


def _keep_lstm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h, c, weight, projection = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, c, weight, projection, *output)


def _lstm_gradients(ctx: Any, grad_output: Tensor | None, grad_cells: Tensor | None, _: Any) -> tuple[Any, ...]:
    h, c, weight, projection, output, cells, active = ctx.saved_tensors
    grad_gates, grad_h, grad_c, totals = steps.lstm_steps_backward(
        grad_output, grad_cells, c, weight, projection, cells, active
    )
    # One product for all steps, instead of one in each step of the loop.
    grad_weight = _weight_gradient(grad_gates, _previous(h, output))
    grad_projection = None
    if projection is not None:
        grad_projection = _weight_gradient(totals, active.chunk(4, -1)[3] * cells.tanh())
    return grad_gates, grad_h, grad_c, grad_weight, grad_projection


def _keep_gru(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h, weight, bias = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.has_bias = bias is not None
    ctx.save_for_backward(h, weight, *output)


def _gru_gradients(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Any, ...]:
    h, weight, output, active, candidates = ctx.saved_tensors
    grad_gates, grad_added, grad_h = steps.gru_steps_backward(grad_output, h, weight, output, active, candidates)
    grad_weight = _weight_gradient(grad_added, _previous(h, output))
    return grad_gates, grad_h, grad_weight, grad_added.sum((0, 1)) if ctx.has_bias else None


def _keep_rnn(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h, weight, ctx.relu = inputs
    ctx.save_for_backward(h, weight, output)


def _rnn_gradients(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    h, weight, output = ctx.saved_tensors
    grad_gates, grad_h = steps.rnn_steps_backward(grad_output, weight, output, ctx.relu)
    return grad_gates, grad_h, _weight_gradient(grad_gates, _previous(h, output)), None


define_backward("lstm_steps", _keep_lstm, _lstm_gradients)
define_backward("gru_steps", _keep_gru, _gru_gradients)
define_backward("rnn_steps", _keep_rnn, _rnn_gradients)


# Layers as calls of these operators. Otherwise tracing would record kernels for one kind of device only (on the CPU,
# one that does not save what its backward needs), unroll every time step into the graph, or lose the dropout between
# layers.

_States = tuple[Tensor, ...]
# Runs one direction of one layer: `[T, B, I]`, states and weights in torch's order -> `[T, B, P]` and last states.
_Cell = Callable[[Tensor, _States, Sequence[Tensor | None]], tuple[Tensor, _States]]


def _lstm_cell(x: Tensor, states: _States, weights: Sequence[Tensor | None]) -> tuple[Tensor, _States]:
    into, across, bias, other_bias, projection = weights
    gates = linear(x, _require(into), _add_biases(bias, other_bias))
    # Under autocast `linear` has chosen the dtype, and the operator of the loop takes one dtype.
    h, c, weight = (_require(value).to(gates.dtype) for value in (*states, across))
    output, cells, _ = steps.lstm_steps(gates, h, c, weight, _cast_like(projection, gates))
    return output, (output[-1], cells[-1])


def _gru_cell(x: Tensor, states: _States, weights: Sequence[Tensor | None]) -> tuple[Tensor, _States]:
    into, across, bias, other_bias, _ = weights
    gates = linear(x, _require(into), bias)
    h, weight = (_require(value).to(gates.dtype) for value in (*states, across))
    output, _, _ = steps.gru_steps(gates, h, weight, _cast_like(other_bias, gates))
    return output, (output[-1],)


def _rnn_cell(x: Tensor, states: _States, weights: Sequence[Tensor | None], relu: bool) -> tuple[Tensor, _States]:
    into, across, bias, other_bias, _ = weights
    gates = linear(x, _require(into), _add_biases(bias, other_bias))
    h, weight = (_require(value).to(gates.dtype) for value in (*states, across))
    output = steps.rnn_steps(gates, h, weight, relu)
    return output, (output[-1],)


def _require(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _cast_like(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like.dtype)


def _add_biases(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    return None if left is None or right is None else left + right


def _layers(
    cell: _Cell,
    x: Tensor,
    states: _States,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return the output of all layers and directions, then the last states, `[layers · directions, B, P or H]` each.

    The arguments are those of the ATen operator, with states as a tuple. All results have the dtype `dtype`, recorded
    by `torch.export`; under autocast, the steps run in the dtype of their gates.
    """
    directions = 2 if bidirectional else 1
    weights = _split_params(params, has_biases, num_layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    last: list[_States] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            # torch lists the two directions of a layer consecutively; the second reads from the end.
            index = layer * directions + direction
            initial = tuple(state[index] for state in states)
            output, final = cell(x.flip(0) if direction else x, initial, weights[index])
            outputs.append(output.flip(0) if direction else output)
            last.append(final)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = apply_dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    results = (x, *(torch.stack(state) for state in zip(*last, strict=True)))
    return tuple(result.to(dtype) for result in results)


def _split_params(params: Sequence[Tensor], has_biases: bool, count: int) -> list[list[Tensor | None]]:
    """Return, for every layer and direction, weights and biases of input and state, and the projection or None."""
    # Per layer: two weights, two biases or none, and a projection or none.
    size = len(params) // count
    groups = []
    for start in range(0, len(params), size):
        group: list[Tensor | None] = list(params[start : start + size])
        if not has_biases:
            group[2:2] = [None, None]
        groups.append(group + [None] * (5 - len(group)))
    return groups


def lstm(
    x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], *options: Any, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return `aten.lstm.input` of the operands."""
    return _layers(_lstm_cell, x, tuple(states), params, *options, dtype=dtype)


def gru(x: Tensor, state: Tensor, params: Sequence[Tensor], *options: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return `aten.gru.input` of the operands."""
    return _layers(_gru_cell, x, (state,), params, *options, dtype=dtype)


def rnn_tanh(
    x: Tensor, state: Tensor, params: Sequence[Tensor], *options: Any, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return `aten.rnn_tanh.input` of the operands."""
    return _layers(partial(_rnn_cell, relu=False), x, (state,), params, *options, dtype=dtype)


def rnn_relu(
    x: Tensor, state: Tensor, params: Sequence[Tensor], *options: Any, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return `aten.rnn_relu.input` of the operands."""
    return _layers(partial(_rnn_cell, relu=True), x, (state,), params, *options, dtype=dtype)
