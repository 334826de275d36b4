"""The loops over time steps of LSTM, GRU and plain RNN layers, forward and backward, one direction of one layer each.

Shapes: T steps, B samples, H hidden units, P outputs (H unless an LSTM projects). Gates stand side by side in the last
dim, in torch's order: input, forget, cell, output for LSTM (4·H); reset, update, new for GRU (3·H).

The hidden units may be shared by several ranks, each of which has their columns of every tensor and their rows of the
weight: `units` then puts the state together before every step. P, the columns of the weight, is whole.

Source: the formulas in the documentation of `torch.nn.LSTM`, `torch.nn.GRU` and `torch.nn.RNN`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear


class HiddenUnits(Protocol):
    """Where the hidden units of a layer are."""

    def gathered(self, state: Tensor) -> Tensor:
        """The state of all units `[B, H]` from that of this rank's."""

    def summed(self, gradient: Tensor) -> Tensor:
        """This rank's units of the sum of what all ranks have for all units `[B, H]`."""


class _Here:
    """All units are on this rank."""

    def gathered(self, state: Tensor) -> Tensor:
        return state

    def summed(self, gradient: Tensor) -> Tensor:
        return gradient


HERE: HiddenUnits = _Here()


def lstm(
    gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, projection: Tensor | None, units: HiddenUnits = HERE
) -> tuple[Tensor, ...]:
    """Outputs `[T, B, P]`, cell states `[T, B, H]` and gates after their activation `[T, B, 4·H]`."""
    outputs, cells, active = [], [], []
    for gate in gates:
        into, forget, new, out = (gate + linear(units.gathered(h), weight)).chunk(4, -1)
        into, forget, new, out = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
        c = forget * c + into * new
        h = out * c.tanh()
        h = h if projection is None else linear(h, projection)
        outputs.append(h)
        cells.append(c)
        active.append(torch.cat([into, forget, new, out], -1))
    return torch.stack(outputs), torch.stack(cells), torch.stack(active)


def lstm_backward(
    grad_output: Tensor | None,
    grad_cells: Tensor | None,
    c: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    cells: Tensor,
    active: Tensor,
    units: HiddenUnits = HERE,
) -> tuple[Tensor, ...]:
    """Gradients of gates `[T, B, 4·H]`, of h and c, and of every step's output, later steps included `[T, B, P]`."""
    grad_h = torch.zeros_like(c) if projection is None else c.new_zeros(c.shape[0], projection.shape[0])
    grad_c = torch.zeros_like(c)
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
        grad_h, grad_c = units.summed(grad_gate @ weight), grad_cell * forget
        grad_gates.append(grad_gate)
        totals.append(total)
    return torch.stack(grad_gates[::-1]), grad_h, grad_c, torch.stack(totals[::-1])


def gru(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, units: HiddenUnits = HERE) -> tuple[Tensor, ...]:
    """Outputs `[T, B, H]`, gates after their activation `[T, B, 3·H]`, and h's part of the new gate `[T, B, H]`."""
    outputs, active, candidates = [], [], []
    for gate in gates:
        from_reset, from_update, candidate = linear(units.gathered(h), weight, bias).chunk(3, -1)
        reset, update, new = gate.chunk(3, -1)
        reset, update = (reset + from_reset).sigmoid(), (update + from_update).sigmoid()
        new = (new + reset * candidate).tanh()
        h = (h - new) * update + new
        outputs.append(h)
        active.append(torch.cat([reset, update, new], -1))
        candidates.append(candidate)
    return torch.stack(outputs), torch.stack(active), torch.stack(candidates)


def gru_backward(
    grad_output: Tensor,
    h: Tensor,
    weight: Tensor,
    output: Tensor,
    active: Tensor,
    candidates: Tensor,
    units: HiddenUnits = HERE,
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
        grad_h = total * update + units.summed(grad_added[-1] @ weight)
    return torch.stack(grad_gates[::-1]), torch.stack(grad_added[::-1]), grad_h


def rnn(gates: Tensor, h: Tensor, weight: Tensor, relu: bool, units: HiddenUnits = HERE) -> Tensor:
    """Outputs `[T, B, H]`."""
    outputs = []
    for gate in gates:
        h = gate + linear(units.gathered(h), weight)
        h = h.relu() if relu else h.tanh()
        outputs.append(h)
    return torch.stack(outputs)


def rnn_backward(
    grad_output: Tensor, weight: Tensor, output: Tensor, relu: bool, units: HiddenUnits = HERE
) -> tuple[Tensor, ...]:
    """Gradients of gates `[T, B, H]` and of h."""
    grad_h = torch.zeros_like(output[0])
    grad_gates = []
    for step in reversed(range(output.shape[0])):
        slope = (output[step] > 0).to(output.dtype) if relu else 1 - output[step] * output[step]
        grad_gates.append((grad_h + grad_output[step]) * slope)
        grad_h = units.summed(grad_gates[-1] @ weight)
    return torch.stack(grad_gates[::-1]), grad_h
