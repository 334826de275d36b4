"""Loops compiled by numba, in three ways, and the random numbers that they draw.

The state of the random numbers is one word: small to compile, and the same on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

Loop = TypeVar("Loop", bound=Callable[..., Any])

# Without the global interpreter lock, with NumPy's division by zero, and without a wrapper for C.
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def compiled_when_called(loop: Loop) -> Loop:
    """Compile a loop at its first call, and keep the machine code on disk for the next process.

    Other compiled loops can't call it.
    """

    @functools.cache
    def compile_loop() -> Callable[..., Any]:
        # Importing numba takes as long as many a plan, and many plans need no loop.
        import numba

        return cast(Callable[..., Any], numba.njit(cache=True)(loop))

    @functools.wraps(loop)
    def call(*args: Any) -> Any:
        return compile_loop()(*args)

    return cast(Loop, call)


def jit(loop: Loop) -> Loop:
    """Compile a loop at its first call, and keep the machine code on disk; other compiled loops can call it.

    numba is imported at once: modules with such loops are imported when one of them is to run.
    """
    return _compile(loop, _OPTIONS)


def jit_inner(loop: Loop) -> Loop:
    """Compile a loop that only other loops call, without the wrapper that unpacks Python's objects."""
    return _compile(loop, {"no_cpython_wrapper": True, **_OPTIONS})


def _compile(loop: Loop, options: dict[str, Any]) -> Loop:
    import numba

    # Its stubs know only some of its options.
    njit: Any = numba.njit
    return cast(Loop, njit(**options)(loop))


# The constants of SplitMix64, as 64-bit words: numba would turn a mix with Python's integers into floats.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def random_state(seed: int) -> npt.NDArray[np.uint64]:
    """Return a state for `draw`; other seeds give other streams."""
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
    """Return a whole number in [0, count)."""
    return int(draw(state) * count)
