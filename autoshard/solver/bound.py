"""Lower bounds of cores by message passing, and proofs of optimality by them.

The bound is for the problem and for each strategy. A proof drops the strategies that no better assignment uses, and
solves the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.core import Core
from autoshard.solver.eliminate import DEFAULT_CAP, WidthError, eliminate
from autoshard.solver.local_search import ScoredAssignment, cheaper_of, improve, score
from autoshard.solver.presolve import REDUCE, presolve
from autoshard.solver.problem import Array
from autoshard.solver.solver_budget import UNLIMITED, Budget
from autoshard.solver.trws import Messages

_PATIENCE = 40
"""Iterations in which a bound must close a twentieth of the gap: dropped strategies save more time than it takes."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of a core.

    Attributes:
        value: no assignment of the core costs less.
        floors: per strategy, a lower bound of all assignments that use it.
        best: the best rounded assignment, `NO_ASSIGNMENT` if none was finite.
        iterations: number of forward and backward passes.
    """

    value: float
    floors: Array
    best: ScoredAssignment
    iterations: int


def lower_bound(core: Core, *, upper: float = float("inf"), iterations: int = 200, budget: Budget = UNLIMITED) -> Bound:
    """Return a lower bound of a core by message passing.

    Args:
        core: a feasible core after `presolve` (every strategy supported by every neighbour).
        upper: cost of a known assignment: the search ends when the bound reaches it.
        iterations: forward and backward passes, at most.
        budget: no further iteration starts after its end.
    """
    messages = Messages(core.to_problem(), range(core.nodes))
    messages.run(iterations, upper=upper - core.constant, patience=_PATIENCE, budget=budget)
    floors = np.concatenate([*messages.floors(), np.zeros(0)]) + core.constant
    return Bound(messages.bound + core.constant, floors, score(core, messages.best), messages.iterations)


TOLERANCE = 1e-9
"""Relative difference in cost below which two assignments count as equally good."""


@dataclass(frozen=True, slots=True)
class CertifyResult:
    """An assignment with a bound, and the core of strategies that a better one may use.

    Attributes:
        best: the best assignment known.
        bound: no assignment costs less; equal to the cost where the optimum is proved.
        rest: strategies that may still be in a better assignment; None where the optimum is proved.
    """

    best: ScoredAssignment
    bound: float
    rest: Core | None


def certify(
    core: Core,
    start: ScoredAssignment,
    *,
    cap: float | None = DEFAULT_CAP,
    budget: Budget = UNLIMITED,
    rounds: int = 12,
) -> CertifyResult:
    """Improve an assignment and its bound in turn, until they meet or neither improves.

    A strategy is dropped if its floor, the bound of all assignments that use it, reaches the cost of the best
    assignment. Presolve then makes the core smaller, which tightens the next bound. A core that is narrow enough is
    solved exactly.

    Args:
        core: not changed; with its dominated strategies, which the start may use.
        start: a known assignment, `NO_ASSIGNMENT` if none is known.
        cap: entries of a table for the exact solve; None for no exact solve.
        budget: no further round starts after its end.
        rounds: bounds computed, at most.
    """
    best, proved = start, -np.inf
    rest = core
    for _ in range(rounds):
        rest = presolve(rest, effort=REDUCE)
        # Only strategies that no better assignment uses were dropped: if none is left, the best one is optimal.
        if not rest.feasible:
            return CertifyResult(best, best.cost, None)
        solved = None if cap is None else _eliminate(rest, cap)
        if solved is not None:
            best = cheaper_of(best, solved)
            return CertifyResult(best, best.cost, None)
        bound = lower_bound(rest, upper=best.cost, budget=budget)
        proved = max(proved, min(bound.value, best.cost))
        if proved >= _target(best):
            return CertifyResult(best, best.cost, None)
        improved = best
        # An assignment far above the best one is not worth the time.
        if bound.best.choices and bound.best.cost <= best.cost + abs(best.cost) * 0.1:
            # In the whole core: strategies dropped from the rest may improve the rounded assignment.
            improved = cheaper_of(best, improve(core, bound.best, budget=budget))
        progress = improved.improves(best)
        best = improved
        if proved >= _target(best):
            return CertifyResult(best, best.cost, None)
        target = _target(best)
        out = bound.floors >= target
        fixed = rest.forbid(out)
        # At least one strategy in fifty must be dropped for another round.
        if budget.is_over or budget.is_close(best.cost, proved) or not (progress or out.mean() > 0.02):
            return CertifyResult(best, proved, fixed)
        rest = fixed
    return CertifyResult(best, proved, rest)


def _eliminate(rest: Core, cap: float) -> ScoredAssignment | None:
    """Return the optimum of a core; None if it is too wide."""
    try:
        solved = eliminate(rest, cap=cap)
    except WidthError:
        return None
    return score(rest, solved.places, solved.cost)


def _target(best: ScoredAssignment) -> float:
    """Return the bound that proves the assignment."""
    return best.cost - TOLERANCE * abs(best.cost) if np.isfinite(best.cost) else float("inf")
