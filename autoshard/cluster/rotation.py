"""Work that is timed again and again, as it meets its data in a step: hardly an operand is in a cache."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

_COPIES = 8  # of what the work is done on
_COPY_BYTES = 2**26  # bytes that these may take together


class Rotation:
    """Copies of some work in turn, whose last results are kept: memory is as cold as in a step, and as new.

    Args:
        make: another copy of the work, on data of its own.
        bytes: what a copy reads and makes.
    """

    def __init__(self, make: Callable[[], Callable[[], Any]], bytes: float) -> None:
        copies = max(1, min(_COPIES, int(_COPY_BYTES // bytes)))
        self._works = itertools.cycle([make() for _ in range(copies)])
        self._kept: deque[Any] = deque(maxlen=copies)

    def __call__(self) -> None:
        self._kept.append(next(self._works)())
