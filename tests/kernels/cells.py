"""CUDA's fused cells of LSTM and GRU written out for the CPU: references that refuse what the kernels would refuse.

What they keep lies as in torch's kernels: of an LSTM the active gates, of a GRU reset, update and new gate, the state
before, and the new gate's hidden part. Source: `aten/src/ATen/native/cuda/RNN.cu` in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

Optional = Tensor | None

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    _check_forward(4, input_gates, hidden_gates, cx, input_bias, hidden_bias)
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return _to_kernel_layout(o * cy.tanh()), _to_kernel_layout(cy), torch.cat([i, f, g, o], 1)


def lstm_backward(
    grad_hy: Optional, grad_cy: Optional, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Optional, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    grads = [gradient for gradient in (grad_hy, grad_cy) if gradient is not None]
    for state in (*grads, cx, cy):
        assert state.shape == grads[0].shape, f"lstm backward: {list(state.shape)} is not {list(grads[0].shape)}"
    assert workspace.dim() == 2, "lstm backward: the workspace has two dims"
    assert workspace.numel() == 4 * cx.numel(), "lstm backward: the workspace has four numbers of a unit"
    _check_types(*grads, cx, cy, workspace)
    i, f, g, o = workspace.chunk(4, 1)
    grad_h = torch.zeros_like(cx) if grad_hy is None else grad_hy
    grad_c = grad_h * o * (1 - cy.tanh() ** 2) + (0 if grad_cy is None else grad_cy)
    grad_o = grad_h * cy.tanh() * (1 - o) * o
    gates = torch.cat([grad_c * g * (1 - i) * i, grad_c * cx * (1 - f) * f, grad_c * i * (1 - g**2), grad_o], 1)
    return gates, _to_kernel_layout(grad_c * f), gates.sum(0) if has_bias else None


def gru(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Optional = None, hidden_bias: Optional = None
) -> tuple[Tensor, Tensor]:
    _check_forward(3, input_gates, hidden_gates, hx, input_bias, hidden_bias)
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, new), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hn).tanh()
    return _to_kernel_layout(n + z * (hx - n)), torch.cat([r, z, n, hx, hn], 1)


def gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Optional, ...]:
    assert grad_hy.dim() == 2, "gru backward: a gradient of a state has two dims"
    samples, units = grad_hy.shape
    assert workspace.shape == (samples, 5 * units), "gru backward: the workspace has five numbers of a unit"
    _check_types(grad_hy, workspace)
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_z = grad_hy * (hx - n) * (1 - z) * z
    grad_n = grad_hy * (1 - z) * (1 - n**2)
    grad_r = grad_n * hn * (1 - r) * r
    inputs, hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, _to_kernel_layout(grad_hy * z), *biases


def _check_forward(
    gates: int, input_gates: Tensor, hidden_gates: Tensor, state: Tensor, bias: Optional, other_bias: Optional
) -> None:
    """`checkSizes`: gates of one shape, a state with as many units, both biases or none, all of one type."""
    assert input_gates.dim() == state.dim() == 2, "cells take gates and states of two dims"
    assert input_gates.shape == hidden_gates.shape, "the gates of input and state differ in shape"
    held = state.numel()
    assert input_gates.numel() == gates * held, f"{held} numbers of a state, {input_gates.numel()} of {gates} gates"
    biases = [each for each in (bias, other_bias) if each is not None]
    assert len(biases) in (0, 2), "cells take both biases or none"
    for each in biases:
        assert each.shape == input_gates.shape[1:], f"a bias of shape {list(each.shape)}"
    _check_types(input_gates, hidden_gates, state, *biases)


def _check_types(*tensors: Tensor) -> None:
    types = {tensor.dtype for tensor in tensors}
    assert len(types) == 1, f"types {sorted(map(str, types))} differ"
    assert types <= {*_TYPES}, f"no kernel for {types}"


def _to_kernel_layout(value: Tensor) -> Tensor:
    """In the layout of the kernels' results."""
    return value.contiguous()
