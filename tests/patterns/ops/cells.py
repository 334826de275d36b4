"""CUDA's fused cells of LSTM and GRU written out for the CPU, to check rules of kernels that it does not have.

What they keep lies as in torch's kernels (aten/src/ATen/native/cuda/RNN.cu): of an LSTM the active gates, of a GRU
reset, update and new gate, the state before, and the new gate's hidden part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

Optional = Tensor | None


@contextlib.contextmanager
def cells_on_cpu() -> Iterator[None]:
    """While it lasts, the fused cells run on the CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_thnn_fused_lstm_cell", lstm, "CPU")
        library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward, "CPU")
        library.impl("_thnn_fused_gru_cell", gru, "CPU")
        library.impl("_thnn_fused_gru_cell_backward", gru_backward, "CPU")
        yield


def lstm(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Optional = None, hidden_bias: Optional = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_backward(
    grad_hy: Optional, grad_cy: Optional, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Optional]:
    i, f, g, o = workspace.chunk(4, 1)
    grad_h = torch.zeros_like(cx) if grad_hy is None else grad_hy
    grad_c = grad_h * o * (1 - cy.tanh() ** 2) + (0 if grad_cy is None else grad_cy)
    grad_o = grad_h * cy.tanh() * (1 - o) * o
    gates = torch.cat([grad_c * g * (1 - i) * i, grad_c * cx * (1 - f) * f, grad_c * i * (1 - g**2), grad_o], 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def gru(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Optional = None, hidden_bias: Optional = None
) -> tuple[Tensor, Tensor]:
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, new), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Optional, ...]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_z = grad_hy * (hx - n) * (1 - z) * z
    grad_n = grad_hy * (1 - z) * (1 - n**2)
    grad_r = grad_n * hn * (1 - r) * r
    inputs, hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad_hy * z, *biases
