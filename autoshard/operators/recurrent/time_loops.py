"""Steps of LSTM and GRU as operators of the `autoshard` namespace, and the loops over time of LSTM, GRU and plain RNN.

A step is what follows its products; biases are part of the products. GPUs have a kernel for it: traced on the CPU it
would be some twenty operators that read and write their tensors wherever the graph runs. A loop runs one direction of
one layer, forward or backward.

Shapes: T steps, B samples, H hidden units, P outputs (H unless an LSTM projects). Gates are concatenated in the last
dim, in torch's order: input, forget, cell, output for LSTM (4·H); reset, update, new for GRU (3·H).

Hidden units may be sharded over ranks, which have the columns of their units in every tensor and the rows of the
weight: `units` then gathers the state before every step. P, the columns of the weight, is whole.

Source: the formulas in the documentation of `torch.nn.LSTM`, `torch.nn.GRU` and `torch.nn.RNN`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from autoshard.operator_library import define, define_backward

aten = torch.ops.aten

operators = torch.ops.autoshard
"""`lstm_cell`, `gru_cell` and their `_backward`: results are those of the functions below."""


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def lstm_step(input_gates: Tensor, hidden_gates: Tensor, cx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new state and cell `[B, H]`, and the workspace: gates after their activation `[B, 4·H]`."""
    if _has_kernel(cx):
        hy, cy, workspace = aten._thnn_fused_lstm_cell(input_gates, hidden_gates, cx)
        return hy, cy, workspace
    into, forget, new, out = (input_gates + hidden_gates).chunk(4, -1)
    into, forget, new, out = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    cy = forget * cx + into * new
    return out * cy.tanh(), cy, torch.cat([into, forget, new, out], -1)


def lstm_step_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum of all gates `[B, 4·H]`, and of the previous cell `[B, H]`."""
    if _has_kernel(cx):
        grad_gates, grad_cx, _ = aten._thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace, False)
        return grad_gates, grad_cx
    into, forget, new, out = workspace.chunk(4, -1)
    # The slope of a sigmoid s is s * (1 - s), that of a tanh t is 1 - t * t.
    squashed = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_cell = grad_hy * out * (1 - squashed * squashed)
    grad_cell = grad_cell if grad_cy is None else grad_cy + grad_cell
    grad_gates = [
        grad_cell * new * into * (1 - into),
        grad_cell * cx * forget * (1 - forget),
        grad_cell * into * (1 - new * new),
        grad_hy * squashed * out * (1 - out),
    ]
    return torch.cat(grad_gates, -1), (grad_cell * forget).contiguous()


def gru_step(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new state `[B, H]`, and the workspace `[B, 5·H]`.

    It contains reset, update and new gate after activation, the previous state, and the state's part of the new gate.
    """
    if _has_kernel(hx):
        hy, workspace = aten._thnn_fused_gru_cell(input_gates, hidden_gates, hx)
        return hy, workspace
    from_reset, from_update, candidate = hidden_gates.chunk(3, -1)
    reset, update, new = input_gates.chunk(3, -1)
    reset, update = (reset + from_reset).sigmoid(), (update + from_update).sigmoid()
    new = (new + reset * candidate).tanh()
    # In the form of ATen's kernels, with their rounding, and contiguous as their results.
    return ((hx - new) * update + new).contiguous(), torch.cat([reset, update, new, hx, candidate], -1)


def gru_step_backward(grad_hy: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input's and of the state's gates `[B, 3·H]`, and of the previous state `[B, H]`.

    The gradient of the state does not include that through its gates.
    """
    if _has_kernel(workspace):
        of_input, of_hidden, grad_hx, _, _ = aten._thnn_fused_gru_cell_backward(grad_hy, workspace, False)
        return of_input, of_hidden, grad_hx
    reset, update, new, hx, candidate = workspace.chunk(5, -1)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * candidate * reset * (1 - reset)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    of_input = torch.cat([grad_reset, grad_update, grad_new], -1)
    of_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], -1)
    return of_input, of_hidden, (grad_hy * update).contiguous()


def _gru_backward_like(grad_hy: Tensor, workspace: Tensor) -> tuple[Tensor, ...]:
    samples, units = grad_hy.shape
    gates = workspace.new_empty(samples, 3 * units)
    return gates, torch.empty_like(gates), grad_hy.new_empty(grad_hy.shape)


define(
    "lstm_cell(Tensor input_gates, Tensor hidden_gates, Tensor cx) -> (Tensor, Tensor, Tensor)",
    lstm_step,
    lambda input_gates, _, cx: (*(cx.new_empty(cx.shape) for _ in range(2)), input_gates.new_empty(input_gates.shape)),
)
define(
    "lstm_cell_backward(Tensor? grad_hy, Tensor? grad_cy, Tensor cx, Tensor cy, Tensor workspace) -> (Tensor, Tensor)",
    lstm_step_backward,
    lambda grad_hy, grad_cy, cx, cy, workspace: (workspace.new_empty(workspace.shape), cx.new_empty(cx.shape)),
)
define(
    "gru_cell(Tensor input_gates, Tensor hidden_gates, Tensor hx) -> (Tensor, Tensor)",
    gru_step,
    lambda input_gates, _, hx: (hx.new_empty(hx.shape), hx.new_empty(hx.shape[0], 5 * hx.shape[1])),
)
define(
    "gru_cell_backward(Tensor grad_hy, Tensor workspace) -> (Tensor, Tensor, Tensor)",
    gru_step_backward,
    _gru_backward_like,
)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    # The last result is the workspace, which only the backward reads. One of the others may have no gradient.
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[1:])


def _lstm_gradients(ctx: Any, grad_hy: Tensor | None, grad_cy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    input_gates, hidden_gates, cx, cy, workspace = ctx.saved_tensors
    if torch.is_grad_enabled():  # for second derivatives, torch has it as operators
        written_out = aten._thnn_differentiable_lstm_cell_backward
        grad_gates, _, _, _, grad_cx = written_out(grad_hy, grad_cy, input_gates, hidden_gates, None, None, cx, cy)
    else:
        grad_gates, grad_cx = operators.lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace)
    return grad_gates, grad_gates, grad_cx


def _gru_gradients(ctx: Any, grad_hy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad_hy is None:
        return None, None, None
    input_gates, hidden_gates, hx, workspace = ctx.saved_tensors
    if torch.is_grad_enabled():
        written_out = aten._thnn_differentiable_gru_cell_backward
        of_input, of_hidden, grad_hx, _, _ = written_out(grad_hy, input_gates, hidden_gates, hx, None, None)
    else:
        of_input, of_hidden, grad_hx = operators.gru_cell_backward(grad_hy, workspace)
    return of_input, of_hidden, grad_hx


define_backward("lstm_cell", _keep, _lstm_gradients)
define_backward("gru_cell", _keep, _gru_gradients)


def lstm_cell(
    x: Tensor,
    states: list[Tensor],
    into: Tensor,
    across: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return `aten.lstm_cell` of the operands, computed by `autoshard::lstm_cell`.

    Args:
        x, states, into, across, bias, hidden_bias: as of the ATen operator.
        dtype: of the results, as recorded by `torch.export`. Where autocast of CPUs gives only the gates another dtype,
            the ATen operator is used.
    """
    h, c = states
    input_gates, hidden_gates = linear(x, into, bias), linear(h, across, hidden_bias)
    # Autocast of CPUs casts the products, but not the step.
    if input_gates.dtype == hidden_gates.dtype == dtype:
        hy, cy, _ = operators.lstm_cell(input_gates, hidden_gates, c.to(dtype))
    else:
        hy, cy = aten.lstm_cell(x, states, into, across, bias, hidden_bias)
    return hy, cy


def gru_cell(
    x: Tensor,
    h: Tensor,
    into: Tensor,
    across: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return `aten.gru_cell` of the operands, computed by `autoshard::gru_cell`; arguments as of `lstm_cell`."""
    input_gates, hidden_gates = linear(x, into, bias), linear(h, across, hidden_bias)
    if input_gates.dtype == hidden_gates.dtype == dtype:
        hy: Tensor = operators.gru_cell(input_gates, hidden_gates, h.to(dtype))[0]
    else:
        hy = aten.gru_cell(x, h, into, across, bias, hidden_bias)
    return hy


class HiddenUnits(Protocol):
    """Exchange of the hidden units of a layer among the ranks that share them."""

    def all_gather(self, state: Tensor) -> Tensor:
        """Return the state of all units `[B, H]` from the state of this rank's units."""

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        """Return this rank's units of the sum over ranks of gradients of all units `[B, H]`."""


class _LocalUnits:
    """All units are on this rank."""

    def all_gather(self, state: Tensor) -> Tensor:
        return state

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        return gradient


LOCAL_UNITS: HiddenUnits = _LocalUnits()


def lstm(
    gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, projection: Tensor | None, units: HiddenUnits = LOCAL_UNITS
) -> tuple[Tensor, ...]:
    """Return outputs `[T, B, P]`, cell states `[T, B, H]` and gates after their activation `[T, B, 4·H]`."""
    outputs, cells, active = [], [], []
    for gate in gates:
        h, c, workspace = lstm_step(gate, linear(units.all_gather(h), weight), c)
        h = h if projection is None else linear(h, projection)
        outputs.append(h)
        cells.append(c)
        active.append(workspace)
    return torch.stack(outputs), torch.stack(cells), torch.stack(active)


def lstm_backward(
    grad_output: Tensor | None,
    grad_cells: Tensor | None,
    c: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    cells: Tensor,
    active: Tensor,
    units: HiddenUnits = LOCAL_UNITS,
) -> tuple[Tensor, ...]:
    """Return gradients of gates `[T, B, 4·H]`, h, c, and every step's output, including by later steps `[T, B, P]`."""
    grad_h = torch.zeros_like(c) if projection is None else c.new_zeros(c.shape[0], projection.shape[0])
    grad_c = torch.zeros_like(c)
    grad_gates, totals = [], []
    for step in reversed(range(cells.shape[0])):
        # The loss and the next step read the output of a step.
        total = grad_h if grad_output is None else grad_h + grad_output[step]
        grad_hidden = total if projection is None else total @ projection
        grad_c = grad_c if grad_cells is None else grad_c + grad_cells[step]
        before = cells[step - 1] if step else c
        grad_gate, grad_c = lstm_step_backward(grad_hidden, grad_c, before, cells[step], active[step])
        grad_h = units.reduce_scatter(grad_gate @ weight)
        grad_gates.append(grad_gate)
        totals.append(total)
    return torch.stack(grad_gates[::-1]), grad_h, grad_c, torch.stack(totals[::-1])


def gru(
    gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, units: HiddenUnits = LOCAL_UNITS
) -> tuple[Tensor, ...]:
    """Return outputs `[T, B, H]`, gates after activation `[T, B, 3·H]`, and h's part of the new gate `[T, B, H]`."""
    outputs, active, candidates = [], [], []
    for gate in gates:
        h, workspace = gru_step(gate, linear(units.all_gather(h), weight, bias), h)
        outputs.append(h)
        active.append(workspace[:, : gate.shape[1]])
        candidates.append(workspace[:, gate.shape[1] + h.shape[1] :])  # in between: the previous state, kept as output
    return torch.stack(outputs), torch.stack(active), torch.stack(candidates)


def gru_backward(
    grad_output: Tensor,
    h: Tensor,
    weight: Tensor,
    output: Tensor,
    active: Tensor,
    candidates: Tensor,
    units: HiddenUnits = LOCAL_UNITS,
) -> tuple[Tensor, ...]:
    """Return gradients of gates `[T, B, 3·H]`, of what h adds to the gates `[T, B, 3·H]`, and of h."""
    grad_h = torch.zeros_like(h)
    grad_gates, grad_added = [], []
    for step in reversed(range(output.shape[0])):
        before = output[step - 1] if step else h
        workspace = torch.cat([active[step], before, candidates[step]], -1)
        of_input, of_hidden, direct = gru_step_backward(grad_h + grad_output[step], workspace)
        grad_gates.append(of_input)
        grad_added.append(of_hidden)
        # The state enters the next one through its gates, and directly.
        grad_h = direct + units.reduce_scatter(of_hidden @ weight)
    return torch.stack(grad_gates[::-1]), torch.stack(grad_added[::-1]), grad_h


def rnn(gates: Tensor, h: Tensor, weight: Tensor, relu: bool, units: HiddenUnits = LOCAL_UNITS) -> Tensor:
    """Return outputs `[T, B, H]`."""
    outputs = []
    for gate in gates:
        h = gate + linear(units.all_gather(h), weight)
        h = h.relu() if relu else h.tanh()
        outputs.append(h)
    return torch.stack(outputs)


def rnn_backward(
    grad_output: Tensor, weight: Tensor, output: Tensor, relu: bool, units: HiddenUnits = LOCAL_UNITS
) -> tuple[Tensor, ...]:
    """Return gradients of gates `[T, B, H]` and of h."""
    grad_h = torch.zeros_like(output[0])
    grad_gates = []
    for step in reversed(range(output.shape[0])):
        # The slope in terms of the output: that of relu is 1 above zero, that of a tanh t is 1 - t * t.
        slope = (output[step] > 0).to(output.dtype) if relu else 1 - output[step] * output[step]
        grad_gates.append((grad_h + grad_output[step]) * slope)
        grad_h = units.reduce_scatter(grad_gates[-1] @ weight)
    return torch.stack(grad_gates[::-1]), grad_h
