"""Rows and columns of tables that are alike: what depends on their costs alone is worked out once for all of them.

Strategies of an operator that take a tensor alike have one row in the table of the edge on which it comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MIN_ENTRIES = 8192
"""Entries of a table from which it is looked for what is alike: it takes longer to look through smaller ones than to
use them."""

_MAX_DISTINCT_SHARE = 0.8
"""Part of the entries, at most, that rows and columns that differ may have, to be of use."""


@dataclass(frozen=True, slots=True, eq=False)
class EquivalenceClasses:
    """The rows of a table, or its columns, in classes: those of one class have equal entries.

    Attributes:
        first: one of each class.
        number: of every one, its class; ascending numbers where all differ.
    """

    first: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]

    @staticmethod
    def from_hashes(marks: npt.NDArray[np.uint64]) -> EquivalenceClasses:
        """Those with one mark in one class."""
        _, first, number = np.unique(marks, return_index=True, return_inverse=True)
        every = np.arange(len(marks))
        return EquivalenceClasses(first, number) if len(first) < len(marks) else EquivalenceClasses(every, every)


def equal_rows_and_columns(table: npt.NDArray[np.float64]) -> tuple[EquivalenceClasses, EquivalenceClasses] | None:
    """The rows, and the columns, of a table that are alike; None where that would save little.

    Random sums of the bits of a row tell most that differ apart; then entries are compared.
    """
    if table.size < _MIN_ENTRIES:
        return None
    height, width = table.shape
    weights = np.random.default_rng(0).integers(1, 2**63, size=max(height, width), dtype=np.uint64)
    bits = np.ascontiguousarray(table).view(np.uint64)
    rows, columns = (
        EquivalenceClasses.from_hashes(bits @ weights[:width]),
        EquivalenceClasses.from_hashes(weights[:height] @ bits),
    )
    if len(rows.first) * len(columns.first) > _MAX_DISTINCT_SHARE * table.size:
        return None
    few = table[np.ix_(rows.first, columns.first)]
    same = np.array_equal(few[np.ix_(rows.number, columns.number)], table)
    return (rows, columns) if same else None
