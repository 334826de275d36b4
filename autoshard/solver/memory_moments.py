"""Memory over time: the moments at which the limit can bind, and the price of memory over a life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Array, IntArray, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The moments with maximal sets of live nodes: a limit respected at these is respected always.

    Attributes:
        count: number of moments.
        first: per node the first moment of its life.
        last: per node one past its last moment; equal to `first` for a node that is never live.
        limit: bytes allowed at each moment.
        usages: those of the problem.
    """

    count: int
    first: IntArray
    last: IntArray
    limit: float
    usages: tuple[Array, ...]

    @classmethod
    def of(cls, problem: Problem) -> Moments:
        """Return the moments of a problem that has usages and a limit."""
        assert problem.usages is not None
        assert problem.intervals is not None
        assert problem.limit is not None
        lives = np.array(problem.intervals, dtype=np.int64).reshape(-1, 2)
        live = lives[:, 0] < lives[:, 1]
        births, deaths = np.unique(lives[live, 0]), np.unique(lives[live, 1])
        # A set of live nodes is maximal right after a birth that is followed by a death before the next birth.
        following = np.append(births[1:], np.iinfo(np.int64).max)
        maximal = births[np.searchsorted(deaths, births, "right") < np.searchsorted(deaths, following, "right")]
        first = np.where(live, np.searchsorted(maximal, lives[:, 0]), 0)
        last = np.where(live, np.searchsorted(maximal, lives[:, 1]), 0)
        return cls(len(maximal), first, last, problem.limit, problem.usages)

    def spread(self, usages: Array) -> Array:
        """Return the sum of one usage per node over the nodes live at each moment."""
        # A difference array: the work is one step per node and moment, however long the lives are.
        change = np.zeros(self.count + 1)
        np.add.at(change, self.first, usages)
        np.subtract.at(change, self.last, usages)
        return np.cumsum(change)[: self.count]

    def loads(self, choices: Mapping[int, int]) -> Array:
        """Return the bytes in use at each moment under a complete assignment."""
        return self.spread(np.array([usage[choices[node]] for node, usage in enumerate(self.usages)]))

    def least(self) -> Array:
        """Return the bytes in use at each moment if every node uses as little as it can."""
        return self.spread(np.array([usage.min() for usage in self.usages]))

    def most(self) -> Array:
        """Return the bytes in use at each moment if every node uses as much as it can."""
        return self.spread(np.array([usage.max() for usage in self.usages]))

    def prices(self, prices: Array) -> Array:
        """Return per node the sum of the prices (cost per byte) of the moments of its life."""
        total = np.append(0.0, np.cumsum(prices))
        return total[self.last] - total[self.first]

    def within_limit(self, loads: Array) -> bool:
        """Return True if loads are within the limit, up to the rounding of float sums."""
        return bool((loads <= self.limit + 1e-12 * abs(self.limit)).all())
