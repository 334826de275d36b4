"""The loop of message passing: a bound that rises with every pass, and the best rounded choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf, isfinite
from typing import Self

from autoshard.solver.chains import Chains
from autoshard.solver.problem import IntArray
from autoshard.solver.solver_budget import UNLIMITED, Budget

_PATIENCE = 20
"""Default number of iterations over which progress is measured."""

_MIN_PROGRESS = 0.05
"""Share of the gap between the least known cost and the bound that these iterations must close to continue. With 0.02,
the planner's problems take 5 % longer for bounds that are at most 0.1 % higher."""

_CLOSED = 1e-9
"""Relative gap between the least known cost and the bound at which the search is complete."""


class Ascent(ABC):
    """Resumable message passing; its results are valid at any time, even after Ctrl-C.

    Args:
        chains: the messages.
        period: iterations from one rounded choice to the next.
        work: units of work of an iteration.

    Attributes:
        bound: no choice costs less.
        best: the best rounded choice; None before one was allowed.
        cost: of that choice; `inf` without one. If it is set lower, only cheaper choices are kept.
        iterations: forward and backward passes so far.
    """

    def __init__(self, chains: Chains, *, period: int, work: int) -> None:
        self.chains = chains
        self.bound = -inf
        self.best: IntArray | None = None
        self.cost = inf
        self.iterations = 0
        self._period = period
        self._work = work

    @property
    def gap(self) -> float:
        """Relative gap between the cost and the bound; `inf` without a choice."""
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300) if self.best is not None else inf

    @abstractmethod
    def _pass(self) -> float:
        """Run a forward and a backward pass, and return the bound."""

    @abstractmethod
    def _evaluate(self, places: IntArray) -> float:
        """Return the cost of a choice; `inf` if it is not allowed."""

    def iterate(self) -> None:
        """Run a forward and a backward pass."""
        # In exact arithmetic no pass lowers the bound at the same costs; the maximum guards against rounding.
        self.bound = max(self.bound, self._pass())
        self.iterations += 1

    def run(
        self,
        iterations: int,
        *,
        upper: float = inf,
        close: float = 0.0,
        patience: int = _PATIENCE,
        budget: Budget = UNLIMITED,
        progress: Callable[[float, float], None] | None = None,
    ) -> Self:
        """Run forward and backward passes, and return this object.

        Args:
            iterations: at most.
            upper: a known cost: the search ends when the bound reaches it, or hardly approaches it.
            close: relative gap between the least known cost and the bound at which the search ends.
            patience: iterations in which this gap must close by a twentieth.
            budget: no iteration but the very first starts after its end.
            progress: called now and then with the least cost and the highest bound so far.
        """
        gaps: list[float] = []
        # Progress counts what this run finds: a better choice from an earlier run would end it too soon.
        found = inf
        for number in range(1, iterations + 1):
            target = min(upper, self.cost)
            is_closed = self.bound >= target - max(close, _CLOSED) * abs(target)
            if self.iterations and (is_closed or budget.is_over):
                break
            self.iterate()
            budget.spend(self._work)
            # The first rounded choices are seldom better than a known one.
            early = isfinite(upper) and number < self._period
            if not early and ((number - 1) % self._period == 0 or number == iterations):
                found = min(found, self._round())
                if progress is not None:
                    progress(self.cost, self.bound)
            gaps.append(min(upper, found) - self.bound)
            if len(gaps) > patience and gaps[-1] > (1.0 - _MIN_PROGRESS) * gaps[-1 - patience]:
                break
        return self

    def _round(self) -> float:
        places = self.chains.round()
        cost = self._evaluate(places)
        if cost < self.cost:
            self.cost, self.best = cost, places
        return cost
