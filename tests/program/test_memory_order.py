"""Kernels that read their operands as if these lay row by row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autoshard.program.memory_order import supports_layout

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (2, 3, 4, 1), (2, 3, 1, 4), (1, 3, 2, 2, 2)], ids=str)
def test_batch_norm_with_dims_of_length_one_has_the_same_gradients_in_every_order_that_suits_it(
    shape: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, tangent = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    weight, mean, variance = (torch.rand(3, dtype=torch.float64, generator=generator) + 0.5 for _ in range(3))

    def gradients(tangent: Tensor, x: Tensor) -> list[Tensor]:
        operands = [
            each if supports_layout(aten.native_batch_norm_backward.default, each) else each.contiguous()
            for each in (tangent, x)
        ]
        saved = torch.empty(0, dtype=torch.float64)
        return list(
            aten.native_batch_norm_backward(*operands, weight, mean, variance, saved, saved, False, 1e-5, [True] * 3)
        )

    expected = gradients(tangent, x)
    found = [gradients(each, x) for each in _laid_out(tangent)] + [gradients(tangent, each) for each in _laid_out(x)]
    for each in found:
        assert all(torch.allclose(ours, theirs, 1e-12, 1e-12) for ours, theirs in zip(each, expected, strict=True))


def _laid_out(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in all orders of its dims, those of length one with strides that say nothing."""
    for order in itertools.permutations(range(tensor.ndim)):
        other = tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.ndim)])
        for stride in (1, 3):
            strides = [stride if size == 1 else old for size, old in zip(other.shape, other.stride(), strict=True)]
            yield other.as_strided(other.shape, strides)
