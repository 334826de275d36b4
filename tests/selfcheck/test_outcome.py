from __future__ import annotations

import json

from autoshard.selfcheck.outcome import CheckOutcome, worst_outcome


def test_the_worst_verdict_stands_for_all_ranks() -> None:
    outcomes = [
        CheckOutcome("ok", "a", ratio=0.1),
        CheckOutcome("slow", "b", ratio=2.0),
        CheckOutcome("slow", "c", ratio=3.0),
    ]
    assert worst_outcome(outcomes).figure == "c"


def test_a_wrong_rank_is_named() -> None:
    assert worst_outcome([CheckOutcome("ok", "a"), CheckOutcome("wrong", "b")]).figure == "rank 1: b"
    assert worst_outcome([CheckOutcome("wrong", "b")]).figure == "b"


def test_the_first_failure_counts_and_not_what_it_caused() -> None:
    outcomes = [CheckOutcome("wrong", "timed out", failure=2), CheckOutcome("wrong", "cause", failure=1)]
    assert worst_outcome(outcomes).figure == "rank 1: cause"


def test_an_outcome_goes_to_other_ranks_as_text() -> None:
    outcome = CheckOutcome("wrong", "figure", "advice", {"float32": float("inf")}, float("inf"), 1)
    assert CheckOutcome(**json.loads(outcome.to_json())) == outcome
