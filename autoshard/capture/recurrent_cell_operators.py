"""One step of LSTM and GRU behind its products, as operators of the `autoshard` namespace: GPUs have a kernel for it.

Traced on the CPU it would be some twenty operators, each of which reads and writes its tensors wherever the graph runs.
Gates stand side by side in the last dim, in torch's order: input, forget, cell, output for LSTM (4·H); reset, update,
new for GRU (3·H). Biases are part of the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from autoshard.capture.operators import define, define_backward

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

    It holds reset, update and new gate after their activation, the previous state, and its part of the new gate.
    """
    if _has_kernel(hx):
        hy, workspace = aten._thnn_fused_gru_cell(input_gates, hidden_gates, hx)
        return hy, workspace
    from_reset, from_update, candidate = hidden_gates.chunk(3, -1)
    reset, update, new = input_gates.chunk(3, -1)
    reset, update = (reset + from_reset).sigmoid(), (update + from_update).sigmoid()
    new = (new + reset * candidate).tanh()
    return ((hx - new) * update + new).contiguous(), torch.cat([reset, update, new, hx, candidate], -1)


def gru_step_backward(grad_hy: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input's and of the state's gates `[B, 3·H]`, and of the previous state `[B, H]`.

    The gradient of the state leaves out what comes through its gates.
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
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[1:])


def _lstm_gradients(ctx: Any, grad_hy: Tensor | None, grad_cy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    input_gates, hidden_gates, cx, cy, workspace = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of these gradients are asked for: torch writes them out as operators
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
        dtype: of the results, as `torch.export` noted it. Where autocast of CPUs gives the gates alone another dtype,
            the ATen operator stays.
    """
    h, c = states
    input_gates, hidden_gates = linear(x, into, bias), linear(h, across, hidden_bias)
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
