"""The course of one solve: how long it may go on, what is known so far, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from time import monotonic


@dataclass(frozen=True, slots=True)
class Progress:
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


class Course:
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
        tell: Callable[[Progress], object] | None = None,
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
        self._tell = tell
        self._best: Callable[[], Assignment] = tuple

    @property
    def counted(self) -> bool:
        """Whether work is what limits the solve, so that nothing may depend on the clock."""
        return self._limit is not None

    @property
    def remaining(self) -> float:
        """Work that may still be done; `inf` where time is what limits the solve."""
        return float("inf") if self._limit is None else float(self._limit - self._work)

    @property
    def over(self) -> bool:
        """Whether the time or the work is used up, or the bound close to the cost."""
        return self.remaining <= 0 or monotonic() > self.deadline or self.close(self.cost, self.lower_bound)

    def close(self, cost: float, bound: float) -> bool:
        """Return whether a bound is as close to a cost as is asked for."""
        return isfinite(cost) and bound >= cost - self.gap * abs(cost)

    @property
    def assignment(self) -> Assignment:
        """The best feasible assignment; empty where none is known."""
        return self._best()

    def spend(self, work: float) -> None:
        """Counts work that was done."""
        self._work += int(work)

    def share(self, fraction: float) -> float:
        """The `monotonic` moment at which a fraction of the remaining time has passed; where work is counted, the end
        of the time, or at once if the work is used up. At once, too, where the bound is close to the cost."""
        if self.close(self.cost, self.lower_bound):
            return float("-inf")
        if self.counted:
            return self.deadline if self.remaining > 0 else float("-inf")
        now = monotonic()
        return now + fraction * max(self.deadline - now, 0.0)

    def stretch(self, fraction: float) -> Stretch:
        """What one step may take: a fraction of the time that remains, and the work that does."""
        return Stretch(self.share(fraction), self)

    def offer(self, cost: float, assignment: Callable[[], Assignment], method: str) -> bool:
        """Notes a feasible assignment, which is only made when it is asked for, if it is the best so far."""
        if not cost < self.cost:
            return False
        self.cost, self._best, self.method = cost, assignment, method
        return True

    def bound(self, value: float) -> None:
        """Notes a lower bound."""
        self.lower_bound = max(self.lower_bound, value)

    def note(self, phase: str) -> None:
        """Tells how far the solve has come."""
        if self._tell is not None:
            self._tell(Progress(phase, self.cost, min(self.lower_bound, self.cost), monotonic() - self.start))


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a solve, as the loops see it that must end with it.

    Attributes:
        deadline: `time.monotonic()` seconds.
        course: the solve whose work this is; None where nobody counts it.
    """

    deadline: float = float("inf")
    course: Course | None = None

    @property
    def over(self) -> bool:
        """Whether no further step may start."""
        return monotonic() > self.deadline or (self.course is not None and self.course.over)

    def close(self, cost: float, bound: float) -> bool:
        """Return whether a bound is as close to a cost as the solve asks for."""
        return self.course is not None and self.course.close(cost, bound)

    def spend(self, work: float) -> None:
        """Counts work that was done."""
        if self.course is not None:
            self.course.spend(work)


ENDLESS = Stretch()
"""No end."""
