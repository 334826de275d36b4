"""The recurrent part of LSTM, GRU and plain RNN layers as operators of the `autoshard` namespace.

One operator runs one direction of one layer over all time steps: a graph has a handful of nodes per layer however long
the sequence is. What can be computed for all steps at once, such as the product of the inputs with their weight and the
gradients of the weights, is left to ordinary operators outside.

Shapes: T steps, B samples, H hidden units, P outputs (H unless an LSTM projects). Gates stand side by side in the last
dim, in torch's order: input, forget, cell, output for LSTM (4·H); reset, update, new for GRU (3·H).

Source: the formulas in the documentation of `torch.nn.LSTM`, `torch.nn.GRU` and `torch.nn.RNN`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

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


def _lstm(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, projection: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs `[T, B, P]`, cell states `[T, B, H]` and gates after their activation `[T, B, 4·H]`."""
    outputs, cells, active = [], [], []
    for gate in gates:
        into, forget, new, out = (gate + linear(h, weight)).chunk(4, -1)
        into, forget, new, out = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
        c = forget * c + into * new
        h = out * c.tanh()
        h = h if projection is None else linear(h, projection)
        outputs.append(h)
        cells.append(c)
        active.append(torch.cat([into, forget, new, out], -1))
    return torch.stack(outputs), torch.stack(cells), torch.stack(active)


def _lstm_backward(
    grad_output: Tensor | None,
    grad_cells: Tensor | None,
    c: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    cells: Tensor,
    active: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of gates `[T, B, 4·H]`, of h and c, and of every step's output, later steps included `[T, B, P]`."""
    width = weight.shape[1]
    grad_h, grad_c = c.new_zeros(c.shape[0], width), torch.zeros_like(c)
    grad_gates, totals = [], []
    for step in reversed(range(cells.shape[0])):
        into, forget, new, out = active[step].chunk(4, -1)
        squashed = cells[step].tanh()
        total = grad_h if grad_output is None else grad_h + grad_output[step]
        grad_hidden = total if projection is None else total @ projection
        grad_cell = grad_c + grad_hidden * out * (1 - squashed * squashed)
        grad_cell = grad_cell if grad_cells is None else grad_cell + grad_cells[step]
        before = cells[step - 1] if step else c
        grad_gate = torch.cat(
            [
                grad_cell * new * into * (1 - into),
                grad_cell * before * forget * (1 - forget),
                grad_cell * into * (1 - new * new),
                grad_hidden * squashed * out * (1 - out),
            ],
            -1,
        )
        grad_h, grad_c = grad_gate @ weight, grad_cell * forget
        grad_gates.append(grad_gate)
        totals.append(total)
    return torch.stack(grad_gates[::-1]), grad_h, grad_c, torch.stack(totals[::-1])


def _gru(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs `[T, B, H]`, gates after their activation `[T, B, 3·H]`, and h's part of the new gate `[T, B, H]`."""
    outputs, active, candidates = [], [], []
    for gate in gates:
        from_reset, from_update, candidate = linear(h, weight, bias).chunk(3, -1)
        reset, update, new = gate.chunk(3, -1)
        reset, update = (reset + from_reset).sigmoid(), (update + from_update).sigmoid()
        new = (new + reset * candidate).tanh()
        h = (h - new) * update + new
        outputs.append(h)
        active.append(torch.cat([reset, update, new], -1))
        candidates.append(candidate)
    return torch.stack(outputs), torch.stack(active), torch.stack(candidates)


def _gru_backward(
    grad_output: Tensor, h: Tensor, weight: Tensor, output: Tensor, active: Tensor, candidates: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of gates `[T, B, 3·H]`, of what h adds to the gates `[T, B, 3·H]`, and of h."""
    grad_h = torch.zeros_like(h)
    grad_gates, grad_added = [], []
    for step in reversed(range(output.shape[0])):
        reset, update, new = active[step].chunk(3, -1)
        total = grad_h + grad_output[step]
        before = output[step - 1] if step else h
        grad_new = total * (1 - update) * (1 - new * new)
        grad_reset = grad_new * candidates[step] * reset * (1 - reset)
        grad_update = total * (before - new) * update * (1 - update)
        grad_gates.append(torch.cat([grad_reset, grad_update, grad_new], -1))
        grad_added.append(torch.cat([grad_reset, grad_update, grad_new * reset], -1))
        grad_h = total * update + grad_added[-1] @ weight
    return torch.stack(grad_gates[::-1]), torch.stack(grad_added[::-1]), grad_h


def _rnn(gates: Tensor, h: Tensor, weight: Tensor, relu: bool) -> Tensor:
    """Outputs `[T, B, H]`."""
    outputs = []
    for gate in gates:
        h = gate + linear(h, weight)
        h = h.relu() if relu else h.tanh()
        outputs.append(h)
    return torch.stack(outputs)


def _rnn_backward(grad_output: Tensor, weight: Tensor, output: Tensor, relu: bool) -> tuple[Tensor, ...]:
    """Gradients of gates `[T, B, H]` and of h."""
    grad_h = torch.zeros_like(output[0])
    grad_gates = []
    for step in reversed(range(output.shape[0])):
        slope = (output[step] > 0).to(output.dtype) if relu else 1 - output[step] * output[step]
        grad_gates.append((grad_h + grad_output[step]) * slope)
        grad_h = grad_gates[-1] @ weight
    return torch.stack(grad_gates[::-1]), grad_h


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
    h = (c.shape[0], weight.shape[1])
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


for _name, _program, _shapes in (
    ("lstm_steps", _lstm, _lstm_like),
    ("lstm_steps_backward", _lstm_backward, _lstm_backward_like),
    ("gru_steps", _gru, _gru_like),
    ("gru_steps_backward", _gru_backward, _gru_backward_like),
    ("rnn_steps", _rnn, _rnn_like),
    ("rnn_steps_backward", _rnn_backward, _rnn_backward_like),
):
    _library.impl(_name, _program, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{_name}", _shapes, lib=_library)


def _previous(first: Tensor, states: Tensor) -> Tensor:
    """The state before every step: `first`, then all but the last of `states`."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _contracted(left: Tensor, right: Tensor) -> Tensor:
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
    grad_weight = _contracted(grad_gates, _previous(h, output))
    grad_projection = None
    if projection is not None:
        grad_projection = _contracted(totals, active.chunk(4, -1)[3] * cells.tanh())
    return grad_gates, grad_h, grad_c, grad_weight, grad_projection


def _keep_gru(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h, weight, bias = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.has_bias = bias is not None
    ctx.save_for_backward(h, weight, *output)


def _gru_gradients(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Any, ...]:
    h, weight, output, active, candidates = ctx.saved_tensors
    grad_gates, grad_added, grad_h = steps.gru_steps_backward(grad_output, h, weight, output, active, candidates)
    grad_weight = _contracted(grad_added, _previous(h, output))
    return grad_gates, grad_h, grad_weight, grad_added.sum((0, 1)) if ctx.has_bias else None


def _keep_rnn(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h, weight, ctx.relu = inputs
    ctx.save_for_backward(h, weight, output)


def _rnn_gradients(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    h, weight, output = ctx.saved_tensors
    grad_gates, grad_h = steps.rnn_steps_backward(grad_output, weight, output, ctx.relu)
    return grad_gates, grad_h, _contracted(grad_gates, _previous(h, output)), None


for _name, _gradients, _keep in (
    ("lstm_steps", _lstm_gradients, _keep_lstm),
    ("gru_steps", _gru_gradients, _keep_gru),
    ("rnn_steps", _rnn_gradients, _keep_rnn),
):
    torch.library.register_autograd(f"autoshard::{_name}", _gradients, setup_context=_keep, lib=_library)
