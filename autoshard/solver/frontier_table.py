"""Tables of cost frontiers, and their join: product, union and reduction in one operation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.frontier_corners import PruningBounds
from autoshard.solver.problem import Array, IntArray

_CHUNK = 1 << 19
"""Candidate points per chunk: enough for numpy, and few enough for the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The join that made the points of a table.

    Attributes:
        left, right: the tables joined; None on the right if cells of the left were copied.
        left_points, right_points: for every point, the points of these tables whose sum it is.
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
    """A frontier in every cell; cells are numbered row-major over the strategies of some nodes.

    Attributes:
        starts: position of each cell's first point, and the number of points [cells + 1]; a cell without points is
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
        """Return a table with one point per finite entry of the arrays, and none elsewhere."""
        time, memory = np.ravel(time), np.ravel(memory)
        allowed = np.isfinite(time)
        return FrontierTable(np.append(0, np.cumsum(allowed)), memory[allowed], time[allowed])

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.starts) - 1

    @property
    def counts(self) -> IntArray:
        """Number of points of every cell."""
        return np.diff(self.starts)

    def take(self, cells: IntArray) -> FrontierTable:
        """Return a table of some of the cells, in the given order, possibly repeated."""
        counts = self.counts[cells]
        starts = np.append(0, np.cumsum(counts))
        points = np.repeat(self.starts[cells] - starts[:-1], counts) + np.arange(starts[-1])
        return FrontierTable(starts, self.memory[points], self.time[points], Origin(self, points))


UNIT = FrontierTable(np.array([0, 1]), np.zeros(1), np.zeros(1))
"""The neutral element of joins: one cell with one point of zero memory and time."""


@dataclass(slots=True)
class Joiner:
    """Joins tables, and accounts for the time lost by thinning.

    Thinning drops a point only if another one with no more memory is at most a tolerance slower. The tolerances of all
    joins add up: no point of the final frontier is slower, at its memory or less, by more than `spent`.

    Attributes:
        budget: seconds that all thinning together may cost.
        joins: number of remaining joins that eliminate a node; each may spend an equal share of the remaining budget.
        points_per_corner: number of the most promising points of a cell to keep for every corner. The loss of the
            others is not accounted for. None keeps all.
        spent: upper bound of the seconds that thinning has cost so far.
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
        pruning: PruningBounds | None = None,
    ) -> FrontierTable:
        """Return the frontiers of sums of points.

        Cell `c` of the result is reduced from the sums of every point of `left_cells[j]` with every point of
        `right_cells[j]`, for the `fan` entries `j` from `c * fan` on.

        Args:
            left, right: tables.
            left_cells, right_cells: cells to be summed in pairs [cells of the result * fan].
            fan: pairs per cell of the result: the strategies of the eliminated node, or 1.
            decided: that node, whose strategies are the last index of the left table's cells.
            pruning: bounds that drop points without new completions. None keeps all.

        Source: TensorOpt 3.2: product, union, and Algorithm 1.
        """
        share = 0.0
        if decided is not None:
            # The remaining joins share what earlier ones did not use.
            share = max(0.0, self.budget - self.spent) / max(1, self.joins)
            self.joins -= 1
        pairs = left.counts[left_cells] * right.counts[right_cells]
        if pruning is not None:
            # Do not form pairs without new completions.
            pairs *= pruning.pairs
        # Ranges of cells with about `_CHUNK` candidates each; a single cell may have more.
        cumulative = np.cumsum(pairs.reshape(-1, fan).sum(1))
        parts_at = np.unique(cumulative // _CHUNK, return_index=True)[1]
        bounds = [0, *(int(part) for part in parts_at if part), len(cumulative)]
        parts = []
        for a, b in itertools.pairwise(bounds):
            at = slice(a * fan, b * fan)
            task = _JoinChunk(
                left, right, left_cells[at], right_cells[at], pairs[at], fan, share, self.points_per_corner, pruning, a
            )
            parts.append(task.run())
        # A final point passes one cell of every join: losses of joins add up, those of cells do not.
        self.spent += max((part.slower for part in parts), default=0.0)
        counts = np.concatenate([part.counts for part in parts])
        memory, time, left_points, right_points = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("memory", "time", "left_points", "right_points")
        )
        # Assignments are recovered from origins, for the few points that are left at the end.
        origin = Origin(left, left_points, right, right_points, decided, fan)
        return FrontierTable(np.append(0, np.cumsum(counts)), memory, time, origin)


def unroll(table: FrontierTable, assignments: IntArray) -> None:
    """Write the decisions of every point of a table into `assignments`.

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


@dataclass(frozen=True, slots=True)
class _ChunkResult:
    """The points of a range of a join's cells; `slower` is the most that thinning cost there."""

    counts: IntArray
    memory: Array
    time: Array
    left_points: IntArray
    right_points: IntArray
    slower: float


@dataclass(frozen=True, slots=True)
class _JoinChunk:
    """A range of the cells of a join, from the cell `first` on."""

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
        """Return the two points of every summed pair, cell by cell."""
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
    """Return the points that no other of their cell dominates (Algorithm 1).

    Args:
        counts: points of every cell.
        memory, time: of all points, cell by cell.

    Returns:
        Cell and position of the points that remain, by cell and memory.
    """
    starts = np.cumsum(counts) - counts
    cells, places = [], []
    # Cells with similar numbers of points, up to a factor of two, are sorted together as rows of a matrix.
    length = np.frexp(counts)[1]
    for bits in np.unique(length[counts > 0]):
        rows = np.flatnonzero(length == bits)
        at = np.arange(counts[rows].max())
        present = at < counts[rows][:, None]
        place = np.where(present, starts[rows][:, None] + at, 0)
        memories = np.where(present, memory[place], np.inf)
        if len(at) > 1:
            order = np.argsort(memories, axis=1, kind="stable")
            memories, place = np.take_along_axis(memories, order, 1), np.take_along_axis(place, order, 1)
        # Padding has infinite memory and comes last; its time must not win, either.
        times = np.where(np.isfinite(memories), time[place], np.inf)
        least = np.minimum.accumulate(times, 1)
        keep = times < np.hstack([np.full((len(rows), 1), np.inf), least[:, :-1]])
        row, column = np.nonzero(keep)
        # The sort may have placed the slower of two points of equal memory first.
        last = np.append((row[1:] != row[:-1]) | (memories[keep][1:] != memories[keep][:-1]), True)[: len(row)]
        cells.append(rows[row[last]])
        places.append(place[row[last], column[last]])
    if not cells:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    cell, remaining = np.concatenate(cells), np.concatenate(places)
    order = np.argsort(cell, kind="stable")
    return cell[order], remaining[order]


def _thin_points(cell: IntArray, time: Array, cells: int, tolerance: float) -> tuple[IntArray | slice, float]:
    """Thin out sorted frontiers: keep the fastest point and, in every `tolerance` seconds, the point of least memory.

    Returns:
        The positions that remain, and the largest time by which a dropped point is faster than the one kept for it.
    """
    if not len(cell) or tolerance <= 0:
        return slice(None), 0.0
    counts = np.bincount(cell, minlength=cells)
    ends = np.cumsum(counts)[counts > 0]
    fastest = np.zeros(cells)
    fastest[counts > 0] = time[ends - 1]
    # Steps count from the fastest point of the cell; of each step, the first point by memory is kept.
    number = np.floor((time - fastest[cell]) / tolerance)
    new = (np.diff(number, prepend=-1) != 0) | (np.diff(cell, prepend=-1) != 0)
    new[ends - 1] = True
    remaining = np.flatnonzero(new)
    stands = remaining[np.cumsum(new) - 1]
    return remaining, float((time[stands] - time).max())
