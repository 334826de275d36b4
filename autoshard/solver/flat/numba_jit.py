"""numba, with the settings that all loops of the room share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


# Its stubs know only some of its options.
_jit: Any = numba.njit
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def jit(function: F) -> F:
    """Compile a loop at its first call, and keep the machine code on disk for the next process."""
    return cast(F, _jit(**_OPTIONS)(function))


def jit_inner(function: F) -> F:
    """Compile a loop that only other loops call, without the wrapper that unpacks Python's objects."""
    return cast(F, _jit(no_cpython_wrapper=True, **_OPTIONS)(function))
