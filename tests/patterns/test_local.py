"""Local programs that read like torch emit the overloads that torch's names stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.patterns.local import LocalValue, TorchEmitter, unwrap
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.specs.axes import MeshShape

aten = torch.ops.aten
X = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
MASK, INDEX = X > 6, torch.tensor([2, 0])


class Recorder(Lockstep):
    """Runs operators, and keeps which they were."""

    def __init__(self) -> None:
        super().__init__(MeshShape.of({"x": 2}))
        self.ops: list[Any] = []

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.ops.append(op)
        return super().call(op, *args, **kwargs)


def run(program: Callable[..., Any], *tensors: Tensor) -> tuple[Any, list[Any]]:
    """The first rank's results of a program whose ranks hold the same tensors, and the operators that it emitted."""
    base = Recorder()
    emit = TorchEmitter(base)
    results = unwrap(program(emit, *(emit.wrap(PerRank((tensor, tensor))) for tensor in tensors)))
    first = [value.values[0] for value in results] if isinstance(results, tuple) else results.values[0]
    return first, base.ops


@pytest.mark.parametrize(
    ("program", "op", "expected"),
    [
        (lambda emit, x: x + x, aten.add.Tensor, X + X),
        (lambda emit, x: x + 1, aten.add.Scalar, X + 1),
        (lambda emit, x: x - x, aten.sub.Tensor, X - X),
        (lambda emit, x: 1 - x, aten.rsub.Scalar, 1 - X),
        (lambda emit, x: x * 2.5, aten.mul.Scalar, X * 2.5),
        (lambda emit, x: x / x, aten.div.Tensor, X / X),
        (lambda emit, x: -x, aten.neg.default, -X),
        (lambda emit, x: x < 3, aten.lt.Scalar, X < 3),
        (lambda emit, x: x >= x, aten.ge.Tensor, X >= X),
        (lambda emit, x: x > 3, aten.gt.Scalar, X > 3),
        (lambda emit, x: emit.sum(x), aten.sum.default, X.sum()),
        (lambda emit, x: emit.sum(x, [0], True), aten.sum.dim_IntList, X.sum(0, True)),
        (lambda emit, x: emit.max(x), aten.max.default, X.max()),
        (lambda emit, x: x.select(0, 1), aten.select.int, X[1]),
        (lambda emit, x: x.mean([0]), aten.mean.dim, X.mean(0)),
        (lambda emit, x: emit.div(x, x, rounding_mode="floor"), aten.div.Tensor_mode, X // X),
        (lambda emit, x: emit.view(x, [3, 4]), aten.view.default, X.view(3, 4)),
        (lambda emit, x: x.sum([0]), aten.sum.dim_IntList, X.sum(0)),
        (lambda emit, x: x.to(torch.float32), aten._to_copy.default, X.to(torch.float32)),
        (lambda emit, x: emit.view(x, torch.int64), aten.view.dtype, X.view(torch.int64)),
        (lambda emit, x: emit.clamp(x, None, 5), aten.clamp.default, X.clamp(None, 5)),
        (lambda emit, x: emit.div(x, 2, rounding_mode="floor"), aten.div.Scalar_mode, X // 2),
        (lambda emit, x: emit.where(x > 3, x, 0), aten.where.ScalarOther, X.where(X > 3, torch.zeros_like(X))),
        (lambda emit, x: emit.squeeze(x, 0), aten.squeeze.dim, X),
        (lambda emit, x: emit.slice(x, 0, 1, 3), aten.slice.Tensor, X[1:3]),
        (lambda emit, x: emit.pow(x, 2), aten.pow.Tensor_Scalar, X**2),
        (lambda emit, x: emit.cat([x, x], 1), aten.cat.default, torch.cat([X, X], 1)),
        (lambda emit, x: emit.full([2], 1.0, dtype=x.dtype), aten.full.default, torch.ones(2, dtype=X.dtype)),
        (lambda emit, x: emit.arange(1, 4, device=x.device), aten.arange.start, torch.arange(1, 4)),
    ],
)
def test_names_and_signs_of_torch_emit_its_overloads(program: Any, op: Any, expected: Tensor) -> None:
    result, ops = run(program, X)
    assert ops[-1] == op
    assert torch.equal(result, expected)


def test_lists_of_values_and_holes_between_them_are_arguments() -> None:
    result, ops = run(lambda emit, x, index: emit.index(x, [None, index]), X, INDEX)
    assert ops == [aten.index.Tensor]
    assert torch.equal(result, X[:, INDEX])


def test_several_results_are_several_values() -> None:
    def standardized(emit: TorchEmitter, x: LocalValue) -> Any:
        variance, mean = emit.var_mean(x, [1], correction=0, keepdim=True)
        return (x - mean) * emit.rsqrt(variance)

    result, ops = run(standardized, X)
    assert ops == [aten.var_mean.correction, aten.sub.Tensor, aten.rsqrt.default, aten.mul.Tensor]
    torch.testing.assert_close(result, torch.nn.functional.layer_norm(X, [3], eps=0))


def test_other_namespaces_and_overloads_by_name_are_emitted_by_call() -> None:
    result, ops = run(lambda emit, x: emit.call(aten.mul.Tensor, x, 2), X)
    assert ops == [aten.mul.Tensor]
    assert torch.equal(result, X * 2)


def test_a_value_knows_its_shape_and_type() -> None:
    emit = TorchEmitter(Lockstep(MeshShape.of({"x": 2})))
    value = emit.wrap(PerRank((X, X)))
    assert (value.shape, value.dtype, value.device) == ((4, 3), torch.float64, torch.device("cpu"))
    assert emit.wrap(value) is value
    assert emit.wrap(None) is None


def test_what_torch_does_not_have_is_an_error() -> None:
    emit = TorchEmitter(Lockstep(MeshShape.of({"x": 2})))
    with pytest.raises(AttributeError, match="ATen has no operator 'rsqart'"):
        emit.rsqart(emit.coordinate(0))
    with pytest.raises(TypeError, match=r"no overload of aten\.rsqrt"):
        emit.rsqrt(2)
