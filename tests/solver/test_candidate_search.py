"""The bounded search of candidates: its order, what it drops, and its comparisons with the best."""

from __future__ import annotations

import pytest

from autoshard.solver.candidate_search import Candidate, CandidateSearch


def test_candidates_are_evaluated_in_order_until_their_bounds_show_that_they_lose() -> None:
    search = CandidateSearch[Candidate]()
    evaluated: list[float] = []

    def evaluate(candidate: Candidate) -> None:
        evaluated.append(candidate.least_seconds)
        candidate.seconds = candidate.least_seconds + 1
        if candidate.step_seconds < (search.best or Candidate(least_seconds=0.0)).step_seconds:
            search.best = candidate

    candidates = [Candidate(least_seconds=bound, verdict="stale") for bound in (1.0, 1.5, 2.0, 3.0)]
    search.evaluate_each(candidates, lambda one: "it cannot win" if search.cannot_win(one) else None, evaluate)
    assert evaluated == [1.0, 1.5]
    assert search.best is candidates[0]
    assert [candidate.verdict for candidate in candidates] == ["", "", "it cannot win", "it cannot win"]
    assert [candidate.seconds for candidate in candidates] == [2.0, 2.5, None, None]
    assert search.slower_text(candidates[1]) == "25.0% slower"


@pytest.mark.parametrize(
    ("bound", "gain", "ties", "loses"),
    [
        (1.0, 0.0, False, True),
        (1.0, 0.0, True, False),
        (1 / (1 + 1e-10), 0.0, False, True),
        (1 + 1e-10, 0.0, True, False),
        (1.01, 0.0, True, True),
        (0.985, 0.01, True, False),
        (0.995, 0.01, True, True),
    ],
)
def test_a_bound_is_compared_with_the_best(bound: float, gain: float, ties: bool, loses: bool) -> None:
    search = CandidateSearch[Candidate]()
    candidate = Candidate(least_seconds=bound)
    assert not search.cannot_win(candidate, gain=gain, ties=ties)
    search.best = Candidate(least_seconds=0.5, seconds=1.0)
    assert search.cannot_win(candidate, gain=gain, ties=ties) == loses
