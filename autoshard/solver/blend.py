"""Edges whose table is a sum of other tables, each times a factor: equal layers of a step at prices of their own.

Where the factors differ, so do the tables, but what they are made of is shared. A pass of messages adds up what it
reads; the table itself is made for who asks for it.
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
    """A sum of tables of one shape.

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
        """Strategies of either end."""
        rows, columns = self.parts[0][1].shape
        return rows, columns

    @property
    def diagonal(self) -> Array:
        """What equal strategies cost."""
        return np.asarray(sum(factor * np.diagonal(table) for factor, table in self.parts))

    def at(self, row: int, column: int) -> float:
        """What two strategies cost."""
        return float(sum(factor * table[row, column] for factor, table in self.parts))


@dataclass(frozen=True, slots=True, eq=False)
class BlendedEdge:
    """What the strategies of two nodes cost together, as a sum.

    Attributes:
        source: index of the node of the rows.
        target: index of the node of the columns, another node.
        blend: the table. Edges that cost the same should share one object.
    """

    source: int
    target: int
    blend: Blend

    @property
    def costs(self) -> Array:
        """The table, made once."""
        return self.blend.table

    @property
    def shape(self) -> tuple[int, int]:
        """Strategies of either end."""
        return self.blend.shape

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tables that it is the sum of, and how often each counts."""
        return self.blend.parts

    def at(self, row: int, column: int) -> float:
        """What two strategies cost."""
        return self.blend.at(row, column)


def blend(parts: Iterable[Part]) -> Blend:
    """The sum of some tables; one that comes several times counts so often."""
    factors: dict[int, float] = {}
    tables: dict[int, Array] = {}
    for factor, table in parts:
        tables[id(table)] = table
        factors[id(table)] = factors.get(id(table), 0.0) + factor
    return Blend(tuple((factors[key], table) for key, table in tables.items()))
