"""The forms in which an operator and a sample call of it may be handed to `check`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard.errors import RuleError
from autoshard.patterns import check
from autoshard.patterns.registry import register_rule
from autoshard.patterns.sample import sample_call

aten = torch.ops.aten
X, Y = torch.randn(2, 4, 6, dtype=torch.float64)


@pytest.fixture
def doubled() -> Iterator[Any]:
    """A custom operator, as `torch.library.custom_op` returns it."""

    @torch.library.custom_op("autoshard_test_sample::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    yield doubled
    doubled._lib._destroy()


@pytest.mark.parametrize("name", ["aten::sum", "aten.sum", "aten::sum.dim_IntList", "aten.sum.dim_IntList"])
def test_an_operator_by_name(name: str) -> None:
    assert sample_call(name, (X, [0]))[0] == aten.sum.dim_IntList


def test_the_overload_that_takes_the_arguments() -> None:
    assert sample_call(aten.sum, (X,))[0] == aten.sum.default
    assert sample_call(aten.add, (X, 1))[0] == aten.add.Tensor
    assert sample_call(aten.pow, (X, 2))[0] == aten.pow.Tensor_Scalar
    assert sample_call(aten.pow.Tensor_Tensor, (X, Y))[0] == aten.pow.Tensor_Tensor


def test_a_custom_operator_itself(doubled: Any) -> None:
    assert sample_call(doubled, X)[0] == torch.ops.autoshard_test_sample.doubled.default
    assert sample_call("autoshard_test_sample::doubled", X)[0] == torch.ops.autoshard_test_sample.doubled.default


@pytest.mark.parametrize(
    "sample",
    [
        ((X, [0]), {"keepdim": True}),
        SimpleNamespace(input=X, args=([0],), kwargs={"keepdim": True}),  # as torch's SampleInput is
    ],
)
def test_a_sample_in_other_forms(sample: Any) -> None:
    op, args, kwargs = sample_call("aten::sum", sample)
    assert op == aten.sum.dim_IntList
    assert torch.equal(args[0], X)
    assert args[1:] == ([0],)
    assert kwargs == {"keepdim": True}


def test_keyword_arguments_besides() -> None:
    assert sample_call("aten::sum", (X, [0]), {"keepdim": True})[2] == {"keepdim": True}


def test_tensors_are_detached() -> None:
    _, args, _ = sample_call("aten::cat", ([X.clone().requires_grad_()],))
    assert not args[0][0].requires_grad


@pytest.mark.parametrize(
    ("op", "sample", "problem"),
    [
        ("sum", (X,), "not the name of an operator"),
        ("aten::no_such_operator", (X,), "torch knows no operator"),
        ("aten::sum.no_such_overload", (X,), "torch knows no operator"),
        ("aten::mm", (X, "y"), "none of the overloads"),
        ("aten::add_.Tensor", (X, Y), "changes its operands"),
        ("aten::sum", 3, "says nothing of a call"),
        ("aten::nonzero", (X,), "has no rule, so that it is replicated: register one with register_rule"),
    ],
)
def test_errors_say_what_to_change(op: str, sample: Any, problem: str) -> None:
    with pytest.raises(RuleError, match=problem):
        check(op, sample)


def test_a_rule_that_declines_a_call(doubled: Any) -> None:
    register_rule("autoshard_test_sample::doubled", lambda call: None, replace=True)
    with pytest.raises(RuleError, match=r"declines this call, on \[4, 6\]"):
        check(doubled, X)
