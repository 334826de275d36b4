"""Random numbers as functions of the step's seed: operators of the `autoshard` namespace.

What they give depends on the seed, the number of the operator in the program (`stream`) and the shard, and on
nothing else: replicas of a shard agree, different shards differ, and drawing again gives the same numbers. The device's
own generator is neither read nor moved.

A GPU's generator gives numbers that hang on its number of multiprocessors, too. Where torch has a stateless generator
for the device, uniform, normal, integer and Bernoulli numbers are drawn with that: unlike GPUs then agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.patterns._torch import has_philox, philox_normal_, philox_uniform_
from autoshard.patterns.exchanging import define_operator

_MASK = (1 << 64) - 1
_BLOCK = 1 << 24  # uniform numbers that are held at once where others are made of them: 64 MiB of float32

_STEP = "Tensor seed, int stream, Tensor? shard"


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


# Numbers with parameters that are numbers: operators `name(size, *parameters, seed, stream, shard, *, dtype, device)`.


def _is_stateless(values: Tensor) -> bool:
    """Return True if numbers that depend on a key alone can be drawn into a tensor."""
    return values.is_floating_point() and has_philox(values.device.type)


def _uniform(values: Tensor, key: int, low: float, high: float) -> Tensor:
    if _is_stateless(values):
        return philox_uniform_(values, key, 0, low, high)
    return values.uniform_(low, high, generator=_generator(key, values.device))


def _normal(values: Tensor, key: int, mean: float, std: float) -> Tensor:
    if _is_stateless(values):
        return philox_normal_(values, key, mean, std)
    return values.normal_(mean, std, generator=_generator(key, values.device))


def _integers(values: Tensor, key: int, low: int, high: int) -> Tensor:
    if not has_philox(values.device.type):
        return values.random_(low, high, generator=_generator(key, values.device))
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


def _bernoulli(values: Tensor, key: int, p: float) -> Tensor:
    if not has_philox(values.device.type):
        return values.bernoulli_(p, generator=_generator(key, values.device))
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


def _define_fill(name: str, parameters: str, fill: Callable[..., Tensor]) -> None:
    """Define an operator that draws by filling a new tensor: `fill(values, key, *parameters)`."""

    def draw(size: Sequence[int], *arguments: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        *parameters, seed, stream, shard = arguments
        return fill(torch.empty(size, dtype=dtype, device=device), _key(seed, stream, shard), *parameters)

    def shapes(size: Sequence[int], *_: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    arguments = f"SymInt[] size, {parameters}, {_STEP}, *, ScalarType dtype, Device device"
    define_operator(f"{name}({arguments}) -> Tensor", draw, shapes)


_define_fill("uniform", "float low, float high", _uniform)
_define_fill("normal", "float mean, float std", _normal)
_define_fill("integers", "int low, int high", _integers)
_define_fill("bernoulli", "float p", _bernoulli)


# Numbers with tensors as parameters, of the shape of the first: operators `name(*parameters, seed, stream, shard)`.


def _define_sample(name: str, parameters: str, sample: Callable[..., Tensor]) -> None:
    """Define an operator that draws by a kernel of torch: `sample(*parameters, generator)`."""

    def draw(*arguments: Any) -> Tensor:
        *parameters, seed, stream, shard = arguments
        return sample(*parameters, generator(seed, stream, shard, parameters[0].device))

    define_operator(f"{name}({parameters}, {_STEP}) -> Tensor", draw, _shape_of_first)


def _shape_of_first(parameter: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(parameter)


_define_sample("poisson", "Tensor rate", torch.poisson)
_define_sample("gamma", "Tensor concentration", torch.ops.aten._standard_gamma)
_define_sample("dirichlet", "Tensor concentration", torch.ops.aten._sample_dirichlet)
_define_sample("binomial", "Tensor count, Tensor probability", torch.binomial)


def _key_tensor(seed: Tensor, stream: int, shard: Tensor | None) -> Tensor:
    """A seed of one shard of one random operator: a 0-d tensor on the host, no negative number."""
    return torch.full((), _key(seed, stream, shard) >> 1, dtype=torch.int64, device="cpu")


define_operator(f"key({_STEP}) -> Tensor", _key_tensor, _shape_of_first)

draws = torch.ops.autoshard
