"""Recurrent layers as calls of the operators of `recurrence`.

Left alone, tracing would take kernels that run on one kind of device only (on the CPU, one that does not keep what its
backward needs), unroll every time step into the graph, or lose the dropout between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped
from torch.nn.functional import linear

from autoshard.capture.recurrence import steps

_States = tuple[Tensor, ...]
_Cell = Callable[[Tensor, _States, Sequence[Tensor | None]], tuple[Tensor, _States]]
"""Runs one direction of one layer: `[T, B, I]`, states and weights in torch's order -> `[T, B, P]` and last states."""


def _lstm_cell(x: Tensor, states: _States, weights: Sequence[Tensor | None]) -> tuple[Tensor, _States]:
    into, across, bias, other_bias, projection = weights
    gates = linear(x, _require(into), _add_biases(bias, other_bias))
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
    """The bias of the input and that of the state: they are always added up."""
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
    """All layers and directions of one call: the output, then the last states, each `[layers · directions, B, P or H]`.

    The arguments are those of the ATen operator, its states as a tuple. All results have the element type `dtype`,
    which `torch.export` noted; under autocast, the steps themselves run in that of their gates.
    """
    directions = 2 if bidirectional else 1
    weights = _split_params(params, has_biases, num_layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    last: list[_States] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = tuple(state[index] for state in states)
            output, final = cell(x.flip(0) if direction else x, own, weights[index])
            outputs.append(output.flip(0) if direction else output)
            last.append(final)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = dropped(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    results = (x, *(torch.stack(state) for state in zip(*last, strict=True)))
    return tuple(result.to(dtype) for result in results)


def _split_params(params: Sequence[Tensor], has_biases: bool, count: int) -> list[list[Tensor | None]]:
    """For every layer and direction: weights of input and state, their biases, and the projection; None if absent."""
    size = len(params) // count
    groups = []
    for start in range(0, len(params), size):
        own: list[Tensor | None] = list(params[start : start + size])
        if not has_biases:
            own[2:2] = [None, None]
        groups.append(own + [None] * (5 - len(own)))
    return groups


def lstm(
    x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], *options: Any, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """`aten.lstm.input`."""
    return _layers(_lstm_cell, x, tuple(states), params, *options, dtype=dtype)


def gru(x: Tensor, state: Tensor, params: Sequence[Tensor], *options: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """`aten.gru.input`."""
    return _layers(_gru_cell, x, (state,), params, *options, dtype=dtype)


def rnn_tanh(
    x: Tensor, state: Tensor, params: Sequence[Tensor], *options: Any, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """`aten.rnn_tanh.input`."""
    return _layers(partial(_rnn_cell, relu=False), x, (state,), params, *options, dtype=dtype)


def rnn_relu(
    x: Tensor, state: Tensor, params: Sequence[Tensor], *options: Any, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """`aten.rnn_relu.input`."""
    return _layers(partial(_rnn_cell, relu=True), x, (state,), params, *options, dtype=dtype)
