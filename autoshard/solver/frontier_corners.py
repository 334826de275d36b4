"""Corners between known points where new points may exist, and the partial assignments that may lead there.

Bounds come from the problem at many prices of memory at once. A price combines time and memory into one cost. Two
passes of bucket elimination find the optimum, and the optimum given each combination of strategies that an elimination
sums. All prices share the passes: every table has one entry per price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.solver.buckets import Bucket, Scope, spread
from autoshard.solver.problem import Array, IntArray

_ROUNDING = 1e-12
"""Relative difference between two orders of summation: a smaller difference does not count."""

_CORNERS = 64
"""Most corners that points are compared with."""

_ENTRIES = 1 << 22
"""Most comparisons made at once, to limit the size of arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownPoints:
    """Known assignments, none dominated by another.

    Attributes:
        memory: of each [points], ascending.
        time: of each [points], descending.
        assignments: strategies of every node [points, nodes].
    """

    memory: Array
    time: Array
    assignments: IntArray

    @staticmethod
    def of(memory: Array, time: Array, assignments: IntArray) -> KnownPoints:
        """Return the assignments that no other one dominates by more than rounding."""
        # By memory, then time: a point is undominated if and only if it is faster than all before it.
        order = np.lexsort((time, memory))
        kept: list[int] = []
        for place in order:
            if not kept or time[place] < time[kept[-1]] - _ROUNDING * abs(time[kept[-1]]):
                kept.append(int(place))
        return KnownPoints(memory[kept], time[kept], assignments[kept])

    def __len__(self) -> int:
        return len(self.memory)

    def merge(self, other: KnownPoints) -> KnownPoints:
        """Return the undominated points of both."""
        return KnownPoints.of(
            np.concatenate([self.memory, other.memory]),
            np.concatenate([self.time, other.time]),
            np.concatenate([self.assignments, other.assignments]),
        )

    def with_targets(self, weights: Array, best: Array, share: float) -> KnownPoints:
        """Return these points and targets beside the hull, without assignments, where points may exist.

        There is one target wherever the time of the hull has changed by a share, slower than the hull by that share.

        Args:
            weights, best: prices [prices, 2], and the optimum at each [prices].
            share: of the time.
        """
        priced = weights[:, 0] > 0
        less, more = weights[priced].T
        # Equal ratios of time, since the share is relative: the band at the hull is equally wide everywhere.
        steps = max(2, math.ceil(math.log(self.time[0] / self.time[-1]) / math.log1p(share)))
        # The memory of the hull at each of these times: the maximum over prices.
        time = np.geomspace(self.time[0], self.time[-1], steps + 1)
        at = more > 0
        memory = ((best[priced][at] - less[at] * time[:, None]) / more[at]).max(1)
        return self.merge(KnownPoints(memory, time * (1 + share), np.full((len(time), self.assignments.shape[1]), -1)))

    def largest_gap(self, weights: Array, best: Array) -> float:
        """Return the largest factor, less 1, by which a known point is slower than any assignment of at least its
        memory.

        The assignment has less memory than the next point.

        Args:
            weights: of time and of memory, for every price [prices, 2].
            best: the optimum at each price [prices]; together, the lower convex hull of all assignments.

        Returns:
            A share of the time of the faster one; `inf` if no time has a bound above zero.
        """
        priced, free = weights[:, 0] > 0, weights[:, 1] == 0
        # Every price gives a lower bound of the time of an assignment with less memory than the next point.
        less, more = weights[priced].T
        bound = (best[priced] - more * self.memory[1:, None]) / less
        # The last point has no next one: the least time of all, at price 0, is the bound.
        fastest = np.append(bound.max(1), (best[priced & free] / weights[priced & free, 0]).max())
        if (fastest <= 0).any():
            return float("inf")
        return max(0.0, float((self.time / fastest).max()) - 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class OpenCorners:
    """Corners between known points: an assignment is new if one of them exceeds it in memory and in time.

    Attributes:
        weights: of time and of memory, for every price [prices, 2].
        costs: cost of each corner at each price [corners, prices].
        nearest: for every corner, the price with the least distance to the optimum [corners].
    """

    weights: Array
    costs: Array
    nearest: IntArray

    @staticmethod
    def between(
        points: KnownPoints, weights: Array, best: Array, epsilon: float, most: tuple[float, float]
    ) -> OpenCorners:
        """Return the corners that the optima at the prices do not rule out.

        Args:
            points: known points; a slower point is not new, nor one that is faster by less than epsilon.
            weights, best: prices [prices, 2], and the optimum at each [prices].
            epsilon: share of its time by which a new point may be faster than a known one.
            most: memory and time that no assignment exceeds.
        """
        time = np.minimum(points.time, points.time / (1.0 + epsilon))
        memory = np.append(points.memory, most[0])
        # A corner has the time of the point before it and the memory of the point after it: a new point between the two
        # is below it in both.
        time = np.append(most[1], time)
        corners = time[:, None] * weights[:, 0] + memory[:, None] * weights[:, 1]
        scale = np.abs(points.time).max() * weights[:, 0] + np.abs(points.memory).max() * weights[:, 1]
        # A sum that is below a corner only by rounding is not new.
        corners = corners - _ROUNDING * scale
        # A price whose optimum exceeds the cost of a corner proves that nothing is below it.
        open_ = (corners > best).all(1)
        # If there are too many, adjacent corners become one that dominates them all.
        groups = np.array_split(np.flatnonzero(open_), min(_CORNERS, max(1, int(open_.sum()))))
        joined = [(group[0], group[-1]) for group in groups if len(group)]
        corners = np.array([time[first] * weights[:, 0] + memory[last] * weights[:, 1] for first, last in joined])
        corners = corners.reshape(len(joined), len(weights)) - _ROUNDING * scale
        return OpenCorners(weights, corners, ((corners - best) / np.where(scale > 0, scale, 1.0)).argmin(1))

    def __len__(self) -> int:
        return len(self.costs)

    def pairs_below(self, wholes: Array) -> tuple[IntArray, IntArray]:
        """Return rows of lower bounds, and the corners above them at all prices.

        Args:
            wholes: lower bounds of all completions at each price [rows, prices].
        """
        rows, corners = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        nearest = self.costs[np.arange(len(self)), self.nearest]
        step = max(1, _ENTRIES // max(1, self.costs.size))
        for start in range(0, len(wholes), step):
            part = wholes[start : start + step]
            # The nearest price alone rules out most pairs.
            row, corner = np.nonzero(part[:, self.nearest] < nearest)
            within = (part[row] < self.costs[corner]).all(1)
            rows.append(start + row[within])
            corners.append(corner[within])
        return np.concatenate(rows), np.concatenate(corners)


@dataclass(frozen=True, slots=True, eq=False)
class PruningBounds:
    """Lower bounds at one elimination.

    Attributes:
        corners: between known points.
        outside: least cost of everything that is not summed yet, for every cell of the sum [cells, prices].
        pairs: True where a cell and a strategy of the eliminated node are below a corner [cells * strategies].
    """

    corners: OpenCorners
    outside: Array
    pairs: np.ndarray

    def promising_points(self, cell: IntArray, memory: Array, time: Array, per_corner: int | None) -> IntArray:
        """Return the positions of the points that may lead below a corner.

        Args:
            cell, memory, time: of the points.
            per_corner: points of a cell at most for every corner: those that may come farthest below it. None for all.
        """
        weights = self.corners.weights
        wholes = time[:, None] * weights[:, 0] + memory[:, None] * weights[:, 1] + self.outside[cell]
        # Keep a point if, with the least cost of everything still to be added, it is below some corner at every price.
        row, corner = self.corners.pairs_below(wholes)
        if per_corner is not None and len(row):
            priced = weights[:, 0] > 0
            lead = ((self.corners.costs[corner] - wholes[row])[:, priced] / weights[priced, 0]).min(1)
            order = np.lexsort((-lead, corner, cell[row]))
            group = (cell[row] * len(self.corners) + corner)[order]
            rank = np.arange(len(order)) - np.searchsorted(group, group)
            row = row[order[rank < per_corner]]
        return np.unique(row)


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Time and memory of every combination of strategies of the nodes in a scope; infinite time forbids.

    Scopes list nodes from the last eliminated to the first.
    """

    scope: Scope
    time: Array
    memory: Array

    def at(self, weights: Array) -> Array:
        """Return time and memory weighted by the prices [*scope, prices]; a forbidden combination stays infinite."""
        # Infinite time at price 0 for time would be NaN, which does not forbid.
        allowed = np.isfinite(self.time)
        time = np.where(allowed, self.time, 0.0)
        total = time[..., None] * weights[:, 0] + self.memory[..., None] * weights[:, 1]
        return np.where(allowed[..., None], total, np.inf)


class PricedProblem:
    """A problem at several prices.

    Attributes:
        weights: of time and of memory [prices, 2].
        best: the optimum of the whole problem, at each price [prices].
        minima: per bucket, the minimum over its node of the sum of the bucket and of all buckets below [*rest, prices].

    Args:
        sizes: strategies of every node.
        costs: costs of an empty scope.
        tree: the buckets of the problem.
        weights: as above.
    """

    def __init__(self, sizes: Mapping[int, int], costs: Costs, tree: Sequence[Bucket[Costs]], weights: Array) -> None:
        self.sizes = sizes
        self.tree = tree
        self.weights = weights
        self.minima: list[Array] = []
        self.best = costs.at(weights)
        for bucket in tree:
            minimum = self._sum(bucket).min(len(bucket.rest))
            self.minima.append(minimum)
            if not bucket.rest:
                self.best = self.best + minimum

    def _sum(self, bucket: Bucket[Costs]) -> Array:
        total = np.zeros([self.sizes[node] for node in bucket.scope] + [len(self.weights)])
        for cost in bucket.terms:
            total += spread(cost.at(self.weights), cost.scope, bucket.scope)
        for child in bucket.children:
            total += spread(self.minima[child], self.tree[child].rest, bucket.scope)
        return total

    def optima(self) -> dict[int, IntArray]:
        """Return the strategy of every node in an optimum at each price [prices]."""
        choices: dict[int, IntArray] = {}
        prices = np.arange(len(self.weights))
        # A bucket's rest is eliminated after it, so those choices are already known.
        for bucket in reversed(self.tree):
            total = np.zeros((self.sizes[bucket.node], len(prices)))
            parts = [(cost.scope, cost.at(self.weights)) for cost in bucket.terms]
            parts += [(self.tree[child].rest, self.minima[child]) for child in bucket.children]
            for scope, table in parts:
                at: tuple[Any, ...] = (slice(None), *(choices[node] for node in scope[:-1]), prices)
                total += np.moveaxis(table, len(scope) - 1, 0)[at]
            choices[bucket.node] = total.argmin(0)
        return choices

    def conditional_optima(self) -> Iterator[tuple[Array, Array]]:
        """Yield the optima of the whole problem given the choices at every bucket, the last bucket first.

        Yields:
            The optima given the strategies of its scope [*scope, prices], and those given the strategies of its rest,
            less its minima [*rest, prices]: the least cost of everything that is not summed there or below.
        """
        above: dict[int, Array] = {}
        for number in reversed(range(len(self.tree))):
            bucket = self.tree[number]
            minimum = self.minima[number]
            reached = np.isfinite(minimum)
            # The optimum given the rest, from the bucket above; components are independent.
            optimum = above.pop(number) if bucket.rest else self.best
            with np.errstate(invalid="ignore"):
                # Inf - inf where all is forbidden.
                outside = np.where(reached, optimum - minimum, 0.0)
            # The downward pass: the sum in and below the bucket plus the least of everything else is an optimum of the
            # whole problem.
            total = self._sum(bucket) + outside[..., None, :]
            for child in bucket.children:
                child_rest = set(self.tree[child].rest)
                minimised = tuple(axis for axis, node in enumerate(bucket.scope) if node not in child_rest)
                above[child] = total.min(minimised) if minimised else total
            yield total, outside
