"""The checker finds rules that are wrong, and passes those that are right.

Operators that draw at random: what the checker says of local programs that draw wrongly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard.errors import RuleError
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.random import draws
from autoshard.patterns.registry import call_of, register_rule
from autoshard.patterns.soundness import (
    Finding,
    check,
    compare,
    reference_draws,
    sample_call,
    shard_unevenly,
    strategies,
)
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import unshard

X = torch.randn(4, 6, dtype=torch.float64)


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Operators with rules that are right and wrong in different ways."""
    with torch.library._scoped_library("autoshard_test_check", "DEF") as library:
        rules: dict[str, tuple[Any, dict[str, Any]]] = {
            "square": (torch.square, {"text": "... -> ..."}),
            "square_linear": (torch.square, {"text": "... -> ...", "linear": "0"}),
            "plus_one_linear": (lambda x: x + 1, {"text": "... -> ...", "linear": "0"}),
            "softmax": (lambda x: x.softmax(-1), {"text": "... -> ..."}),
            "softmax_whole": (lambda x: x.softmax(-1), {"text": "... d! -> ... d!"}),
            "mean": (lambda x: x.mean(-1), {"text": "... d -> ..."}),
            "total": (lambda x: x.sum(-1), {"text": "... d -> ..."}),
            "total_reduced": (lambda x: x.sum(-1), {"text": "... d -> ...", "reduce": {"d": None}}),
            "swap_halves": (lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), {"text": "... (h d) -> ... (h d)"}),
            "rows": (lambda x: x + torch.arange(x.shape[0]).reshape(-1, 1), {"text": "i j -> i j"}),
            "failing": (lambda x: x.view(4, 6) + 0, {"text": "i j -> i j"}),
            "nothing": (torch.clone, {}),
        }
        for name, (function, options) in rules.items():
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, function, "CPU")
            if name == "swap_halves":
                register_rule(
                    f"autoshard_test_check::{name}",
                    lambda call: bind("... (h! d) -> ... (h! d)", call, sizes={"h": 2}),
                    replace=True,
                )
            elif options:
                text = options.pop("text")
                register_rule(f"autoshard_test_check::{name}", text, replace=True, **options)
        yield torch.ops.autoshard_test_check


@pytest.mark.parametrize("name", ["square", "softmax_whole", "total", "swap_halves"])
def test_sound_rules_pass(ops: Any, name: str) -> None:
    assert check(getattr(ops, name).default, (X,)) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("square_linear", "not close"),
        ("plus_one_linear", "not close"),
        ("softmax", "not close"),
        ("mean", "not close"),
        ("total_reduced", "not close"),
        ("rows", "not close"),
        ("failing", "fails with RuntimeError"),
    ],
)
def test_unsound_rules_are_found(ops: Any, name: str, problem: str) -> None:
    findings = check(getattr(ops, name).default, (X,))
    assert findings
    assert any(problem in str(finding) for finding in findings)
    assert all(name in finding.op for finding in findings)


def test_a_finding_names_operator_strategy_and_mesh(ops: Any) -> None:
    finding = check(ops.softmax.default, (X,), sizes=(2,))[0]
    assert str(finding).startswith("autoshard_test_check.softmax.default with dim1 on x on mesh x=2: result 0: as S(1)")
    assert isinstance(finding, Finding)


def test_an_operator_without_a_rule(ops: Any) -> None:
    with pytest.raises(RuleError, match="has no rule"):
        check(ops.nothing.default, (X,))


def _parts(offered: Any) -> list[tuple[str, int]]:
    return [(refined.factors[choices[0]].name, refined.factors[choices[0]].size) for refined, choices in offered]


def test_strategies_include_inner_parts_and_two_axes() -> None:
    rule = bind("i j -> i j", call_of(torch.ops.aten.clone.default, (X,), {}, X))
    one = list(strategies(rule, MeshShape.of({"x": 2})))
    assert [choices for plain, choices in one if plain is rule] == [(-1,), (0,), (1,)]
    assert _parts(one[3:]) == [("i.1", 2), ("j.1", 2)]
    four = list(strategies(rule, MeshShape.of({"x": 4})))
    assert _parts(four[3:]) == [("i.1", 2), ("i.0", 2), ("j.1", 3), ("j.0", 2)]  # all padded: four divides no part
    two = [choices for _, choices in strategies(rule, MeshShape.of({"x": 2, "y": 2}))]
    assert (0, 0) in two
    assert (1, 1) in two  # three for each rank of the first axis, in blocks of two


@pytest.mark.parametrize("text", ["P(sum)", "P(sum) P(sum)", "P(sum) S(0)", "S(1) P(sum)", "S(0) R"])
def test_uneven_terms_add_up(text: str) -> None:
    spec = Spec.parse(text)
    mesh = MeshShape.of(dict(zip("xy", (2, 2), strict=False))) if len(spec) == 2 else MeshShape.of({"x": 3})
    shards = shard_unevenly(X, spec, mesh)
    torch.testing.assert_close(unshard(shards, spec, mesh, X.shape), X, rtol=1e-12, atol=1e-12)
    if spec.partial_axes:
        assert all(shard.abs().max() > 0 for shard in shards.values())


def test_infinite_numbers_survive_being_split() -> None:
    spec, mesh = Spec.parse("P(sum)"), MeshShape.of({"x": 3})
    x = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    torch.testing.assert_close(unshard(shard_unevenly(x, spec, mesh), spec, mesh, x.shape), x, equal_nan=True)


def test_replicas_that_differ_are_found() -> None:
    mesh, spec = MeshShape.of({"x": 2}), Spec.parse("R")
    problem = compare({(0,): X, (1,): X + 1}, spec, mesh, X)
    assert problem is not None
    assert "on the copy at {0: 1}" in problem


def test_a_wrong_local_shape_or_dtype_is_found() -> None:
    mesh, spec = MeshShape.of({"x": 2}), Spec.parse("S(0)")
    assert "has shape [2, 6]" in str(compare({(0,): X, (1,): X}, spec, mesh, X))
    assert "dtype" in str(compare({(0,): X.float(), (1,): X.float()}, spec, mesh, X))


# Operators by any of their names, and samples in any form.


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


DRAWN = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
_numbers = itertools.count()


@pytest.fixture
def noise() -> Iterator[str]:
    """The name of a new operator that draws uniform numbers from the default generator."""
    with torch.library._scoped_library("autoshard_test_chance", "FRAGMENT") as library:
        name = f"noise{next(_numbers)}"
        library.define(f"{name}(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl(name, torch.rand_like, "CPU")
        yield f"autoshard_test_chance::{name}"


def _drawn(
    call: LocalCall, *, low: float = 0.0, high: float = 1.0, stream: int | None = None, shard: Any = "own"
) -> Any:
    """Uniform numbers; the right ones by default."""
    emit = call.emit
    if shard == "own":
        shard = call.linear_index([axis for axis, choice in enumerate(call.choices) if choice >= 0])
    number = emit.stream() if stream is None else stream
    operands = (low, high, emit.seed(), number, shard)
    return emit.call(
        draws.uniform.default,
        list(call.result_shape()),
        *operands,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def _everywhere(call: LocalCall) -> Any:
    """Numbers of every rank's own, replicas or not."""
    return _drawn(call, shard=call.linear_index(range(call.mesh.ndim)))


def _squared(call: LocalCall) -> Any:
    return call.emit.call(aten.square.default, _drawn(call))


def _smaller_in_one_place(call: LocalCall) -> Any:
    """Right but for the first number of every shard, which is a tenth of what it should be."""
    emit, value = call.emit, _drawn(call)
    shape = call.result_shape()
    numbers = emit.call(aten.view.default, emit.call(aten.arange.default, math.prod(shape)), list(shape))
    small = emit.call(aten.mul.Scalar, value, 0.1)
    return emit.call(aten.where.self, emit.call(aten.eq.Scalar, numbers, 0), small, value)


MISTAKES: dict[str, tuple[Callable[[LocalCall], Any], str]] = {
    "the default generator": (lambda call: call.run(), "replicas draw different numbers"),
    "numbers of every rank's own": (_everywhere, "replicas draw different numbers"),
    "the same numbers on every shard": (lambda call: _drawn(call, shard=None), "draw the same numbers"),
    "another range": (lambda call: _drawn(call, high=1.2), "distributed otherwise"),
    "another shape of the distribution": (_squared, "distributed otherwise"),
    "one position that differs": (_smaller_in_one_place, "the mean at some position"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_drawing_is_named(noise: str, mistake: str) -> None:
    local, problem = MISTAKES[mistake]
    register_rule(noise, "... -> ...", local=local)
    assert any(problem in finding.problem for finding in check(noise, DRAWN, sizes=(2,)))


def test_right_draws_pass(noise: str) -> None:
    register_rule(noise, "... -> ...", local=_drawn)
    assert check(noise, DRAWN) == []


def test_numbers_that_do_not_follow_from_the_seed_are_found(noise: str) -> None:
    streams = itertools.count()
    register_rule(noise, "... -> ...", local=lambda call: _drawn(call, stream=next(streams)))
    findings = check(noise, DRAWN, sizes=(2,))
    assert any("does not follow from the step's seed" in finding.problem for finding in findings)


def test_the_default_generator_is_left_as_it_was() -> None:
    before = torch.random.get_rng_state()
    drawn = reference_draws(aten.bernoulli.p, (DRAWN, 0.5), {})
    assert drawn.random
    assert len(drawn.seeds) == len(drawn.whole) + 1
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_is_not_random_on_this_call_is_compared_by_value() -> None:
    assert not reference_draws(aten.bernoulli.p, (DRAWN, 0.0), {}).random
    assert not reference_draws(aten.native_dropout.default, (DRAWN, 0.5, False), {}).random
    assert reference_draws(aten.mm.default, (DRAWN, DRAWN), {}).seeds == (0,)


def test_coins_that_come_up_alike_under_two_seeds_are_random_all_the_same() -> None:
    def thrown(weight: float, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.bernoulli(torch.tensor([weight]))

    weight = next(each / 16 for each in range(1, 16) if torch.equal(thrown(each / 16, 0), thrown(each / 16, 1)))
    assert reference_draws(aten.bernoulli.default, (torch.tensor([weight]),), {}).random
    assert not reference_draws(aten.bernoulli.default, (torch.ones(3),), {}).random
    assert not reference_draws(aten.sin.default, (DRAWN,), {}).random
