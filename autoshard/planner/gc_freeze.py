"""Python's collector of cycles while a plan is made: it looks at what planning makes, not at all that was there before.

A captured step, and torch itself, are millions of objects that live on. To look through them all again each time that
planning has made many more would take as long as a good part of planning does, and would find nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG_THRESHOLD = 10_000
"""Objects that are made, and not yet gone, from one look through the youngest to the next, at least: planning keeps
most of what it makes."""

_MIDDLE_THRESHOLD = 400
"""Looks through the youngest from one look through those that have survived one to the next, at least."""


@contextlib.contextmanager
def freeze_older_objects() -> Iterator[None]:
    """Objects that are there now are not looked through for cycles until the end; later ones are, if less often.

    Where somebody has set objects aside already (`gc.freeze`), the outer one of two of these among them, nothing
    changes: they alone know when that ends. Nor does it where so few looks are asked for, or none at all: the outer one
    is told by that, since to count what is set aside takes as long as it is much.
    """
    young, middle, old = gc.get_threshold()
    if not 0 < young < _YOUNG_THRESHOLD or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD, max(middle, _MIDDLE_THRESHOLD), old)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()
