"""Rules of reductions, scans and sorts against the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.check import check
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape

aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


CALLS = {
    "sum": (aten.sum.dim_IntList, (_x(4, 6, 12), [1, -1])),
    "sum keeping dims": (aten.sum.dim_IntList, (_x(4, 6, 12), [1], True)),
    "sum of everything": (aten.sum.default, (_x(4, 6),)),
    "sum over no dims": (aten.sum.dim_IntList, (_x(4, 6), [])),
    "sum of a number": (aten.sum.dim_IntList, (_x(), [0])),
    "sum of integers": (aten.sum.default, (torch.arange(12).reshape(6, 2),)),
    "mean": (aten.mean.dim, (_x(4, 6, 12), [0, 2])),
    "mean keeping dims": (aten.mean.dim, (_x(4, 6, 12), [-1], True)),
    "mean of everything": (aten.mean.default, (_x(12, 6),)),
    "amax": (aten.amax.default, (_x(4, 6), [1], True)),
    "amin": (aten.amin.default, (_x(4, 6), [0])),
    "max of everything": (aten.max.default, (_x(4, 6),)),
    "min of everything": (aten.min.default, (_x(4, 6),)),
    "max with indices": (aten.max.dim, (_x(4, 6), 1)),
    "prod": (aten.prod.dim_int, (_x(4, 6), 1)),
    "prod of everything": (aten.prod.default, (_x(4, 6),)),
    "argmax": (aten.argmax.default, (_x(4, 6), 1)),
    "argmax of everything": (aten.argmax.default, (_x(4, 6),)),
    "any": (aten.any.dim, (_x(4, 6) > 1, 0)),
    "all": (aten.all.default, (_x(4, 6) > 1,)),
    "var": (aten.var.correction, (_x(4, 6), [1])),
    "var_mean": (aten.var_mean.correction, (_x(4, 6), [0])),
    "std": (aten.std.correction, (_x(4, 6),)),
    "vector norm": (aten.linalg_vector_norm.default, (_x(4, 6), 2, [1], True)),
    "vector norm of everything": (aten.linalg_vector_norm.default, (_x(4, 6),)),
    "logsumexp": (aten.logsumexp.default, (_x(4, 12, 6), [1, 2])),
    "logsumexp keeping dims": (aten.logsumexp.default, (_x(4, 12), [0], True)),
    "logsumexp of infinities": (aten.logsumexp.default, (torch.full((4, 12), -torch.inf, dtype=torch.float64), [1])),
    "cumsum": (aten.cumsum.default, (_x(4, 6), 1)),
    "cumprod": (aten.cumprod.default, (_x(4, 6), -1)),
    "sort": (aten.sort.default, (_x(4, 6), 0)),
    "topk": (aten.topk.default, (_x(4, 6), 2)),
    "topk of everything": (aten.topk.default, (_x(4, 6), 6)),
    "count_nonzero": (aten.count_nonzero.dim_IntList, (_x(4, 6), [1])),
    "gradient of max": (
        aten.value_selecting_reduction_backward.default,
        (_x(4), 1, torch.tensor([0, 5, 2, 2]), [4, 6], False),
    ),
    "gradient of max keeping dims": (
        aten.value_selecting_reduction_backward.default,
        (_x(4, 1), 1, torch.tensor([[0], [5], [2], [2]]), [4, 6], True),
    ),
}


@pytest.mark.parametrize(("op", "args"), CALLS.values(), ids=CALLS)
def test_rule_is_sound(op: Any, args: tuple[Any, ...]) -> None:
    assert check(op, args) == []


@pytest.mark.parametrize(
    ("op", "kind"), [(aten.sum.dim_IntList, "sum"), (aten.mean.dim, "sum"), (aten.amax.default, "max")]
)
def test_shards_of_a_reduced_dim_leave_partials(op: Any, kind: str) -> None:
    args = (_x(4, 6), [1])
    rule = rule_for(call_of(op, args, {}, op(*args)))
    assert rule is not None
    assert str(result_spec(rule, rule.indices("d1"), MeshShape.of({"x": 2}), 0)) == f"P({kind})"


def test_logsumexp_reduces_inside_and_says_what_it_costs() -> None:
    args = (_x(4, 6), [1])
    rule = rule_for(call_of(aten.logsumexp.default, args, {}, torch.logsumexp(*args)))
    assert rule is not None
    assert rule.factors[1].exchange == 2 * 4 * 8
    assert str(result_spec(rule, (1,), MeshShape.of({"x": 2}), 0)) == "R"
