"""The budget of one solve: time, work and gap, the best assignment and bound so far, and reports of progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from time import monotonic


@dataclass(frozen=True, slots=True)
class SolverProgress:
    """A report of a solve.

    Attributes:
        phase: the step that has just ended.
        cost: of the best feasible assignment known; `inf` without one.
        lower_bound: no feasible assignment costs less, as far as known; `-inf` if nothing is known.
        seconds: wall-clock time since the solve began.
    """

    phase: str
    cost: float
    lower_bound: float
    seconds: float


Assignment = tuple[int, ...]


class Budget:
    """The remaining time and work of a solve, and its best results.

    Args:
        time_limit: seconds.
        work_limit: units of work (about one table entry read); None for no limit.
        tell: called with every `SolverProgress`.
        gap: relative difference of cost and bound at which the solve ends.
    """

    def __init__(
        self,
        time_limit: float,
        work_limit: int | None = None,
        tell: Callable[[SolverProgress], object] | None = None,
        gap: float = 0.0,
    ) -> None:
        self.start = monotonic()
        self.deadline = self.start + time_limit
        self.cost = float("inf")
        self.lower_bound = float("-inf")
        self.method = ""
        self.gap = gap
        self._limit = work_limit
        self._work = 0
        self._report = tell
        self._best: Callable[[], Assignment] = tuple

    @property
    def has_work_limit(self) -> bool:
        """True if work limits the solve, so that nothing may depend on the clock."""
        return self._limit is not None

    @property
    def remaining(self) -> float:
        """Remaining work; `inf` if time limits the solve."""
        return float("inf") if self._limit is None else float(self._limit - self._work)

    @property
    def is_over(self) -> bool:
        """True if the time or the work is used up, or the bound is close to the cost."""
        return self.remaining <= 0 or monotonic() > self.deadline or self.is_close(self.cost, self.lower_bound)

    def is_close(self, cost: float, bound: float) -> bool:
        """Return True if a bound is within the gap of a cost."""
        return isfinite(cost) and bound >= cost - self.gap * abs(cost)

    @property
    def assignment(self) -> Assignment:
        """The best feasible assignment; empty where none is known."""
        return self._best()

    def spend(self, work: float) -> None:
        """Count work that was done."""
        self._work += int(work)

    def deadline_after(self, fraction: float) -> float:
        """Return the `monotonic` moment at which a fraction of the remaining time has passed.

        With a work limit, this is the end of the time. It is `-inf` if the work is used up or the bound is close to the
        cost.
        """
        if self.is_close(self.cost, self.lower_bound):
            return float("-inf")
        # Fractions of the time would make the result depend on the speed of the machine.
        if self.has_work_limit:
            return self.deadline if self.remaining > 0 else float("-inf")
        now = monotonic()
        return now + fraction * max(self.deadline - now, 0.0)

    def for_step(self, fraction: float) -> StepBudget:
        """Return the budget of one step: a fraction of the remaining time, and all the remaining work."""
        return StepBudget(self.deadline_after(fraction), self)

    def offer(self, cost: float, assignment: Callable[[], Assignment], method: str) -> bool:
        """Record a feasible assignment if it is the best so far; it is computed only when read."""
        if not cost < self.cost:
            return False
        # In one statement, so that Ctrl-C finds the cost and the assignment of one offer.
        self.cost, self._best, self.method = cost, assignment, method
        return True

    def raise_bound(self, value: float) -> None:
        """Record a lower bound."""
        self.lower_bound = max(self.lower_bound, value)

    def report(self, phase: str) -> None:
        """Report the progress of the solve."""
        if self._report is not None:
            self._report(SolverProgress(phase, self.cost, min(self.lower_bound, self.cost), monotonic() - self.start))


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The budget of a part of a solve.

    Attributes:
        deadline: `time.monotonic()` seconds.
        budget: the budget of the whole solve; None where nobody counts the work.
    """

    deadline: float = float("inf")
    budget: Budget | None = None

    @property
    def is_over(self) -> bool:
        """True if no further step may start."""
        return monotonic() > self.deadline or (self.budget is not None and self.budget.is_over)

    def is_close(self, cost: float, bound: float) -> bool:
        """Return True if a bound is within the gap that ends the solve."""
        return self.budget is not None and self.budget.is_close(cost, bound)

    def spend(self, work: float) -> None:
        """Count work that was done."""
        if self.budget is not None:
            self.budget.spend(work)


UNLIMITED = StepBudget()
"""A budget without end."""
