"""Branch-and-bound search for the fastest of a few candidates that are slow to evaluate, with a verdict on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

SAME = 1 + 1e-9
"""Seconds within this factor are equal: the same sums, rounded in another order."""


@dataclass(slots=True, kw_only=True, eq=False)
class Candidate:
    """A candidate of a search.

    Attributes:
        least_seconds: lower bound of the seconds of a step.
        seconds: of the fastest step known; None before the candidate is evaluated.
        verdict: the reason why it is dropped; empty otherwise.
    """

    least_seconds: float
    seconds: float | None = None
    verdict: str = ""

    @property
    def step_seconds(self) -> float:
        """Seconds of the fastest step known, infinite where none is."""
        return math.inf if self.seconds is None else self.seconds


C = TypeVar("C", bound=Candidate)


class CandidateSearch(Generic[C]):
    """A search over candidates, the most promising first.

    Attributes:
        best: the candidate with the fastest step that is valid; None where there is none yet.
    """

    def __init__(self) -> None:
        self.best: C | None = None

    def evaluate_each(
        self, candidates: Iterable[C], drop_reason: Callable[[C], str | None], evaluate: Callable[[C], None]
    ) -> None:
        """Evaluate candidates in order, except those with a reason to drop them, which becomes their verdict.

        Args:
            candidates: the most promising first.
            drop_reason: returns why a candidate is not evaluated, given the results so far; None if it is.
            evaluate: sets the seconds of a candidate and `best`, or a verdict.
        """
        for candidate in candidates:
            candidate.verdict = drop_reason(candidate) or ""
            if not candidate.verdict:
                evaluate(candidate)

    def cannot_win(self, candidate: C, *, gain: float = 0.0, ties: bool = False) -> bool:
        """Return True if the lower bound of a candidate shows that it does not become the best.

        Args:
            candidate: the candidate.
            gain: the relative gain over the best that it has to reach.
            ties: True if a candidate that is as fast may become the best.
        """
        if self.best is None:
            return False
        limit = self.best.step_seconds * (1 - gain)
        return candidate.least_seconds > limit * SAME if ties else candidate.least_seconds * SAME >= limit

    def slower_text(self, candidate: C) -> str:
        """Return by how much an evaluated candidate is slower than the best."""
        assert self.best is not None, "there is a best candidate to compare with"
        return f"{candidate.step_seconds / self.best.step_seconds - 1:.1%} slower"
