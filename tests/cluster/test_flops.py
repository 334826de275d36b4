"""Every count against the one that torch makes while it runs the operator."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autoshard.capture.recurrence import steps
from autoshard.cluster import flops

aten = torch.ops.aten


class Ours(TorchDispatchMode):
    """Sums `flops` over the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operands = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
        results = result if isinstance(result, (tuple, list)) else [result]
        self.total += flops(func, operands, [r.shape for r in results if isinstance(r, torch.Tensor)], args)
        return result


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", requires_grad=True)


CASES = {
    "mm": lambda: tensor(3, 4) @ tensor(4, 5),
    "addmm": lambda: torch.addmm(tensor(5), tensor(3, 4), tensor(4, 5)),
    "bmm": lambda: torch.bmm(tensor(2, 3, 4), tensor(2, 4, 5)),
    "baddbmm": lambda: torch.baddbmm(tensor(2, 3, 5), tensor(2, 3, 4), tensor(2, 4, 5)),
    "convolution": lambda: torch.nn.functional.conv2d(tensor(2, 4, 9, 9), tensor(6, 4, 3, 3), tensor(6), stride=2),
    "transposed convolution": lambda: torch.nn.functional.conv_transpose2d(tensor(2, 4, 5, 5), tensor(4, 6, 3, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_agree_with_torch(name: str) -> None:
    expected = FlopCounterMode(display=False)
    with Ours() as ours, expected:
        CASES[name]().sum().backward()
    assert ours.total == expected.get_total_flops() > 0


def test_a_group_of_channels_meets_its_own_weight_alone() -> None:
    with Ours() as ours:
        torch.nn.functional.conv2d(tensor(2, 4, 9, 9), tensor(6, 2, 3, 3), groups=2).sum().backward()
    assert ours.total == 3 * 2 * (2 * 6 * 7 * 7) * (2 * 3 * 3)


def test_attention_is_two_products_forward_and_five_backward() -> None:
    query, key, value = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7))
    with Ours() as ours:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    assert ours.total == (2 + 5) * 2 * (2 * 3) * (5 * 7) * 8


@pytest.mark.parametrize(("rows", "columns", "seen"), [(8, 8, 32), (8, 20, 32), (20, 8, 8 * 8 // 2 + 12 * 8)])
def test_a_causal_mask_leaves_out_what_lies_above_the_diagonal(rows: int, columns: int, seen: int) -> None:
    shapes = ((2, 3, rows, 8), (2, 3, columns, 8), (2, 3, columns, 8))
    forward = aten._scaled_dot_product_flash_attention.default
    args = (*shapes, 0.0, True)
    assert flops(forward, shapes, shapes[:1], args) == 2 * 2 * 6 * seen * 8
    assert flops(forward, shapes, shapes[:1], (*shapes, 0.0, False)) == 2 * 2 * 6 * rows * columns * 8
    math = aten._scaled_dot_product_attention_math.default
    assert flops(math, shapes, shapes[:1], (*shapes, None, 0.0, True)) == 2 * 2 * 6 * rows * columns * 8


def test_the_input_of_the_first_layer_needs_no_gradient() -> None:
    shapes = ((2, 6, 4, 4), (2, 4, 9, 9), (6, 4, 3, 3))
    args = (*shapes, [6], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    half = flops(aten.convolution_backward.default, shapes, ((6, 4, 3, 3), (6,)), args)
    both = flops(aten.convolution_backward.default, shapes, shapes[1:], (*args[:-1], [True, True, True]))
    assert both == 2 * half > 0


def test_recurrence_multiplies_the_state_once_per_step() -> None:
    once = 2 * (5 * 3 * 16) * 4
    states, gates, cells = (3, 4), (5, 3, 16), (5, 3, 4)
    assert flops(steps.lstm_steps.default, (gates, states, states, (16, 4)), (cells, cells, gates)) == once
    results = (gates, states, states, cells)
    assert flops(steps.lstm_steps_backward.default, (cells, states, (16, 4), cells, gates), results) == once
    assert flops(steps.gru_steps_backward.default, (), (gates, gates, states)) == once
    assert flops(steps.rnn_steps.default, (cells, states, (4, 4)), (cells,)) == once / 4


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.view.default, aten._softmax.default])
def test_other_operators_are_bound_by_bytes(op) -> None:
    assert flops(op, ((3, 4), (3, 4)), ((3, 4),)) == 0.0
