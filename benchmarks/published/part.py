"""`Part`: some tables of one paper, and `Row`: a quantity as published and as predicted here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

TOLERANCE = 0.2
"""By how much of the published value ours may differ."""


@dataclass(frozen=True)
class Row:
    """One quantity of a paper.

    Attributes:
        source: where it stands.
        quantity: what it is.
        published: as the paper's text gives it; None where only a figure shows it.
        ours: as predicted; None where there is no plan.
    """

    source: str
    quantity: str
    published: float | None
    ours: float | None

    @property
    def off(self) -> float | None:
        """By how much of the published value ours differs from it."""
        return None if self.published is None or self.ours is None else self.ours / self.published - 1

    @property
    def is_near(self) -> bool:
        """Whether ours is within the tolerance of the published value, or nothing was published as a number."""
        return self.published is None or (self.off is not None and abs(self.off) <= TOLERANCE)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        published = "in the figure" if self.published is None else f"{self.published:.3g}"
        ours = "nothing fits" if self.ours is None else f"{self.ours:.3g}"
        apart = "" if self.off is None else f"{self.off:+.0%}"
        return self.source, self.quantity, published, ours, apart if self.is_near else f"{apart} (further than 20 %)"


@dataclass(frozen=True)
class Part:
    """Some tables of one paper.

    Attributes:
        title: what they are about.
        assumed: what the paper does not say, and what differs here.
        rows: makes them, for a share of the layers of deep models.
        differs: why rows are further than the tolerance from the paper; empty where none is.
    """

    title: str
    assumed: str
    rows: Callable[[float], Iterator[Row]]
    differs: str = ""
