"""Requests of a planner to the solver, and their solutions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.patterns.decisions import Decisions
from autoshard.planner.planning_problem import OverlapDiscount
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.regather import Reuse


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """A problem to solve.

    Attributes:
        builder: builds the problem.
        method: a method of the solver.
        limit: bytes that operators and parameters may hold at any moment; None for no limit.
        prices: seconds per byte of memory at every moment; None if memory has no price.
        discount: the price of hidden collectives of a kind; None if they count in full.
        work: the solver's work limit on one problem; None for no limit.
    """

    builder: ProblemBuilder
    method: str
    limit: float | None
    prices: np.ndarray | None
    discount: OverlapDiscount | None
    work: int | None

    @property
    def reuse(self) -> Reuse:
        """The copies that the plan may gather again in the backward half."""
        if self.prices is not None:
            return "all"
        return "none" if self.limit is None else "inputs"


@dataclass(frozen=True, slots=True)
class BlockSolution:
    """Decisions that solve a problem.

    Attributes:
        decisions: the decisions.
        value: the objective of the solver, at the requested prices.
        cost: seconds of the step, without prices.
        lower_bound: a lower bound of `value`.
        method: the method that found it.
        interrupted: True if the search was interrupted.
    """

    decisions: Decisions
    value: float
    cost: float
    lower_bound: float
    method: str
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """Relative gap between value and bound."""
        return (self.value - self.lower_bound) / max(abs(self.value), 1e-300)
