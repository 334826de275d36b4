"""Loops compiled by numba. Importing numba takes as long as many a plan, so the first call imports it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled_when_called(loop: Loop) -> Loop:
    """Compile a loop at its first call, and keep the machine code on disk for the next process.

    Other compiled loops can't call it.
    """

    @functools.cache
    def compile_loop() -> Callable[..., Any]:
        import numba

        return cast(Callable[..., Any], numba.njit(cache=True)(loop))

    @functools.wraps(loop)
    def call(*args: Any) -> Any:
        return compile_loop()(*args)

    return cast(Loop, call)
