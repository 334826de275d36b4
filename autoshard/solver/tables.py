"""Arithmetic on cost tables that computes equal results once.

Identical layers have equal tables. Tables are interned by content, so that equal tables are one object, and results
are cached by the identities of their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

from autoshard.solver.problem import Array, IntArray

T = TypeVar("T")

_NEGLIGIBLE = 1e-14
"""Size of a normalised table, relative to the original, below which it is the rounding of zero."""


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

    def cached(self, operation: str, operands: tuple[Any, ...], compute: Callable[[], T]) -> T:
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

        return self.cached("transpose", (table,), compute)

    def add(self, first: Array, second: Array) -> Array:
        """Return the sum of two vectors or of two tables of the same edge."""
        return self.cached("add", (first, second), lambda: self.intern(first + second))

    def take(self, table: Array, rows: IntArray, columns: IntArray) -> Array:
        """Return the table restricted to some strategies of both ends."""
        return self.cached("take", (table, rows, columns), lambda: self.intern(table[np.ix_(rows, columns)]))

    def take_entries(self, vector: Any, rows: IntArray) -> Any:
        """Return a vector restricted to some strategies."""
        return self.cached("entries", (vector, rows), lambda: self.intern(vector[rows]))

    def message(self, vector: Array, table: Array) -> Array:
        """Return the least vector + table [s, t] over s: the costs that a removed node of degree one leaves."""
        return self.cached("message", (vector, table), lambda: self.intern((vector[:, None] + table).min(0)))

    def series(self, vector: Array, first: Array, second: Array) -> Array:
        """Return the least vector + first [s, a] + second [s, b] over s: the edge that replaces a node of degree
        two."""

        def compute() -> Array:
            left = vector[:, None] + first
            result = np.full((first.shape[1], second.shape[1]), np.inf)
            # One strategy at a time: a table over all three nodes could be too large.
            for left_row, second_row in zip(left, second, strict=True):
                np.minimum(result, left_row[:, None] + second_row[None, :], out=result)
            return self.intern(result)

        return self.cached("series", (vector, first, second), compute)

    def usable_rows(self, table: Array) -> IntArray:
        """Return the rows with a finite entry: the strategies that some strategy of the other end supports."""
        return self.cached("usable", (table,), lambda: self.intern(np.flatnonzero(np.isfinite(table).any(1))))

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

        return self.cached("normalised", (table,), compute)

    def advantage(self, table: Array) -> Array:
        """Return [s, t]: the largest increase by choosing t instead of s, over the choices of the other end."""

        def compute() -> Array:
            with np.errstate(invalid="ignore"):
                difference = table[None, :, :] - table[:, None, :]
            # Where s is forbidden, t is no worse, even if it is forbidden too.
            difference[np.broadcast_to(np.isinf(table)[:, None, :], difference.shape)] = -np.inf
            return self.intern(difference.max(2))

        return self.cached("advantage", (table,), compute)
