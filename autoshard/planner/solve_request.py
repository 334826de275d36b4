"""What a planner asks of a problem, and what is found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.patterns.decisions import Decisions
from autoshard.planner.planning_problem import OverlapDiscount
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.regather import Reuse


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """What is to be solved: whose problem, how, what is asked of memory, and the solver's work on one problem."""

    builder: ProblemBuilder
    method: str
    limit: float | None
    prices: np.ndarray | None
    discount: OverlapDiscount | None
    work: int | None

    @property
    def reuse(self) -> Reuse:
        """Of what copies the plan may choose to make anew in the backward half."""
        if self.prices is not None:
            return "all"
        return "none" if self.limit is None else "inputs"


@dataclass(frozen=True, slots=True)
class BlockSolution:
    """Decisions, what the solver minimised (`value`, by the prices asked for), and their cost in seconds."""

    decisions: Decisions
    value: float
    cost: float
    lower_bound: float
    method: str
    interrupted: bool = False

    @property
    def gap(self) -> float:
        return (self.value - self.lower_bound) / max(abs(self.value), 1e-300)
