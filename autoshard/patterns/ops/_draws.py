"""Random numbers as functions of the step's seed: operators of the `autoshard` namespace.

What they give depends on the seed, the number of the operator in the program (`stream`) and the shard, and on
nothing else: replicas of a shard agree, different shards differ, and drawing again gives the same numbers. The device's
own generator is neither read nor moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1

_library = torch.library.Library("autoshard", "FRAGMENT")
_COMMON = "Tensor seed, int stream, Tensor? shard, *, ScalarType dtype, Device device"
_library.define(f"uniform(SymInt[] size, float low, float high, {_COMMON}) -> Tensor")
_library.define(f"normal(SymInt[] size, float mean, float std, {_COMMON}) -> Tensor")
_library.define(f"integers(SymInt[] size, int low, int high, {_COMMON}) -> Tensor")
_library.define(f"bernoulli(SymInt[] size, float p, {_COMMON}) -> Tensor")
_STEP = "Tensor seed, int stream, Tensor? shard"
_library.define(f"poisson(Tensor rate, {_STEP}) -> Tensor")
_library.define(f"gamma(Tensor concentration, {_STEP}) -> Tensor")
_library.define(f"dirichlet(Tensor concentration, {_STEP}) -> Tensor")
_library.define(f"binomial(Tensor count, Tensor probability, {_STEP}) -> Tensor")


def _mixed(value: int) -> int:
    """A 64-bit hash that spreads neighbouring numbers (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def generator(seed: Tensor, stream: int, shard: Tensor | None, device: torch.device) -> torch.Generator:
    """The generator of one shard of one random operator in one step.

    Args:
        seed: the step's seed, a 0-d integer tensor; on the CPU it costs no synchronisation.
        stream: number of the operator in the program.
        shard: which shard is drawn, a 0-d integer tensor; None for a tensor that is not split.
        device: where the numbers are needed.
    """
    index = 0 if shard is None else int(shard) + 1
    mixed = _mixed(_mixed(_mixed(int(seed) & _MASK) ^ stream) ^ index)
    return torch.Generator(device).manual_seed(mixed)


def _uniform(
    size: Sequence[int],
    low: float,
    high: float,
    seed: Tensor,
    stream: int,
    shard: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    values = torch.empty(size, dtype=dtype, device=device)
    return values.uniform_(low, high, generator=generator(seed, stream, shard, device))


def _normal(
    size: Sequence[int],
    mean: float,
    std: float,
    seed: Tensor,
    stream: int,
    shard: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    values = torch.empty(size, dtype=dtype, device=device)
    return values.normal_(mean, std, generator=generator(seed, stream, shard, device))


def _integers(
    size: Sequence[int],
    low: int,
    high: int,
    seed: Tensor,
    stream: int,
    shard: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    values = torch.empty(size, dtype=dtype, device=device)
    return values.random_(low, high, generator=generator(seed, stream, shard, device))


def _bernoulli(
    size: Sequence[int],
    p: float,
    seed: Tensor,
    stream: int,
    shard: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    values = torch.empty(size, dtype=dtype, device=device)
    return values.bernoulli_(p, generator=generator(seed, stream, shard, device))


def _poisson(rate: Tensor, seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    return torch.poisson(rate, generator(seed, stream, shard, rate.device))


def _gamma(concentration: Tensor, seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    return torch.ops.aten._standard_gamma(concentration, generator(seed, stream, shard, concentration.device))


def _dirichlet(concentration: Tensor, seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    return torch.ops.aten._sample_dirichlet(concentration, generator(seed, stream, shard, concentration.device))


def _binomial(count: Tensor, probability: Tensor, seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    return torch.binomial(count, probability, generator(seed, stream, shard, count.device))


def _fake_like(parameter: Tensor, *_: object) -> Tensor:
    return torch.empty_like(parameter)


def _fake_of_two(
    size: Sequence[int],
    first: float,
    second: float,
    seed: Tensor,
    stream: int,
    shard: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _fake_of_one(
    size: Sequence[int],
    first: float,
    seed: Tensor,
    stream: int,
    shard: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _implement(name: str, draw: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    _library.impl(name, draw, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", fake, lib=_library)


_implement("uniform", _uniform, _fake_of_two)
_implement("normal", _normal, _fake_of_two)
_implement("integers", _integers, _fake_of_two)
_implement("bernoulli", _bernoulli, _fake_of_one)
_implement("poisson", _poisson, _fake_like)
_implement("gamma", _gamma, _fake_like)
_implement("dirichlet", _dirichlet, _fake_like)
_implement("binomial", _binomial, _fake_like)

draws = torch.ops.autoshard
