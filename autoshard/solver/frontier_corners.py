"""Where points that are known leave room for others, and which partial assignments may lead there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Array, IntArray

_ROUNDING = 1e-12
"""Share of a sum by which two orders of summation may differ: what is ahead by less is not ahead."""

_CORNERS = 64
"""That points are compared with at most."""

_ENTRIES = 1 << 22
"""Comparisons that are made together."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownPoints:
    """Assignments that were found, none of which another one beats.

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
        """Those of some assignments that no other one beats by more than rounding."""
        order = np.lexsort((time, memory))
        kept: list[int] = []
        for place in order:
            if not kept or time[place] < time[kept[-1]] - _ROUNDING * abs(time[kept[-1]]):
                kept.append(int(place))
        return KnownPoints(memory[kept], time[kept], assignments[kept])

    def __len__(self) -> int:
        return len(self.memory)

    def merge(self, other: KnownPoints) -> KnownPoints:
        """What is left of both."""
        return KnownPoints.of(
            np.concatenate([self.memory, other.memory]),
            np.concatenate([self.time, other.time]),
            np.concatenate([self.assignments, other.assignments]),
        )

    def with_targets(self, weights: Array, best: Array, share: float) -> KnownPoints:
        """These and points beside the hull that may exist: one wherever the time of the hull has changed by a share,
        and slower than the hull by that share. They have no assignments.

        Args:
            weights, best: prices [prices, 2], and the optimum at each [prices].
            share: of the time.
        """
        priced = weights[:, 0] > 0
        less, more = weights[priced].T
        steps = max(2, math.ceil(math.log(self.time[0] / self.time[-1]) / math.log1p(share)))
        # The memory at which the hull has each of these times: the most that any price says.
        time = np.geomspace(self.time[0], self.time[-1], steps + 1)
        at = more > 0
        memory = ((best[priced][at] - less[at] * time[:, None]) / more[at]).max(1)
        return self.merge(KnownPoints(memory, time * (1 + share), np.full((len(time), self.assignments.shape[1]), -1)))

    def largest_gap(self, weights: Array, best: Array) -> float:
        """How much slower, at most, a known point is than any assignment of its memory or more that the next exceeds.

        Args:
            weights: of time and of memory, for every price [prices, 2].
            best: the optimum at each price [prices]; together, the lower convex hull of all there is.

        Returns:
            A share of the time of the faster one; `inf` where no time is bounded above zero.
        """
        priced, free = weights[:, 0] > 0, weights[:, 1] == 0
        # What has less memory than the next point is no faster than this.
        less, more = weights[priced].T
        bound = (best[priced] - more * self.memory[1:, None]) / less
        fastest = np.append(bound.max(1), (best[priced & free] / weights[priced & free, 0]).max())
        if (fastest <= 0).any():
            return float("inf")
        return max(0.0, float((self.time / fastest).max()) - 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class OpenCorners:
    """Corners between known points: an assignment is new if one of them exceeds it in memory and in time.

    Attributes:
        weights: of time and of memory, for every price [prices, 2].
        corners: what each corner costs at each price [corners, prices].
        nearest: for every corner, the price that leaves it least room [corners].
    """

    weights: Array
    costs: Array
    nearest: IntArray

    @staticmethod
    def between(
        known: KnownPoints, weights: Array, best: Array, epsilon: float, most: tuple[float, float]
    ) -> OpenCorners:
        """The corners that the optima at the prices do not rule out.

        Args:
            known: points there are; one that is slower than they are is not new, nor one that is faster by epsilon.
            weights, best: prices [prices, 2], and the optimum at each [prices].
            epsilon: share of its time by which a new point may be faster than a known one.
            most: memory and time that no assignment exceeds.
        """
        time = np.minimum(known.time, known.time / (1.0 + epsilon))
        memory = np.append(known.memory, most[0])
        time = np.append(most[1], time)
        corners = time[:, None] * weights[:, 0] + memory[:, None] * weights[:, 1]
        scale = np.abs(known.time).max() * weights[:, 0] + np.abs(known.memory).max() * weights[:, 1]
        corners = corners - _ROUNDING * scale
        open_ = (corners > best).all(1)
        # Of many, some neighbours become one that leaves the room of all.
        groups = np.array_split(np.flatnonzero(open_), min(_CORNERS, max(1, int(open_.sum()))))
        joined = [(group[0], group[-1]) for group in groups if len(group)]
        corners = np.array([time[first] * weights[:, 0] + memory[last] * weights[:, 1] for first, last in joined])
        corners = corners.reshape(len(joined), len(weights)) - _ROUNDING * scale
        return OpenCorners(weights, corners, ((corners - best) / np.where(scale > 0, scale, 1.0)).argmin(1))

    def __len__(self) -> int:
        return len(self.costs)

    def pairs_below(self, wholes: Array) -> tuple[IntArray, IntArray]:
        """Rows of bounds, and the corners that they leave room at.

        Args:
            wholes: what no completion is below at each price [rows, prices].
        """
        rows, corners = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        nearest = self.costs[np.arange(len(self)), self.nearest]
        step = max(1, _ENTRIES // max(1, self.costs.size))
        for start in range(0, len(wholes), step):
            part = wholes[start : start + step]
            row, corner = np.nonzero(part[:, self.nearest] < nearest)
            within = (part[row] < self.costs[corner]).all(1)
            rows.append(start + row[within])
            corners.append(corner[within])
        return np.concatenate(rows), np.concatenate(corners)


@dataclass(frozen=True, slots=True, eq=False)
class PruningBounds:
    """Room at one elimination.

    Attributes:
        room: between known points.
        outside: what all that is not summed yet adds at the least, for every cell of the sum [cells, prices].
        pairs: whether a cell and a strategy of the node that is eliminated leave room [cells * strategies].
    """

    corners: OpenCorners
    outside: Array
    pairs: np.ndarray

    def promising_points(self, cell: IntArray, memory: Array, time: Array, each: int | None) -> IntArray:
        """Which points leave room.

        Args:
            cell, memory, time: of the points.
            each: points of a cell at most for every corner: those that may come farthest beyond it. None for all.
        """
        weights = self.corners.weights
        wholes = time[:, None] * weights[:, 0] + memory[:, None] * weights[:, 1] + self.outside[cell]
        row, corner = self.corners.pairs_below(wholes)
        if each is not None and len(row):
            priced = weights[:, 0] > 0
            ahead = ((self.corners.costs[corner] - wholes[row])[:, priced] / weights[priced, 0]).min(1)
            order = np.lexsort((-ahead, corner, cell[row]))
            group = (cell[row] * len(self.corners) + corner)[order]
            rank = np.arange(len(order)) - np.searchsorted(group, group)
            row = row[order[rank < each]]
        return np.unique(row)
