"""Arithmetic on cost tables that computes equal results once.

Identical layers have equal tables. Tables are interned by content, so that equal tables are one object, and results
are cached by the identities of their operands. Within a table, strategies of an operator with the same spec of a tensor
have equal rows, and the work on their costs is done once per class of equal rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from autoshard.solver.jit import compiled_when_called
from autoshard.solver.problem import Array, IntArray

T = TypeVar("T")

_NEGLIGIBLE = 1e-14
"""Size of a normalised table, relative to the original, below which it is the rounding of zero."""


_MANY_SUMS = 1 << 21
"""Sums from which a compiled loop takes a third of the time of NumPy's; below, it is not worth the import of numba."""


class Tables:
    """A cache of tables and of results of operations on them. It keeps its operands alive, so ids stay unique.

    Args:
        parent: a cache to look in first. The results of a child are forgotten with it: one solve among many should not
            keep its intermediate tables.
    """

    def __init__(self, parent: Tables | None = None) -> None:
        self._parent = parent
        self._content: dict[tuple[Any, ...], Any] = {}
        self._interned: dict[int, Any] = {}
        self._results: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}

    def child(self) -> Tables:
        """Return a cache for the time of one solve."""
        return Tables(self)

    def intern(self, array: Any) -> Any:
        """Return the one object with the content of `array` (a float table or an index vector)."""
        if self._is_interned(array):
            return array
        array = np.ascontiguousarray(array)
        key = (array.shape, array.dtype.str, array.tobytes())
        array = self._find(key, array)
        # The reference keeps the array alive: an id of a freed array could be given to another one.
        self._interned[id(array)] = array
        return array

    def compute(self, operation: str, operands: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return the result of `compute` for these operands, computed at the first call."""
        key = (operation, *map(id, operands))
        entry = self._recall(key)
        if entry is None:
            entry = self._results[key] = (operands, compute())
        return entry[1]

    def _is_interned(self, array: Any) -> bool:
        return id(array) in self._interned or (self._parent is not None and self._parent._is_interned(array))

    def _find(self, key: tuple[Any, ...], array: Any) -> Any:
        ancestor = self._parent
        while ancestor is not None:
            if key in ancestor._content:
                return ancestor._content[key]
            ancestor = ancestor._parent
        return self._content.setdefault(key, array)

    def _recall(self, key: Hashable) -> tuple[tuple[Any, ...], Any] | None:
        entry = self._results.get(key)
        if entry is None and self._parent is not None:
            return self._parent._recall(key)
        return entry

    def transpose(self, table: Array) -> Array:
        """Return the table of the same edge seen from its flipped end; transposing twice returns the same object."""

        def compute() -> Array:
            flipped = table.T
            # Interned as the view it is: a contiguous copy would double the memory of every edge.
            self._interned[id(flipped)] = flipped
            self._results["transpose", id(flipped)] = ((flipped,), table)
            return flipped

        return self.compute("transpose", (table,), compute)

    def add(self, first: Array, second: Array) -> Array:
        """Return the sum of two vectors or of two tables of the same edge."""
        return self.compute("add", (first, second), lambda: self.intern(first + second))

    def take(self, table: Array, rows: IntArray, columns: IntArray) -> Array:
        """Return the table restricted to some strategies of both ends."""
        return self.compute("take", (table, rows, columns), lambda: self.intern(table[np.ix_(rows, columns)]))

    def take_entries(self, vector: Any, rows: IntArray) -> Any:
        """Return a vector restricted to some strategies."""
        return self.compute("entries", (vector, rows), lambda: self.intern(vector[rows]))

    def message(self, vector: Array, table: Array) -> Array:
        """Return the least vector + table [s, t] over s: the costs that a removed node of degree one leaves."""
        return self.compute("message", (vector, table), lambda: self.intern((vector[:, None] + table).min(0)))

    def series(self, vector: Array, first: Array, second: Array) -> Array:
        """Return the least vector + first [s, a] + second [s, b] over s: the edge that replaces a node of degree
        two."""

        def compute() -> Array:
            left = vector[:, None] + first
            result = np.full((first.shape[1], second.shape[1]), np.inf)
            if left.size * second.shape[1] >= _MANY_SUMS:
                _min_plus(np.ascontiguousarray(left), np.ascontiguousarray(second), result)
                return self.intern(result)
            # One strategy at a time: a table over all three nodes could be too large.
            for left_row, second_row in zip(left, second, strict=True):
                np.minimum(result, left_row[:, None] + second_row[None, :], out=result)
            return self.intern(result)

        return self.compute("series", (vector, first, second), compute)

    def usable_rows(self, table: Array) -> IntArray:
        """Return the rows with a finite entry: the strategies that some strategy of the other end supports."""
        return self.compute("usable", (table,), lambda: self.intern(np.flatnonzero(np.isfinite(table).any(1))))

    def normalise(self, table: Array) -> tuple[Array, Array, Array | None]:
        """Return a table as row part + column part + rest, all minima of the rest 0; None for a rest of zeros.

        Every row and column must have a finite entry.
        """

        def compute() -> tuple[Array, Array, Array | None]:
            rows = table.min(1)
            rest = table - rows[:, None]
            columns = rest.min(0)
            rest = rest - columns[None, :]
            scale = np.abs(table[np.isfinite(table)]).max()
            # A separable table leaves rounding, which would keep an edge that decides nothing.
            negligible = rest.max() <= _NEGLIGIBLE * scale
            return self.intern(rows), self.intern(columns), None if negligible else self.intern(rest)

        return self.compute("normalised", (table,), compute)

    def advantage(self, table: Array) -> Array:
        """Return the result of `largest_increase` over all choices of the other end that are allowed."""
        return self.compute("advantage", (table,), lambda: self.intern(largest_increase(table, np.isfinite(table))))


def largest_increase(table: Array, allowed: npt.NDArray[np.bool_]) -> Array:
    """Return [s, t]: the most that choosing row t instead of row s can add, over the columns in which s is allowed."""
    # Infinity minus infinity, in columns that do not count: where s is forbidden, t is no worse, even if it is too.
    with np.errstate(invalid="ignore"):
        more = table[None, :, :] - table[:, None, :]
    return np.asarray(np.where(allowed[:, None, :], more, -np.inf).max(2))


def find_undominated(*increases: Array) -> IntArray:
    """Return the positions of the strategies that no other one beats, ascending; the first of equal ones stays.

    Args:
        increases: [s, t] per criterion, the most that choosing t instead of s can add; t beats s if that is at most
            zero for all of them.
    """
    better = np.logical_and.reduce([increase <= 0 for increase in increases])
    np.fill_diagonal(better, False)
    keep = np.ones(len(better), dtype=bool)
    # Only a strategy that is still there may drop another: rounding must not drop a whole circle.
    for strategy in reversed(range(len(better))):
        keep[strategy] = not (better[strategy] & keep).any()
    return np.flatnonzero(keep)


@compiled_when_called
def _min_plus(left, second, result):  # type: ignore[no-untyped-def] # pragma: no cover
    """Lower the entries [a, b] of the result to the least left [s, a] + second [s, b] over s."""
    count, height = left.shape
    width = second.shape[1]
    for a in range(height):
        row = result[a]
        # Two strategies at once: the row is read and written half as often.
        for s in range(0, count - 1, 2):
            one, other = left[s, a], left[s + 1, a]
            first, next_one = second[s], second[s + 1]
            for b in range(width):
                through, beside = one + first[b], other + next_one[b]
                least = through if through < beside else beside
                row[b] = least if least < row[b] else row[b]
        if count % 2:
            one, first = left[count - 1, a], second[count - 1]
            for b in range(width):
                through = one + first[b]
                row[b] = through if through < row[b] else row[b]


_MIN_ENTRIES = 8192
"""Least entries of a table to search: searching a smaller one takes longer than using it."""

_MAX_DISTINCT_SHARE = 0.8
"""Largest share of the entries that distinct rows and columns may have for classes to pay off."""


@dataclass(frozen=True, slots=True, eq=False)
class EquivalenceClasses:
    """The rows of a table, or its columns, in classes with equal entries.

    Attributes:
        first: one member of each class.
        number: per row its class; ascending numbers where all differ.
    """

    first: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]

    @staticmethod
    def from_hashes(hashes: npt.NDArray[np.uint64]) -> EquivalenceClasses:
        """Return classes of equal hashes."""
        _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
        # Where nothing is equal, the order of the rows stays, which reads memory in sequence.
        if len(first) < len(hashes):
            return EquivalenceClasses(first, number)
        positions = np.arange(len(hashes))
        return EquivalenceClasses(positions, positions)


def equal_rows_and_columns(table: npt.NDArray[np.float64]) -> tuple[EquivalenceClasses, EquivalenceClasses] | None:
    """Return the classes of rows and of columns of a table; None where they would save little."""
    if table.size < _MIN_ENTRIES:
        return None
    height, width = table.shape
    # Random sums of the bits of a row separate almost all that differ. The entries are compared at the end.
    weights = np.random.default_rng(0).integers(1, 2**63, size=max(height, width), dtype=np.uint64)
    # As whole numbers, sums are exact (modulo 2**64), and infinity is a value like any other.
    bits = np.ascontiguousarray(table).view(np.uint64)
    rows, columns = (
        EquivalenceClasses.from_hashes(bits @ weights[:width]),
        EquivalenceClasses.from_hashes(weights[:height] @ bits),
    )
    if len(rows.first) * len(columns.first) > _MAX_DISTINCT_SHARE * table.size:
        return None
    # Hashes may collide, and a wrong class would make a wrong bound.
    few = table[np.ix_(rows.first, columns.first)]
    same = np.array_equal(few[np.ix_(rows.number, columns.number)], table)
    return (rows, columns) if same else None
