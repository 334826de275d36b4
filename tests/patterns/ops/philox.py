"""Torch's stateless generator for the CPU, which has none of its own: Philox4x32-10 in plain integers.

Torch draws element i of a key (seed, offset) from the counter offset + i // 4, of float64 offset + i // 2, and never
from another subsequence, so that numbers hang on nothing but key and place.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tests.releases import skip

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds on `[count, 4]` counters of 32-bit words, which are held as uint64."""
    a, b, c, d = counter.astype(np.uint64).T
    for number in range(10):
        first, second = (np.uint64((one + number * step) % (1 << 32)) for one, step in zip(key, _WEYL, strict=True))
        p, q = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (q >> _WORD) ^ b ^ first, q & _LOW, (p >> _WORD) ^ d ^ second, p & _LOW
    return np.stack([a, b, c, d], axis=1)


def _words(count: int, key: torch.Tensor) -> np.ndarray:
    """The first `count` blocks of four words of a key."""
    seed, offset = (int(number) % (1 << 64) for number in key.view(torch.int64))
    places = np.arange(count, dtype=np.uint64) + np.uint64(offset)
    zero = np.zeros_like(places)
    return philox(np.stack([places & _LOW, places >> _WORD, zero, zero], axis=1), (seed % (1 << 32), seed >> 32))


def uniform(count: int, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in [0, 1): of 24 random bits, or 53 for float64."""
    if dtype == torch.float64:
        words = _words(-(-count // 2), key).reshape(-1, 2)
        bits = (words[:, 0] << _WORD | words[:, 1]) >> np.uint64(11)
        return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)[:count]
    words = _words(-(-count // 4), key).reshape(-1)
    return torch.from_numpy((words >> np.uint64(8)).astype(np.float64) * 2.0**-24)[:count].to(dtype)


def _uniform_(values: torch.Tensor, key: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    drawn = uniform(values.numel(), key, values.dtype)
    return values.copy_((drawn * (high - low) + low).view(values.shape))


def _normal_(values: torch.Tensor, key: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Box and Muller's transform, of pairs."""
    pairs = 1.0 - uniform(2 * values.numel(), key, torch.float64).view(-1, 2)
    drawn = (-2 * pairs[:, 0].log()).sqrt() * (2 * torch.pi * pairs[:, 1]).cos()
    return values.copy_((drawn * std + mean).view(values.shape))


@contextmanager
def stateless_cpu() -> Iterator[None]:
    """Context in which torch has its stateless generator for the CPU; the test is skipped where torch has none."""
    if not hasattr(torch.ops.aten, "_philox_uniform_"):
        skip("a stateless generator")
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_philox_uniform_", _uniform_, "CPU")
        library.impl("_philox_normal_", _normal_, "CPU")
        yield
    finally:
        library._destroy()
