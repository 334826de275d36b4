"""The budget of a search: work, seconds, and Ctrl-C. Every loop of the solver checks it before its next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, isfinite
from time import monotonic


class Budget:
    """The remaining work and time of a search.

    Args:
        deadline: `time.monotonic()` seconds after which no further step starts.
        work_limit: units of work (about one table entry read); None for no limit.
        gap: relative difference of cost and bound at which the search ends.
        whole: the budget that this one is a part of: its end ends the part, and it counts the part's work, too.

    Attributes:
        interrupted: True after a Ctrl-C within `interruptible`.
    """

    def __init__(
        self,
        deadline: float = inf,
        *,
        work_limit: int | None = None,
        gap: float = 0.0,
        whole: Budget | None = None,
    ) -> None:
        self.deadline = deadline
        self.gap = gap
        self.interrupted = False
        self._whole = whole
        self._remaining = work_limit

    @classmethod
    def of_seconds(cls, seconds: float, *, work_limit: int | None = None, gap: float = 0.0) -> Budget:
        """Return a budget that ends in `seconds`."""
        return cls(monotonic() + seconds, work_limit=work_limit, gap=gap)

    @property
    def work(self) -> float:
        """Remaining work; `inf` without a limit."""
        whole = inf if self._whole is None else self._whole.work
        return whole if self._remaining is None else min(whole, self._remaining)

    @property
    def seconds(self) -> float:
        """Remaining time, at least 0."""
        return max(0.0, self.deadline - monotonic())

    @property
    def is_over(self) -> bool:
        """True if no further step may start."""
        return monotonic() > self.deadline or self.work <= 0 or (self._whole is not None and self._whole.is_over)

    def is_close(self, cost: float, bound: float) -> bool:
        """Return True if a bound is within the gap of a cost."""
        return isfinite(cost) and bound >= cost - self.gap * abs(cost)

    def spend(self, work: float) -> None:
        """Count work that was done."""
        if self._remaining is not None:
            self._remaining -= int(work)
        if self._whole is not None:
            self._whole.spend(work)

    def stop(self) -> None:
        """End the search, and all parts of it."""
        self.deadline = -inf

    def part(self, fraction: float, *, work_limit: int | None = None) -> Budget:
        """Return the budget of one step: a fraction of the remaining time, and all the remaining work.

        With a limit on work, all the remaining time: fractions of it would make the result depend on the speed of the
        machine.
        """
        deadline = self.deadline
        if isfinite(deadline) and not isfinite(self.work):
            deadline = monotonic() + fraction * self.seconds
        return Budget(deadline, work_limit=work_limit, gap=self.gap, whole=self)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """End the block, and the search, at Ctrl-C instead of raising `KeyboardInterrupt`."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupt()

    def interrupt(self) -> None:
        """End the search as Ctrl-C does."""
        self.interrupted = True
        self.stop()


UNLIMITED = Budget()
"""A budget without end."""
