"""The course of one solve: how long it may go on, what is known so far, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from time import monotonic


@dataclass(frozen=True, slots=True)
class SolverProgress:
    """A moment of a solve.

    Attributes:
        phase: what has just been done.
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
    """What a solve may still do, and the best that it has found.

    Args:
        time_limit: seconds.
        work_limit: units of work (about one entry of a table looked at); None for no limit.
        tell: called with every `Progress`.
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
        """Whether work is what limits the solve, so that nothing may depend on the clock."""
        return self._limit is not None

    @property
    def remaining(self) -> float:
        """Work that may still be done; `inf` where time is what limits the solve."""
        return float("inf") if self._limit is None else float(self._limit - self._work)

    @property
    def is_over(self) -> bool:
        """Whether the time or the work is used up, or the bound close to the cost."""
        return self.remaining <= 0 or monotonic() > self.deadline or self.is_close(self.cost, self.lower_bound)

    def is_close(self, cost: float, bound: float) -> bool:
        """Return whether a bound is as close to a cost as is asked for."""
        return isfinite(cost) and bound >= cost - self.gap * abs(cost)

    @property
    def assignment(self) -> Assignment:
        """The best feasible assignment; empty where none is known."""
        return self._best()

    def spend(self, work: float) -> None:
        """Counts work that was done."""
        self._work += int(work)

    def deadline_after(self, fraction: float) -> float:
        """The `monotonic` moment at which a fraction of the remaining time has passed; where work is counted, the end
        of the time, or at once if the work is used up. At once, too, where the bound is close to the cost."""
        if self.is_close(self.cost, self.lower_bound):
            return float("-inf")
        if self.has_work_limit:
            return self.deadline if self.remaining > 0 else float("-inf")
        now = monotonic()
        return now + fraction * max(self.deadline - now, 0.0)

    def for_step(self, fraction: float) -> StepBudget:
        """What one step may take: a fraction of the time that remains, and the work that does."""
        return StepBudget(self.deadline_after(fraction), self)

    def offer(self, cost: float, assignment: Callable[[], Assignment], method: str) -> bool:
        """Notes a feasible assignment, which is only made when it is asked for, if it is the best so far."""
        if not cost < self.cost:
            return False
        self.cost, self._best, self.method = cost, assignment, method
        return True

    def raise_bound(self, value: float) -> None:
        """Notes a lower bound."""
        self.lower_bound = max(self.lower_bound, value)

    def report(self, phase: str) -> None:
        """Tells how far the solve has come."""
        if self._report is not None:
            self._report(SolverProgress(phase, self.cost, min(self.lower_bound, self.cost), monotonic() - self.start))


@dataclass(frozen=True, slots=True)
class StepBudget:
    """A part of a solve, as the loops see it that must end with it.

    Attributes:
        deadline: `time.monotonic()` seconds.
        course: the solve whose work this is; None where nobody counts it.
    """

    deadline: float = float("inf")
    budget: Budget | None = None

    @property
    def is_over(self) -> bool:
        """Whether no further step may start."""
        return monotonic() > self.deadline or (self.budget is not None and self.budget.is_over)

    def is_close(self, cost: float, bound: float) -> bool:
        """Return whether a bound is as close to a cost as the solve asks for."""
        return self.budget is not None and self.budget.is_close(cost, bound)

    def spend(self, work: float) -> None:
        """Counts work that was done."""
        if self.budget is not None:
            self.budget.spend(work)


UNLIMITED = StepBudget()
"""No end."""
