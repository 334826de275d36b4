"""The recurrent part of LSTM, GRU and plain RNN layers as operators of the `autoshard` namespace.

One operator runs one direction of one layer over all time steps: a graph has a handful of nodes per layer however long
the sequence is. What can be computed for all steps at once, such as the product of the inputs with their weight and the
gradients of the weights, is left to ordinary operators outside. Shapes are those of `time_loops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.capture import time_loops

_library = torch.library.Library("autoshard", "FRAGMENT")
_library.define(
    "lstm_steps(Tensor gates, Tensor h, Tensor c, Tensor weight, Tensor? projection) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "lstm_steps_backward(Tensor? grad_output, Tensor? grad_cells, Tensor c, Tensor weight, Tensor? projection, "
    "Tensor cells, Tensor active) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define("gru_steps(Tensor gates, Tensor h, Tensor weight, Tensor? bias) -> (Tensor, Tensor, Tensor)")
_library.define(
    "gru_steps_backward(Tensor grad_output, Tensor h, Tensor weight, Tensor output, Tensor active, Tensor candidates) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define("rnn_steps(Tensor gates, Tensor h, Tensor weight, bool relu) -> Tensor")
_library.define("rnn_steps_backward(Tensor grad_output, Tensor weight, Tensor output, bool relu) -> (Tensor, Tensor)")

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


def _rnn_like(gates: Tensor, h: Tensor, weight: Tensor, relu: bool) -> Tensor:
    return gates.new_empty(gates.shape)


def _rnn_backward_like(grad_output: Tensor, weight: Tensor, output: Tensor, relu: bool) -> tuple[Tensor, ...]:
    return output.new_empty(output.shape), output.new_empty(output.shape[1:])


OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lstm_steps": (time_loops.lstm, _lstm_like),
    "lstm_steps_backward": (time_loops.lstm_backward, _lstm_backward_like),
    "gru_steps": (time_loops.gru, _gru_like),
    "gru_steps_backward": (time_loops.gru_backward, _gru_backward_like),
    "rnn_steps": (time_loops.rnn, _rnn_like),
    "rnn_steps_backward": (time_loops.rnn_backward, _rnn_backward_like),
}
"""By operator: the loop that it is, which takes `units` besides, and what makes its results without numbers."""

for _name, (_loop, _shapes) in OPERATORS.items():
    _library.impl(_name, _loop, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{_name}", _shapes, lib=_library)


def _previous(first: Tensor, states: Tensor) -> Tensor:
    """The state before every step: `first`, then all but the last of `states`."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _weight_gradient(left: Tensor, right: Tensor) -> Tensor:
    """Sum over steps and samples of outer products: the gradient of a weight that all steps share."""
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


for _name, _gradients, _keep in (
    ("lstm_steps", _lstm_gradients, _keep_lstm),
    ("gru_steps", _gru_gradients, _keep_gru),
    ("rnn_steps", _rnn_gradients, _keep_rnn),
):
    torch.library.register_autograd(f"autoshard::{_name}", _gradients, setup_context=_keep, lib=_library)
