"""Operators without a rule run whole; what they draw at random, every rank has from the first."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

import autoshard
from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.ops.unknown import whole_rule
from autoshard.patterns.padding import emit_local
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.strategy import WHOLE
from autoshard.specs.axes import MeshShape
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

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


@torch.library.custom_op("unknown_test::encode", mutates_args=())
def encode(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A layer whose samples are independent."""
    return torch.relu(x @ weight.t())


@encode.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("unknown_test::encode_backward", mutates_args=())
def encode_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its gradients."""
    grad = grad * (y > 0)
    return grad @ weight, grad.t() @ x


@encode_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


encode.register_autograd(lambda ctx, grad: encode_backward(grad, *ctx.saved_tensors), setup_context=_keep)


class Encoder(nn.Module):
    """An operator that nobody wrote a rule for, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(encode(self.first(x), self.weight)).square().mean()


def _encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Encoder().double(), {"x": torch.randn(16, 6, dtype=torch.float64)}


def test_the_warning_names_the_rule_that_splits_the_batch() -> None:
    """As it is written, the line of the warning makes the rules, and the batch is split with them."""
    module, inputs = _encoder()
    report = autoshard.doctor(module, (), inputs, cluster="cpu")
    with simulated_mesh(dp=2) as mesh, warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        plan = autoshard.plan(module, mesh, (), inputs)
    assert {row.strategy for row in plan.choices if "encode" in row.operator} == {"whole"}
    lines = [re.findall(r"autoshard\.register_rule\(\".*?\"\)", str(one.message)) for one in raised]
    named = [line for found in lines for line in found]
    assert len(named) == 2
    assert all(line in " ".join(str(report).split()) for line in named)
    for line in named:
        exec(line, {"autoshard": autoshard})
    weight = torch.randn(5, 6, dtype=torch.float64)
    assert autoshard.patterns.check(encode, (inputs["x"], weight)) == []
    grad = torch.randn(16, 5, dtype=torch.float64)
    assert autoshard.patterns.check(encode_backward, (grad, inputs["x"], weight, grad + 1)) == []
    reference = train(*_encoder())
    with simulated_mesh(dp=2) as mesh:
        hints = {"first.*": Replicate(), "last.*": Replicate(), "weight": Replicate()}
        plan = autoshard.plan(module, mesh, (), inputs, hints=hints, cluster=fast_links())
        assert {row.strategy for row in plan.choices if "encode" in row.operator} == {"b on dp"}
        autoshard.parallelize(module, mesh, (), inputs, hints=hints, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
