"""Tables of cost frontiers, and the one operation on them: join, which is product, union and reduce at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.frontier_corners import PruningBounds
from autoshard.solver.problem import Array, IntArray

_CHUNK = 1 << 19
"""Candidate points that are looked at together: large enough for numpy, small enough for the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """How the points of a table came about.

    Attributes:
        left, right: the tables joined; no right one where cells of the left were copied.
        left_points, right_points: for every point, the points of theirs that it is the sum of.
        decided: the node that the join eliminated; None for a product alone.
        strategies: its number of strategies, which are the last index of the left table's cells.
    """

    left: FrontierTable
    left_points: IntArray
    right: FrontierTable | None = None
    right_points: IntArray | None = None
    decided: int | None = None
    strategies: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class FrontierTable:
    """A frontier in every cell; cells are numbered row by row over the strategies of some nodes.

    Attributes:
        starts: place of each cell's first point, and the number of points [cells + 1]; a cell without points is
            forbidden.
        memory: of all points, ascending within a cell.
        time: of all points, descending within a cell.
        origin: None for the problem's own costs.
    """

    starts: IntArray
    memory: Array
    time: Array
    origin: Origin | None = None

    @staticmethod
    def of(time: Array, memory: Array) -> FrontierTable:
        """One point per finite entry of the arrays, none elsewhere."""
        time, memory = np.ravel(time), np.ravel(memory)
        there = np.isfinite(time)
        return FrontierTable(np.append(0, np.cumsum(there)), memory[there], time[there])

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.starts) - 1

    @property
    def counts(self) -> IntArray:
        """Points of every cell."""
        return np.diff(self.starts)

    def take(self, cells: IntArray) -> FrontierTable:
        """A table of some of the cells, in the order given, perhaps repeatedly."""
        counts = self.counts[cells]
        starts = np.append(0, np.cumsum(counts))
        points = np.repeat(self.starts[cells] - starts[:-1], counts) + np.arange(starts[-1])
        return FrontierTable(starts, self.memory[points], self.time[points], Origin(self, points))


UNIT = FrontierTable(np.array([0, 1]), np.zeros(1), np.zeros(1))
"""One cell with one point that adds nothing."""


@dataclass(slots=True)
class Joiner:
    """Joins tables, and keeps account of what thinning has cost.

    Thinning drops a point only where one that needs no more memory is at most a tolerance slower. The tolerances of all
    joins add up: no point of the final frontier is slower, at its memory or less, by more than `spent`.

    Attributes:
        budget: seconds that all thinning together may cost.
        joins: how many joins will eliminate a node; each may spend its share of what is left of the budget.
        each: points of one cell that are kept at most for every corner of an outlook, those that look best; what
            goes with the others is not accounted for. None: all are kept.
        spent: seconds that thinning has cost so far, at most.
    """

    budget: float = 0.0
    joins: int = 1
    points_per_corner: int | None = None
    spent: float = field(default=0.0, init=False)

    def join(
        self,
        left: FrontierTable,
        right: FrontierTable,
        left_cells: IntArray,
        right_cells: IntArray,
        fan: int = 1,
        decided: int | None = None,
        outlook: PruningBounds | None = None,
    ) -> FrontierTable:
        """The frontiers of sums of points.

        Cell `c` of the result is reduced from the sums of every point of `left_cells[j]` with every point of
        `right_cells[j]`, for the `fan` entries `j` from `c * fan` on.

        Args:
            left, right: tables.
            left_cells, right_cells: cells to be summed in pairs [cells of the result * fan].
            fan: pairs per cell of the result: the strategies of the node that is eliminated, or 1.
            decided: that node, whose strategies are the last index of the left table's cells.
            outlook: points are left out that lead to nothing new. None: all are kept.

        Source: TensorOpt 3.2: product, union, and Algorithm 1.
        """
        share = 0.0
        if decided is not None:
            share = max(0.0, self.budget - self.spent) / max(1, self.joins)
            self.joins -= 1
        pairs = left.counts[left_cells] * right.counts[right_cells]
        if outlook is not None:
            pairs *= outlook.pairs
        bounds = _chunk_bounds(pairs.reshape(-1, fan).sum(1))
        parts = []
        for a, b in itertools.pairwise(bounds):
            at = slice(a * fan, b * fan)
            task = _JoinChunk(
                left, right, left_cells[at], right_cells[at], pairs[at], fan, share, self.points_per_corner, outlook, a
            )
            parts.append(task.run())
        self.spent += max((part.slower for part in parts), default=0.0)
        counts = np.concatenate([part.counts for part in parts])
        memory, time, left_points, right_points = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("memory", "time", "left_points", "right_points")
        )
        origin = Origin(left, left_points, right, right_points, decided, fan)
        return FrontierTable(np.append(0, np.cumsum(counts)), memory, time, origin)


def unroll(table: FrontierTable, assignments: IntArray) -> None:
    """Fills in what every point of a table decided, back to the problem's own costs.

    Args:
        table: of one cell.
        assignments: [points, nodes], filled in place where a join decided.

    Source: TensorOpt 3.2, "Unroll LDP and elimination".
    """
    waiting = [(table, np.arange(table.starts[-1]))]
    while waiting:
        current, points = waiting.pop()
        origin = current.origin
        if origin is None:
            continue
        left_points = origin.left_points[points]
        if origin.decided is not None:
            cells = np.searchsorted(origin.left.starts, left_points, "right") - 1
            assignments[:, origin.decided] = cells % origin.strategies
        waiting.append((origin.left, left_points))
        if origin.right is not None and origin.right_points is not None:
            waiting.append((origin.right, origin.right_points[points]))


def _chunk_bounds(work: IntArray) -> list[int]:
    """Bounds of stretches of cells with about `_CHUNK` candidates each; a single cell may have more."""
    done = np.cumsum(work)
    parts = np.unique(done // _CHUNK, return_index=True)[1] if len(work) else np.zeros(1, dtype=np.int64)
    return [0, *(int(part) for part in parts if part), len(work)]


@dataclass(frozen=True, slots=True)
class _ChunkResult:
    """What a stretch of a join's cells came to; `slower` is the most that thinning cost there."""

    counts: IntArray
    memory: Array
    time: Array
    left_points: IntArray
    right_points: IntArray
    slower: float


@dataclass(frozen=True, slots=True)
class _JoinChunk:
    """A stretch of the cells of a join, from the cell `first` on."""

    left: FrontierTable
    right: FrontierTable
    left_cells: IntArray
    right_cells: IntArray
    pairs: IntArray
    fan: int
    tolerance: float
    points_per_corner: int | None
    pruning: PruningBounds | None
    first: int

    def run(self) -> _ChunkResult:
        counts = self.pairs.reshape(-1, self.fan).sum(1)
        left_points, right_points = self._points()
        memory = self.left.memory[left_points] + self.right.memory[right_points]
        time = self.left.time[left_points] + self.right.time[right_points]
        cell, keep = _frontiers(counts, memory, time)
        if self.pruning is not None:
            new = self.pruning.promising_points(self.first + cell, memory[keep], time[keep], self.points_per_corner)
            cell, keep = cell[new], keep[new]
        thinned, slower = _thin_points(cell, time[keep], len(counts), self.tolerance)
        cell, keep = cell[thinned], keep[thinned]
        kept = np.bincount(cell, minlength=len(counts))
        return _ChunkResult(kept, memory[keep], time[keep], left_points[keep], right_points[keep], slower)

    def _points(self) -> tuple[IntArray, IntArray]:
        """The two points of every pair that is summed, cell by cell."""
        count, second = self.pairs, self.right.counts[self.right_cells]
        ends = np.cumsum(count)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
        left_starts = np.repeat(self.left.starts[self.left_cells], count)
        right_starts = np.repeat(self.right.starts[self.right_cells], count)
        if second.max(initial=0) > 1:
            quotient, within = np.divmod(within, np.repeat(second, count))
            return left_starts + quotient, right_starts + within
        return left_starts + within, right_starts


def _frontiers(counts: IntArray, memory: Array, time: Array) -> tuple[IntArray, IntArray]:
    """The points that no other of their cell dominates (Algorithm 1).

    Args:
        counts: points of every cell.
        memory, time: of all points, cell by cell.

    Returns:
        Cell and place of the points that remain, by cell and memory.
    """
    starts = np.cumsum(counts) - counts
    cells, places = [], []
    # Cells of about equally many points are sorted together, as rows of a matrix.
    length = np.frexp(counts)[1]
    for bits in np.unique(length[counts > 0]):
        rows = np.flatnonzero(length == bits)
        at = np.arange(counts[rows].max())
        there = at < counts[rows][:, None]
        place = np.where(there, starts[rows][:, None] + at, 0)
        held = np.where(there, memory[place], np.inf)
        if len(at) > 1:
            order = np.argsort(held, axis=1, kind="stable")
            held, place = np.take_along_axis(held, order, 1), np.take_along_axis(place, order, 1)
        taken = np.where(np.isfinite(held), time[place], np.inf)
        least = np.minimum.accumulate(taken, 1)
        keep = taken < np.hstack([np.full((len(rows), 1), np.inf), least[:, :-1]])
        row, column = np.nonzero(keep)
        # Of equal memory the sort may have brought the slower one first.
        last = np.append((row[1:] != row[:-1]) | (held[keep][1:] != held[keep][:-1]), True)[: len(row)]
        cells.append(rows[row[last]])
        places.append(place[row[last], column[last]])
    if not cells:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    cell, found = np.concatenate(cells), np.concatenate(places)
    order = np.argsort(cell, kind="stable")
    return cell[order], found[order]


def _thin_points(cell: IntArray, time: Array, cells: int, tolerance: float) -> tuple[IntArray | slice, float]:
    """Places that remain of sorted frontiers, and the most by which one that goes is faster than what stands for it.

    In every stretch of `tolerance` seconds, the point of least memory remains, and the fastest of all.
    """
    if not len(cell) or tolerance <= 0:
        return slice(None), 0.0
    counts = np.bincount(cell, minlength=cells)
    ends = np.cumsum(counts)[counts > 0]
    fastest = np.zeros(cells)
    fastest[counts > 0] = time[ends - 1]
    number = np.floor((time - fastest[cell]) / tolerance)
    new = (np.diff(number, prepend=-1) != 0) | (np.diff(cell, prepend=-1) != 0)
    new[ends - 1] = True
    remaining = np.flatnonzero(new)
    stands = remaining[np.cumsum(new) - 1]
    return remaining, float((time[stands] - time).max())
