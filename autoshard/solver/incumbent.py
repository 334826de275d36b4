"""The best assignment and the best bound of a solve so far, and reports of progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from autoshard.solver.solver_budget import Budget

Assignment = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SolverProgress:
    """A report of a solve.

    Attributes:
        phase: the step that has just ended.
        cost: of the best feasible assignment known; `inf` without one.
        lower_bound: a known lower bound of the cost of every feasible assignment; `-inf` if none is known.
        seconds: wall-clock time since the solve began.
    """

    phase: str
    cost: float
    lower_bound: float
    seconds: float


class Incumbent:
    """The best results of a solve; stops the budget once cost and bound are within its gap.

    Args:
        budget: of the solve.
        tell: called with every `SolverProgress`.

    Attributes:
        cost: of the best assignment; `inf` without one.
        lower_bound: the highest bound; `-inf` without one.
        method: the method that found the assignment.
    """

    def __init__(self, budget: Budget, tell: Callable[[SolverProgress], object] | None = None) -> None:
        self.budget = budget
        self.cost = float("inf")
        self.lower_bound = float("-inf")
        self.method = ""
        self._start = monotonic()
        self._report = tell
        self._best: Callable[[], Assignment] = tuple

    @property
    def assignment(self) -> Assignment:
        """The best feasible assignment; empty where none is known."""
        return self._best()

    @property
    def seconds(self) -> float:
        """Wall-clock time since the solve began."""
        return monotonic() - self._start

    def offer(self, cost: float, assignment: Callable[[], Assignment], method: str) -> bool:
        """Record a feasible assignment if it is the best so far; it is computed only when read."""
        if not cost < self.cost:
            return False
        # In one statement, so that cost and assignment match after Ctrl-C.
        self.cost, self._best, self.method = cost, assignment, method
        self._stop_if_close()
        return True

    def raise_bound(self, value: float) -> None:
        """Record a lower bound."""
        self.lower_bound = max(self.lower_bound, value)
        self._stop_if_close()

    def _stop_if_close(self) -> None:
        if self.budget.is_close(self.cost, self.lower_bound):
            self.budget.stop()

    def report(self, phase: str) -> None:
        """Report the progress of the solve."""
        if self._report is not None:
            self._report(SolverProgress(phase, self.cost, min(self.lower_bound, self.cost), self.seconds))
