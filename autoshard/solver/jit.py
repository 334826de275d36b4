"""Loops compiled by numba, in three ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Loop = TypeVar("Loop", bound=Callable[..., Any])

# Without the global interpreter lock, with NumPy's division by zero, and without a wrapper for C.
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def compiled_when_called(loop: Loop) -> Loop:
    """Compile a loop at its first call, and keep the machine code on disk for the next process.

    Other compiled loops can't call it.
    """

    @functools.cache
    def compile_loop() -> Callable[..., Any]:
        # Importing numba takes as long as some plans, and many plans need no loop.
        import numba

        return cast(Callable[..., Any], numba.njit(**_OPTIONS)(loop))

    @functools.wraps(loop)
    def call(*args: Any) -> Any:
        return compile_loop()(*args)

    return cast(Loop, call)


def jit(loop: Loop) -> Loop:
    """Compile a loop at its first call, and keep the machine code on disk; other compiled loops can call it.

    numba is imported at once, so import modules with such loops only when one of them is to run.
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
