"""numba, with the settings that all loops of the room share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiles a loop at its first call, and keeps the machine code on disk for the next process."""
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
