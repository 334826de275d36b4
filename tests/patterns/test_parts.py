"""What operators are told of the sizes of their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.parts import factors_with_size_arguments
from autoshard.patterns.registry import call_of, rule_for

aten = torch.ops.aten
ONE = [1]


def of(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


@pytest.mark.parametrize(
    ("op", "args", "told"),
    [
        (aten.relu.default, (of(8, 6),), set()),
        (aten.expand.default, (of(8, 1), [8, 6]), set()),
        (aten.new_empty_strided.default, (of(8), [8, 6], [6, 1]), set()),
        (aten.constant_pad_nd.default, (of(8, 6), [0, 1]), {6, 7}),
        (aten.constant_pad_nd.default, (of(7, 6), [0, 0, 2, 0]), {7, 9}),
        (aten.constant_pad_nd.default, (of(8, 6), [0, 0]), set()),
        (aten.roll.default, (of(8, 6), [1], [-1]), {6}),
        (aten.roll.default, (of(8, 6), [1]), {8, 6}),
        (aten.slice.Tensor, (of(8, 7), 1, 0, 4), {7, 4}),
        (aten.repeat.default, (of(1, 6), [8, 1]), set()),
        (aten.repeat.default, (of(6), [8, 2]), {6, 2}),
        (aten.native_layer_norm.default, (of(8, 6), [6], None, None, 1e-5), {6}),
        (aten.convolution.default, (of(8, 3, 5, 7), of(4, 3, 1, 1), None, ONE, [0], ONE, False, [0], 1), {5, 7}),
        (aten.arange.default, (8,), set()),
        (aten.arange.start_step, (0, 8, 1), set()),
        (aten.arange.start_step, (2, 10, 1), {8}),
        (aten.linspace.default, (0.0, 1.0, 8), {8}),
        (aten.zeros.default, ([8, 6],), set()),
    ],
)
def test_which_sizes_a_call_is_told(op: Any, args: tuple[Any, ...], told: set[int]) -> None:
    call = call_of(op, args, {}, op(*args))
    rule = rule_for(call)
    assert rule is not None
    assert {rule.factors[factor].size for factor in factors_with_size_arguments(call, rule)} - {1} == told
