"""Operators that draw at random: what the checker says of local programs that draw wrongly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._draws import draws
from autoshard.patterns.random_soundness import reference_draws
from autoshard.patterns.registry import register_rule
from autoshard.patterns.soundness import check

aten = torch.ops.aten
X = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
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
    assert any(problem in finding.problem for finding in check(noise, X, sizes=(2,)))


def test_right_draws_pass(noise: str) -> None:
    register_rule(noise, "... -> ...", local=_drawn)
    assert check(noise, X) == []


def test_numbers_that_do_not_follow_from_the_seed_are_found(noise: str) -> None:
    streams = itertools.count()
    register_rule(noise, "... -> ...", local=lambda call: _drawn(call, stream=next(streams)))
    findings = check(noise, X, sizes=(2,))
    assert any("does not follow from the step's seed" in finding.problem for finding in findings)


def test_the_default_generator_is_left_as_it_was() -> None:
    before = torch.random.get_rng_state()
    drawn = reference_draws(aten.bernoulli.p, (X, 0.5), {})
    assert drawn.random
    assert len(drawn.seeds) == len(drawn.whole) + 1
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_is_not_random_on_this_call_is_compared_by_value() -> None:
    assert not reference_draws(aten.bernoulli.p, (X, 0.0), {}).random
    assert not reference_draws(aten.native_dropout.default, (X, 0.5, False), {}).random
    assert reference_draws(aten.mm.default, (X, X), {}).seeds == (0,)


def test_coins_that_come_up_alike_under_two_seeds_are_random_all_the_same() -> None:
    def thrown(weight: float, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.bernoulli(torch.tensor([weight]))

    weight = next(each / 16 for each in range(1, 16) if torch.equal(thrown(each / 16, 0), thrown(each / 16, 1)))
    assert reference_draws(aten.bernoulli.default, (torch.tensor([weight]),), {}).random
    assert not reference_draws(aten.bernoulli.default, (torch.ones(3),), {}).random
    assert not reference_draws(aten.sin.default, (X,), {}).random
