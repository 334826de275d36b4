"""Equal rows and columns of tables.

Strategies of an operator with the same spec of a tensor have equal rows, and the work on their costs is done once per
class of equal rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
        # If no rows are equal, keep their order, which reads memory sequentially.
        if len(first) < len(hashes):
            return EquivalenceClasses(first, number)
        positions = np.arange(len(hashes))
        return EquivalenceClasses(positions, positions)


def equal_rows_and_columns(table: npt.NDArray[np.float64]) -> tuple[EquivalenceClasses, EquivalenceClasses] | None:
    """Return the classes of rows and of columns of a table; None where they would save little."""
    if table.size < _MIN_ENTRIES:
        return None
    height, width = table.shape
    # Random weighted sums of bits distinguish almost all different rows. Entries are compared at the end.
    weights = np.random.default_rng(0).integers(1, 2**63, size=max(height, width), dtype=np.uint64)
    # As integers, sums are exact (modulo 2**64), and infinity is a value like any other.
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
