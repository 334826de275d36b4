from __future__ import annotations

from autoshard.selfcheck.step_profile import _common, _union


def test_spans_that_overlap_are_united() -> None:
    assert _union([(4, 6), (0, 2), (1, 3), (5, 5.5)]) == [(0, 3), (4, 6)]


def test_what_is_hidden_is_what_both_cover() -> None:
    communication, compute = _union([(0, 4), (10, 12)]), _union([(1, 2), (3, 5), (11, 20)])
    assert _common(communication, compute) == 1 + 1 + 1
    assert _common(communication, []) == 0
