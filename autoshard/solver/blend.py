"""Edges whose table is a weighted sum of tables: equal layers of a step, each at prices of its own.

The sums differ with the weights, but the tables are shared. Message passing adds up the parts while it reads them; the
sum is computed only for other users.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Part = tuple[float, Array]
"""A factor above zero, and a table."""


@dataclass(eq=False)
class Blend:
    """A weighted sum of tables of one shape.

    Attributes:
        parts: at least one.
    """

    parts: tuple[Part, ...]

    @cached_property
    def table(self) -> Array:
        """The sum."""
        return np.asarray(sum(factor * table for factor, table in self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        rows, columns = self.parts[0][1].shape
        return rows, columns

    @property
    def diagonal(self) -> Array:
        """The costs of equal strategies at both ends."""
        # Of each part: the sum of the whole tables may never be needed.
        return np.asarray(sum(factor * np.diagonal(table) for factor, table in self.parts))

    def at(self, row: int, column: int) -> float:
        """Return the cost of a pair of strategies."""
        return float(sum(factor * table[row, column] for factor, table in self.parts))


@dataclass(frozen=True, slots=True, eq=False)
class BlendedEdge:
    """Costs of pairs of strategies of two nodes, as a weighted sum.

    Attributes:
        source: index of the node of the rows.
        target: index of the node of the columns, another node.
        blend: the table. Edges with equal costs should share one object.
    """

    source: int
    target: int
    blend: Blend

    @property
    def costs(self) -> Array:
        """The sum, computed once."""
        return self.blend.table

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of strategies of source and target."""
        return self.blend.shape

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tables and their factors."""
        return self.blend.parts

    def at(self, row: int, column: int) -> float:
        """Return the cost of a pair of strategies."""
        return self.blend.at(row, column)


def blend(parts: Iterable[Part]) -> Blend:
    """Return the sum of weighted tables; the factors of a table that occurs several times are added."""
    factors: dict[int, float] = {}
    tables: dict[int, Array] = {}
    for factor, table in parts:
        tables[id(table)] = table
        factors[id(table)] = factors.get(id(table), 0.0) + factor
    # Fewer parts make every pass of messages shorter: it reads each part's table.
    return Blend(tuple((factors[key], table) for key, table in tables.items()))
