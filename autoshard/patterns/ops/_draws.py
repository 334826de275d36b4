"""Random numbers as functions of the step's seed: operators of the `autoshard` namespace.

What they give depends on the seed, the number of the operator in the program (`stream`) and the shard, and on
nothing else: replicas of a shard agree, different shards differ, and drawing again gives the same numbers. The device's
own generator is neither read nor moved.

A GPU's generator gives numbers that hang on its number of multiprocessors, too. Where torch has a stateless generator
for the device, uniform, normal, integer and Bernoulli numbers are drawn with that: unlike GPUs then agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from autoshard.patterns._torch import has_philox, philox_normal_, philox_uniform_

_MASK = (1 << 64) - 1
_BLOCK = 1 << 24  # uniform numbers that are held at once where others are made of them: 64 MiB of float32

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
_library.define(f"key({_STEP}) -> Tensor")
_library.define(f"binomial(Tensor count, Tensor probability, {_STEP}) -> Tensor")


def _splitmix64(value: int) -> int:
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
    return _generator(_key(seed, stream, shard), device)


def _key(seed: Tensor, stream: int, shard: Tensor | None) -> int:
    """A 64-bit number of one shard of one random operator in one step."""
    index = 0 if shard is None else int(shard) + 1
    return _splitmix64(_splitmix64(_splitmix64(int(seed) & _MASK) ^ stream) ^ index)


def _generator(key: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(key)


def _is_stateless(values: Tensor) -> bool:
    """Return True if numbers that depend on a key alone can be drawn into a tensor."""
    return values.is_floating_point() and has_philox(values.device.type)


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
    values, key = torch.empty(size, dtype=dtype, device=device), _key(seed, stream, shard)
    if _is_stateless(values):
        return philox_uniform_(values, key, 0, low, high)
    return values.uniform_(low, high, generator=_generator(key, device))


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
    values, key = torch.empty(size, dtype=dtype, device=device), _key(seed, stream, shard)
    if _is_stateless(values):
        return philox_normal_(values, key, mean, std)
    return values.normal_(mean, std, generator=_generator(key, device))


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
    values, key = torch.empty(size, dtype=dtype, device=device), _key(seed, stream, shard)
    if not has_philox(values.device.type):
        return values.random_(low, high, generator=_generator(key, device))
    width = high - low
    for offset, block in _blocks(values):
        if width > 1 << 53:  # more than a float64 tells apart: 31 bits and 32 bits
            drawn = _integers_below(block, key, offset, 1 << 31) << 32 | _integers_below(
                block, _splitmix64(key), offset, 1 << 32
            )
            drawn = drawn if width >= 1 << 63 else drawn.remainder_(width)
        else:
            drawn = _integers_below(block, key, offset, width)
        block.copy_(drawn.add_(low))
    return values


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
    values, key = torch.empty(size, dtype=dtype, device=device), _key(seed, stream, shard)
    if not has_philox(values.device.type):
        return values.bernoulli_(p, generator=_generator(key, device))
    for offset, block in _blocks(values):
        block.copy_(_fractions(block, key, offset, torch.float32) < p)
    return values


def _blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Parts of a contiguous tensor that are no longer than a block, each with the place where it begins."""
    return ((number * _BLOCK, block) for number, block in enumerate(values.view(-1).split(_BLOCK)))


def _fractions(block: Tensor, key: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1), as many as a block has."""
    return philox_uniform_(torch.empty(block.shape, dtype=dtype, device=block.device), key, offset, 0.0, 1.0)


def _integers_below(block: Tensor, key: int, offset: int, width: int) -> Tensor:
    """Integers from 0 to `width` - 1, at most 2**53 of them, as many as a block has."""
    return _fractions(block, key, offset, torch.float64).mul_(width).to(torch.int64)


def _poisson(rate: Tensor, seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    return torch.poisson(rate, generator(seed, stream, shard, rate.device))


def _gamma(concentration: Tensor, seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    return torch.ops.aten._standard_gamma(concentration, generator(seed, stream, shard, concentration.device))


def _dirichlet(concentration: Tensor, seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    return torch.ops.aten._sample_dirichlet(concentration, generator(seed, stream, shard, concentration.device))


def _binomial(count: Tensor, probability: Tensor, seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    return torch.binomial(count, probability, generator(seed, stream, shard, count.device))


def _key_tensor(seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    """A seed of one shard of one random operator: a 0-d tensor on the host, no negative number."""
    return torch.full((), _key(seed, stream, shard) >> 1, dtype=torch.int64, device="cpu")


def _fake_like(parameter: Tensor, *_: object) -> Tensor:
    return torch.empty_like(parameter)


def _fake_two_parameters(
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


def _fake_one_parameter(
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


_implement("uniform", _uniform, _fake_two_parameters)
_implement("normal", _normal, _fake_two_parameters)
_implement("integers", _integers, _fake_two_parameters)
_implement("bernoulli", _bernoulli, _fake_one_parameter)
_implement("poisson", _poisson, _fake_like)
_implement("gamma", _gamma, _fake_like)
_implement("dirichlet", _dirichlet, _fake_like)
_implement("key", _key_tensor, _fake_like)
_implement("binomial", _binomial, _fake_like)

draws = torch.ops.autoshard
