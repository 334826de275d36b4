"""From a good assignment to a proof: bound, drop what can't be in a better assignment, solve what is left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.bound import Bound, lower_bound
from autoshard.solver.eliminate import WidthError, eliminate
from autoshard.solver.elimination_order import DEFAULT_CAP
from autoshard.solver.local_search import ScoredAssignment, cheaper_of, improve
from autoshard.solver.network import Network
from autoshard.solver.reduce import reduce
from autoshard.solver.solver_budget import UNLIMITED, StepBudget

TOLERANCE = 1e-9
"""Relative difference in cost below which two assignments count as equally good."""


@dataclass(frozen=True, slots=True)
class CertifyResult:
    """An assignment with a bound, and the network of what could still be better.

    Attributes:
        found: the best assignment known.
        bound: no assignment costs less; equal to the cost where the optimum is proved.
        rest: strategies that may still be in a better assignment; None where the optimum is proved.
    """

    best: ScoredAssignment
    bound: float
    rest: Network | None


def certify(
    network: Network,
    start: ScoredAssignment,
    *,
    cap: float = DEFAULT_CAP,
    stretch: StepBudget = UNLIMITED,
    rounds: int = 12,
) -> CertifyResult:
    """Improves an assignment and its bound in turn, until they meet or nothing moves.

    A strategy whose floor (the bound on every assignment that uses it) reaches the cost of the best assignment is
    dropped; that reduces the network, which sharpens the next bound; when it is narrow enough it is solved.

    Args:
        network: left as it is.
        start: a known assignment, `search.NO_ASSIGNMENT` if none is.
        cap: entries of a table for the exact solve.
        stretch: after whose end no further round starts.
        rounds: bounds computed, at most.
    """
    best, proved = start, -np.inf
    rest = network.copy()
    for _ in range(rounds):
        rest = reduce(rest)
        if not rest.feasible:
            return CertifyResult(best, best.cost, None)
        exact = _solve_exactly(rest, cap)
        if exact is not None:
            best = cheaper_of(best, exact)
            return CertifyResult(best, best.cost, None)
        bound = lower_bound(rest, upper=best.cost, stretch=stretch)
        proved = max(proved, min(bound.value, best.cost))
        improved = _improve_rounded(network, bound, best, stretch)
        progress = improved.improves(best)
        best = improved
        if proved >= _target(best):
            return CertifyResult(best, best.cost, None)
        fixed = drop_by_bound(rest, bound, _target(best))
        if stretch.is_over or stretch.is_close(best.cost, proved) or not (progress or _is_smaller(rest, fixed)):
            return CertifyResult(best, proved, fixed)
        rest = fixed
    return CertifyResult(best, proved, rest)


def _solve_exactly(rest: Network, cap: float) -> ScoredAssignment | None:
    try:
        exact = eliminate(rest, cap=cap)
    except WidthError:
        return None
    return ScoredAssignment(exact.choices, exact.cost)


def _improve_rounded(network: Network, bound: Bound, best: ScoredAssignment, stretch: StepBudget) -> ScoredAssignment:
    """The best assignment after the bound's rounded one was improved too, if it is at all near."""
    candidate = ScoredAssignment(bound.choices, bound.cost)
    if not bound.choices or bound.cost > best.cost + abs(best.cost) * 0.1:
        return best
    return cheaper_of(best, improve(network, candidate, stretch=stretch))


def _target(best: ScoredAssignment) -> float:
    """A bound that reaches this proves the assignment."""
    return best.cost - TOLERANCE * abs(best.cost) if np.isfinite(best.cost) else float("inf")


def drop_by_bound(network: Network, bound: Bound, target: float) -> Network:
    """Drops every strategy whose floor reaches the target."""
    rows = {node: np.flatnonzero(floor < target) for node, floor in bound.floors.items()}
    return network.restrict(rows)


def _is_smaller(before: Network, after: Network) -> bool:
    """Whether at least one strategy in fifty is gone."""
    old = sum(map(len, before.vectors.values()))
    return sum(map(len, after.vectors.values())) < 0.98 * old
