"""Garbage collection that looks only at the objects that planning makes.

A captured step, and torch itself, are millions of objects that stay. To traverse them again each time that planning has
made many more would take a good part of the time of planning, and would find nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG_THRESHOLD = 10_000  # new objects between two collections of the youngest generation: most of them stay
_MIDDLE_THRESHOLD = 400  # collections of the youngest generation between two of the middle one


@contextlib.contextmanager
def freeze_older_objects() -> Iterator[None]:
    """Context whose collections of cycles, which are rarer, leave out the objects that existed before it.

    Nothing changes where objects are frozen already (`gc.freeze`), by an outer one of these contexts too, or where
    collections are rare already, or off.
    """
    young, middle, old = gc.get_threshold()
    # The threshold tells an inner context by itself: `get_freeze_count` counts all frozen objects one by one.
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
