"""Cycles that planning makes are freed while it runs; those of what was there before are freed later."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from autoshard.planner.gc_freeze import freeze_older_objects


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def _dropped() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


@pytest.fixture
def nothing_set_aside() -> Iterator[None]:
    """Nothing frozen, as in a user's process: the test session freezes all objects before its first test."""
    thresholds = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, *thresholds[1:])
    yield
    gc.set_threshold(*thresholds)
    gc.freeze()


def test_only_newer_cycles_are_freed_inside_and_older_ones_after(nothing_set_aside: None) -> None:
    thresholds = gc.get_threshold()
    older = _dropped()
    with freeze_older_objects():
        with freeze_older_objects():
            newer = _dropped()
        gc.collect()
        assert newer() is None
        assert older() is not None
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
    gc.collect()
    assert older() is None


def test_what_others_set_aside_stays_so() -> None:
    assert gc.get_freeze_count() > 0
    with freeze_older_objects():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0
