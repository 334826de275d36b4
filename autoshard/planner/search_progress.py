"""How a search goes, for whoever watches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of a search.

    Attributes:
        phase: what is being done, of a capture too, which has neither cost nor bound.
        cost: seconds of the best plan known of the problem in hand; `inf` without one.
        lower_bound: no plan of that problem costs less.
        seconds: since the planner began.
    """

    phase: str
    cost: float
    lower_bound: float
    seconds: float
