"""Operators without a rule run whole; what they draw at random, every rank has from the first."""

from __future__ import annotations

import pytest
import torch

from autoshard.patterns.local import LocalCall, emit_local
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.ops.unknown import whole_rule
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.strategy import WHOLE
from autoshard.specs.axes import MeshShape

aten = torch.ops.aten

MESH = MeshShape.of({"a": 2, "b": 3})


@torch.library.custom_op("unknown_test::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def draw(rates: torch.Tensor) -> torch.Tensor:
    """An operator that draws at random, and that nobody wrote a rule for."""
    return torch.poisson(rates)


def _run(op: torch._ops.OpOverload, tensor: torch.Tensor, expected: object) -> object:
    call = call_of(op, (tensor,), {}, expected)
    assert rule_for(call) is None
    operand = PerRank((tensor,) * MESH.size)
    return emit_local(LocalCall(call, whole_rule(call), (WHOLE,) * MESH.ndim, MESH, Lockstep(MESH), [operand]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_those_of_the_first_rank(dtype: torch.dtype) -> None:
    rates = torch.full((5, 7), 40.0, dtype=dtype)
    torch.manual_seed(0)
    expected, another = draw(rates), draw(rates)
    assert not torch.equal(expected, another)
    torch.manual_seed(0)
    result = _run(torch.ops.unknown_test.draw.default, rates, expected)
    assert isinstance(result, PerRank)
    for tensor in result.values:
        assert torch.equal(tensor, expected)


def test_an_operator_that_draws_nothing_is_left_alone() -> None:
    matrix = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    expected = aten.unique_consecutive.default(matrix)
    values, *rest = _run(aten.unique_consecutive.default, matrix, expected)  # type: ignore[misc]
    assert all(torch.equal(tensor, expected[0]) for tensor in values.values)
    assert len(rest) == len(expected) - 1
