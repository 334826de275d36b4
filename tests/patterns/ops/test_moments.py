"""Variance and deviation over sharded dims."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoshard
from autoshard.operators.norms import operators
from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.padding import emit_local
from autoshard.patterns.registry import rule_for
from autoshard.patterns.soundness import shard_unevenly
from autoshard.patterns.strategy import fits, operand_spec
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.patterns.soundness.record import record
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks, relative_difference

X = normal(4, 12, 6)
OPS = [aten.var, aten.std, aten.var_mean, aten.std_mean]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x", [X, X + 1e6, X.float(), X.bfloat16()], ids=["plain", "large mean", "float", "bfloat16"])
@pytest.mark.parametrize("dims", [[1], [0, 2], None])
def test_all_dims_may_be_sharded(op: Any, x: torch.Tensor, dims: list[int] | None) -> None:
    assert_sound(op.correction, x, dims, shards="d0 d1 d2")


@pytest.mark.parametrize("op", OPS)
def test_arguments_of_all_overloads(op: Any) -> None:
    assert_sound(op.correction, X, [1], correction=0, keepdim=True, shards="d0 d1 d2")
    assert_sound(op.correction, X, [1], correction=2.5, shards="d0 d1 d2")
    assert_sound(op.dim, X, [1], False, shards="d0 d1 d2")
    assert_sound(op.default, X, True, shards="d0 d1 d2")


def test_no_degree_of_freedom_gives_what_torch_gives() -> None:
    assert_sound(aten.var.correction, normal(12), [0], correction=12, shards="d0")


def test_reduced_dims_of_complex_numbers_stay_whole() -> None:
    assert_sound(aten.var.correction, torch.view_as_complex(normal(4, 6, 2)), [1], shards="d0")


def test_large_means_cost_no_digits() -> None:
    """The sum of squares alone would leave nothing of a variance of 1 beside a mean of 1e9."""
    assert_sound(aten.var.correction, normal(12) + 1e9, [0], shards="d0")


def test_the_exchange_is_priced_in_the_dtype_that_is_exchanged() -> None:
    _, rule = bound(aten.var.correction, X.bfloat16(), [1])
    (exchange,) = rule.factors[1].exchanges
    assert exchange == ("gather_of_each", 3 * 4 * 6 * 4)


class Counting(Lockstep):
    """Runs a local program, and keeps what it exchanges: the collective, and the bytes that a rank gives."""

    def __init__(self, mesh: MeshShape) -> None:
        super().__init__(mesh)
        self.sent: list[tuple[str, int]] = []

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op.namespace == "_c10d_functional" and op != collectives.wait_tensor.default:
            self.sent.append((op._schema.name.split("::")[1], args[0].values[0].nbytes))
        return super().call(op, *args, **kwargs)


NORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "variance": lambda x: torch.var_mean(x, 1),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: functional.layer_norm(x, (6,)),
    "rms norm": lambda x: operators.rms_norm(x, [6], None, 1e-5),
    "group norm": lambda x: functional.group_norm(x, 2),
}
KINDS = {"gather_of_each": "all_gather_into_tensor", "all_reduce": "all_reduce"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(NORMS))
def test_what_is_priced_is_what_is_exchanged(name: str, dtype: torch.dtype) -> None:
    mesh, compared = MeshShape.of({"x": 2}), 0
    for recorded in record(NORMS[name], (X.to(dtype).requires_grad_(),), {}, name):
        rule = rule_for(recorded.call)
        assert rule is not None
        for index, factor in enumerate(rule.factors):
            if factor.exchanges and fits(rule, (index,), mesh):
                held = [
                    PerRank(tuple(shards[place] for place in mesh.coordinates()))
                    for position, operand in enumerate(arg for arg in recorded.args if isinstance(arg, torch.Tensor))
                    for shards in [shard_unevenly(operand, operand_spec(rule, (index,), mesh, position), mesh)]
                ]
                emitter = Counting(mesh)
                emit_local(LocalCall(recorded.call, rule, (index,), mesh, emitter, held))
                assert emitter.sent == [(KINDS[kind], size) for kind, size, *_ in factor.exchanges]
                compared += 1
    assert compared


class WrittenOut(nn.Module):
    """A batch norm as users write it."""

    running_mean: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.register_buffer("running_mean", torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(0), x.var(0, correction=0)
        self.running_mean.lerp_(mean.detach(), 0.1)
        squares = (x - mean).pow(2).mean(0)
        return self.weight * (x - mean) / (variance + 1e-5).sqrt() + squares / x.std(0)


class Weighed(nn.Module):
    """A norm of a layer's outputs far from zero, and a loss that weighs what it gives."""

    def __init__(self, norm: nn.Module, channels: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(channels, channels, bias=False), norm

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.layer(x) + 1e5) * weights).sum()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, WrittenOut])
@pytest.mark.parametrize("samples", [800, 805])
def test_a_batch_norm_far_from_zero_trains_as_on_one_device(norm: Callable[[int], nn.Module], samples: int) -> None:
    torch.manual_seed(0)
    module = Weighed(norm(6), 6).double()
    inputs = {"x": normal(samples, 6), "weights": normal(samples, 6).flip(0)}
    alone = copy.deepcopy(module)
    alone(**inputs).backward()
    with simulated_mesh(dp=4) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast"))
        module(**inputs).backward()
        found, expected = (
            {
                name: held_by_ranks(value)
                for name, value in [*each.named_buffers(), *((n, p.grad) for n, p in each.named_parameters())]
            }
            for each in (module, alone)
        )
    assert relative_difference(found, expected) <= TOLERANCE
