from __future__ import annotations

from autoshard.selfcheck.step_profile import _overlap_length, _union


def test_spans_that_overlap_are_united() -> None:
    assert _union([(4, 6), (0, 2), (1, 3), (5, 5.5)]) == [(0, 3), (4, 6)]


def test_what_is_hidden_is_what_both_cover() -> None:
    communication, compute = _union([(0, 4), (10, 12)]), _union([(1, 2), (3, 5), (11, 20)])
    assert _overlap_length(communication, compute) == 1 + 1 + 1
    assert _overlap_length(communication, []) == 0
