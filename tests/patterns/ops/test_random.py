from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from autoshard.operators.attention.attention_operator import operators as attentions
from autoshard.patterns._torch import has_philox
from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.ops import random
from autoshard.patterns.ops.random import draws
from autoshard.patterns.padding import emit_local
from autoshard.patterns.soundness import shard_unevenly
from autoshard.patterns.strategy import axis_choices, fits, operand_spec, result_spec
from autoshard.specs.axes import MeshShape
from autoshard.specs.tensors import unshard
from tests.patterns.ops.philox import philox, stateless_cpu
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

SHAPE = (64, 48)
CPU = {"dtype": torch.float64, "device": torch.device("cpu")}
INTEGERS = {"dtype": torch.int64, "device": torch.device("cpu")}
MESH = MeshShape.of({"x": 4, "y": 2})
COUNT = 64 * 48


def _drawn(op: Any, *args: Any, seed: int = 0, **kwargs: Any) -> list[list[torch.Tensor]]:
    """For every strategy on the mesh, the results put together; replicas of a shard agree."""
    call, rule = bound(op, *args, **kwargs)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    drawn = []
    for choices in itertools.product(*(axis_choices(rule, size) for size in MESH.sizes)):
        if not fits(rule, choices, MESH):
            continue
        emit, values = Lockstep(MESH, seed), []
        for position, tensor in enumerate(tensors):
            shards = shard_unevenly(tensor, operand_spec(rule, choices, MESH, position), MESH)
            values.append(PerRank(tuple(shards.values())))
        results = emit_local(LocalCall(call, rule, choices, MESH, emit, values))
        results = results if isinstance(results, tuple) else (results,)
        drawn.append(
            [_joined(value, result_spec(rule, choices, MESH, i), call.results[i]) for i, value in enumerate(results)]
        )
    return drawn


def _joined(value: PerRank, spec: Any, meta: Any) -> torch.Tensor:
    shards = dict(zip(MESH.coordinates(), value.values, strict=True))
    replicated = [axis for axis, placement in enumerate(spec) if placement.is_replicate()]
    for coordinate, tensor in shards.items():
        first = tuple(0 if axis in replicated else index for axis, index in enumerate(coordinate))
        assert torch.equal(tensor, shards[first])
        assert tensor.dtype == meta.dtype
    return unshard(shards, spec, MESH, meta.shape)


X, P = normal(*SHAPE), normal(*SHAPE).sigmoid()
CALLS = [  # the call, and its mean and standard deviation (None: those of the probabilities P)
    (aten.bernoulli.p, (X, 0.3), {}, 0.3, 0.21**0.5),
    (aten.bernoulli.default, (P,), {}, None, 0.5),
    (aten.bernoulli.Tensor, (X, P), {}, None, 0.5),
    (aten.rand.default, (list(SHAPE),), CPU, 0.5, 12**-0.5),
    (aten.rand_like.default, (X,), {}, 0.5, 12**-0.5),
    (aten.randn.default, (list(SHAPE),), CPU, 0.0, 1.0),
    (aten.randn_like.default, (X.float(),), {}, 0.0, 1.0),
    (aten.randint.default, (10, list(SHAPE)), INTEGERS, 4.5, 8.25**0.5),
    (aten.randint.low, (5, 10, list(SHAPE)), INTEGERS, 7.0, 2.0**0.5),
    (aten.randint_like.default, (X, 10), {}, 4.5, 8.25**0.5),
    (aten.randint_like.low_dtype, (X, 5, 10), {}, 7.0, 2.0**0.5),
    (aten.uniform.default, (X, 2.0, 4.0), {}, 3.0, 3**-0.5),
    (aten.normal_functional.default, (X, 2.0, 4.0), {}, 2.0, 4.0),
    (aten.normal.float_float, (2.0, 4.0, list(SHAPE)), CPU, 2.0, 4.0),
    (aten.normal.Tensor_float, (torch.full_like(X, 3.0), 0.5), {}, 3.0, 0.5),
    (aten.normal.float_Tensor, (1.0, torch.full_like(X, 2.0)), {}, 1.0, 2.0),
    (aten.normal.Tensor_Tensor, (torch.full_like(X, 3.0), torch.full_like(X, 2.0)), {}, 3.0, 2.0),
    (aten.exponential.default, (X, 2.0), {}, 0.5, 0.5),
    (aten.geometric.default, (X, 0.3), {}, 1 / 0.3, 0.7**0.5 / 0.3),
    (aten.log_normal.default, (X, 0.2, 0.5), {}, math.exp(0.325), (math.expm1(0.25) * math.exp(0.65)) ** 0.5),
    (aten.random.to, (X.long(), 10), {}, 4.5, 8.25**0.5),
    (getattr(aten.random, "from"), (X, 5, 10), {}, 7.0, 2.0**0.5),
    (aten.random.default, (X.byte(),), {}, 127.5, 256 / 12**0.5),
    (aten.poisson.default, (torch.full_like(X, 3.0),), {}, 3.0, 3.0**0.5),
    (aten._standard_gamma.default, (torch.full_like(X, 4.0),), {}, 4.0, 2.0),
    (aten.binomial.default, (torch.full_like(X, 10.0), torch.full_like(X, 0.3)), {}, 3.0, 2.1**0.5),
]


@pytest.fixture(params=["generators", "stateless"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What numbers come from: a generator of the device, or torch's stateless one, which GPUs have."""
    if request.param == "generators":
        # Torch 2.14 has the stateless one on CPUs, too.
        monkeypatch.setattr(random, "has_philox", lambda device_type: False)
        yield
        return
    with stateless_cpu():
        assert has_philox("cpu")
        yield


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(("op", "args", "kwargs", "mean", "deviation"), CALLS, ids=[str(case[0]) for case in CALLS])
def test_distribution_of_every_strategy(op: Any, args: Any, kwargs: Any, mean: float | None, deviation: float) -> None:
    drawn = _drawn(op, *args, **kwargs)
    assert len(drawn) == 9
    expected = P.mean().item() if mean is None else mean
    for (values,) in drawn:
        assert abs(values.double().mean().item() - expected) < 5 * deviation / COUNT**0.5
        assert abs(values.double().std().item() - deviation) < 0.1 * deviation


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("train", [True, None])
def test_dropout(train: bool | None) -> None:
    for result, mask in _drawn(aten.native_dropout.default, X, 0.25, train):
        assert mask.dtype == torch.bool
        torch.testing.assert_close(result, X * mask / 0.75)
        assert abs(mask.double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / COUNT) ** 0.5


def test_dropout_of_attention() -> None:
    """Samples, heads and queries drop weights of their own, of which the results here tell which were kept."""
    query, key, value = (
        torch.zeros(8, 8, 16, 4).double(),
        normal(8, 4, 12, 4),
        torch.eye(12).double().expand(8, 4, -1, -1),
    )
    for causal in (False, True):
        drawn = _drawn(
            attentions.attention.default, query, key, value, None, None, causal, 0, 1.0, 0.25, torch.tensor(5)
        )
        assert len(drawn) > 9
        for result, *_ in drawn:
            kept = result[..., 12:, :] != 0  # queries that attend to all keys
            assert abs(kept.double().mean().item() - 0.75) < 5 * 0.75**0.5 * 0.5 / kept.numel() ** 0.5
            stretches = result.unflatten(2, (2, 8)) if not causal else kept.unsqueeze(2)
            parts = stretches.flatten(0, 2)
            assert not any(torch.equal(one, other) for one, other in itertools.combinations(parts, 2))


def test_dropout_at_its_ends() -> None:
    assert_sound(aten.native_dropout.default, X, 0.5, False)
    assert_sound(aten.native_dropout.default, X, 0.0, True)
    assert_sound(aten.native_dropout.default, X, 1.0, True)


def test_dropout_backward() -> None:
    assert_sound(aten.native_dropout_backward.default, normal(4, 6), normal(4, 6) > 0, 2.0, shards="dim0 dim1")


@pytest.mark.usefixtures("source")
def test_shards_differ() -> None:
    for (values,) in _drawn(aten.rand.default, list(SHAPE), **CPU)[1:]:
        assert values.unique().numel() == COUNT


@pytest.mark.usefixtures("source")
def test_numbers_follow_from_the_seed() -> None:
    first, again, other = (_drawn(aten.rand.default, list(SHAPE), seed=seed, **CPU) for seed in (1, 1, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


def test_default_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    draws.uniform([4], 0.0, 1.0, torch.tensor(3), 0, None, **CPU)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.usefixtures("source")
def test_streams_differ() -> None:
    one, two = (draws.uniform([8], 0.0, 1.0, torch.tensor(3), stream, None, **CPU) for stream in (0, 1))
    assert not torch.equal(one, two)


def test_randperm() -> None:
    ((values,),) = _drawn(aten.randperm.default, 48, device=torch.device("cpu"))
    assert torch.equal(values.sort().values, torch.arange(48))


def test_multinomial() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0, 6.0]], dtype=torch.float64).repeat(400, 1)
    for (values,) in _drawn(aten.multinomial.default, weights, 3):
        assert torch.equal(values.sort(-1).values, torch.tensor([[1, 2, 3]]).expand(400, 3))
        assert abs((values[:, 0] == 3).double().mean().item() - 0.6) < 5 * (0.24 / 400) ** 0.5
    for (values,) in _drawn(aten.multinomial.default, weights, 5, True):
        assert abs((values == 3).double().mean().item() - 0.6) < 5 * (0.24 / 2000) ** 0.5
        assert not (values == 0).any()


def test_cauchy_by_its_quartiles() -> None:
    for (values,) in _drawn(aten.cauchy.default, X, 1.0, 2.0):
        quartiles = values.flatten().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
        torch.testing.assert_close(quartiles, torch.tensor([-1.0, 1.0, 3.0], dtype=torch.float64), rtol=0, atol=0.4)


def test_there_is_at_least_one_trial() -> None:
    for (values,) in _drawn(aten.geometric.default, X.long(), 0.9):
        assert values.min() == 1


def test_dirichlet() -> None:
    for (values,) in _drawn(aten._sample_dirichlet.default, torch.full_like(X, 2.0)):
        torch.testing.assert_close(values.sum(-1), torch.ones(64, dtype=torch.float64))
        assert values.unique().numel() == COUNT
    _, rule = bound(aten._sample_dirichlet.default, P)
    assert [factor.name for factor in rule.factors if factor.shardable] == ["dim0"]


def test_gradients_of_draws() -> None:
    drawn, concentration = normal(4, 6).abs() + 0.1, normal(4, 6).abs() + 1
    assert_sound(aten._standard_gamma_grad.default, concentration, drawn, shards="dim0 dim1")
    drawn = drawn / drawn.sum(-1, keepdim=True)
    total = concentration.sum(-1, keepdim=True).expand(4, 6)
    assert_sound(aten._dirichlet_grad.default, drawn, concentration, total, shards="dim0")


def test_rectifier_with_random_slopes() -> None:
    noise = torch.zeros_like(X)
    for result, slopes in _drawn(aten.rrelu_with_noise_functional.default, X, noise, 0.1, 0.3, True):
        torch.testing.assert_close(result, torch.where(X > 0, X, X * slopes))
        assert (slopes[X > 0] == 1).all()
        drawn = slopes[X <= 0]
        assert abs(drawn.mean().item() - 0.2) < 5 * (0.2 / 12**0.5) / drawn.numel() ** 0.5
        assert drawn.unique().numel() == drawn.numel()
    assert_sound(aten.rrelu_with_noise_functional.default, X, noise, 0.1, 0.3, False, shards="dim0 dim1")
    backward = aten.rrelu_with_noise_backward.default
    assert_sound(backward, normal(4, 6), normal(4, 6) + 1, normal(6, 4).T, 0.1, 0.3, True, False, shards="dim0 dim1")


def test_philox_is_that_of_the_paper() -> None:
    """The first of the known answers that its authors give with their library."""
    (words,) = philox(np.zeros((1, 4), dtype=np.uint64), (0, 0))
    assert [hex(word) for word in words] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize(
    ("op", "parameters", "dtype"),
    [
        (draws.bernoulli, (0.25,), torch.bool),
        (draws.integers, (-3, 9), torch.int32),
        (draws.integers, (0, (1 << 63) - 1), torch.int64),
        (draws.integers, (0, (1 << 60) + 5), torch.int64),
    ],
)
def test_stateless_numbers_do_not_hang_on_what_is_drawn_at_once(
    op: Any, parameters: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number depends on the key and its place: longer tensors begin with those of shorter ones."""
    arguments = (*parameters, torch.tensor(5), 0, None)
    keywords = {"dtype": dtype, "device": torch.device("cpu")}
    with stateless_cpu():
        values = op([20_000], *arguments, **keywords)
        assert torch.equal(op([777], *arguments, **keywords), values[:777])
        monkeypatch.setattr(random, "_BLOCK", 1 << 10)
        in_blocks = op([20_000], *arguments, **keywords)
    low, high = parameters if len(parameters) == 2 else (0, 2)
    for drawn in (values, in_blocks):
        share = (drawn.double() - low) / (high - low)
        assert 0 <= share.min() <= share.max() <= 1
        mean = parameters[0] / 2 if dtype is torch.bool else 0.5 if high - low > 1 << 20 else 11 / 24
        assert abs(share.mean().item() - mean) < 0.015


def test_long_integers_have_random_bits_all_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_BLOCK", 1 << 10)
    with stateless_cpu():
        values = draws.integers([4096], 0, (1 << 63) - 1, torch.tensor(5), 0, None, **INTEGERS)
    assert (values & 0xFFFFFFFF).unique().numel() == (values >> 32).unique().numel() == 4096
    for bit in range(63):
        assert abs((values >> bit & 1).double().mean().item() - 0.5) < 0.05
