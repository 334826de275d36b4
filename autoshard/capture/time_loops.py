"""The loops over time steps of LSTM, GRU and plain RNN layers, forward and backward, one direction of one layer each.

Shapes: T steps, B samples, H hidden units, P outputs (H unless an LSTM projects). Gates stand side by side in the last
dim, in torch's order: input, forget, cell, output for LSTM (4·H); reset, update, new for GRU (3·H).

The hidden units may be shared by several ranks, each of which has their columns of every tensor and their rows of the
weight: `units` then puts the state together before every step. P, the columns of the weight, is whole.

A step of LSTM and GRU behind its product is that of `recurrent_cell_operators`, which has a kernel on GPUs.

Source: the formulas in the documentation of `torch.nn.LSTM`, `torch.nn.GRU` and `torch.nn.RNN`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from autoshard.capture.recurrent_cell_operators import gru_step, gru_step_backward, lstm_step, lstm_step_backward


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
    """Return gradients of gates `[T, B, 4·H]`, h, c, and of every step's output, later steps included `[T, B, P]`."""
    grad_h = torch.zeros_like(c) if projection is None else c.new_zeros(c.shape[0], projection.shape[0])
    grad_c = torch.zeros_like(c)
    grad_gates, totals = [], []
    for step in reversed(range(cells.shape[0])):
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
        candidates.append(workspace[:, gate.shape[1] + h.shape[1] :])  # between them: the state before, kept as output
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
        slope = (output[step] > 0).to(output.dtype) if relu else 1 - output[step] * output[step]
        grad_gates.append((grad_h + grad_output[step]) * slope)
        grad_h = units.reduce_scatter(grad_gates[-1] @ weight)
    return torch.stack(grad_gates[::-1]), grad_h
