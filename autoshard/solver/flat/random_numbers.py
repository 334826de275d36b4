"""Random numbers for compiled loops, with a state of one word: small to compile, and the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autoshard.solver.jit import jit_inner

# The constants of SplitMix64, as uint64: numba would convert a mix with Python's integers to floats.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def random_state(seed: int) -> npt.NDArray[np.uint64]:
    """Return a state for `draw`; different seeds give different streams."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64).astype(np.uint64)


@jit_inner
def draw(state):  # type: ignore[no-untyped-def]
    """Return a number in [0, 1).

    Source: SplitMix64, G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    state[0] += _STEP
    word = state[0]
    word = (word ^ (word >> _30)) * _FIRST
    word = (word ^ (word >> _27)) * _SECOND
    return ((word ^ (word >> _31)) >> _11) * 2.0**-53


@jit_inner
def pick(state, count):  # type: ignore[no-untyped-def]
    """Return an integer in [0, count)."""
    return int(draw(state) * count)
