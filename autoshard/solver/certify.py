"""From a good assignment to a proof: bound, drop what can't be in a better assignment, solve what is left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.bound import Bound, lower_bound
from autoshard.solver.course import ENDLESS, Stretch
from autoshard.solver.eliminate import WidthError, eliminate
from autoshard.solver.network import Network
from autoshard.solver.order import DEFAULT_CAP
from autoshard.solver.reduce import reduce
from autoshard.solver.search import Found, better, improve

TOLERANCE = 1e-9
"""Relative difference in cost below which two assignments count as equally good."""


@dataclass(frozen=True, slots=True)
class Certified:
    """An assignment with a bound, and the network of what could still be better.

    Attributes:
        found: the best assignment known.
        bound: no assignment costs less; equal to the cost where the optimum is proved.
        rest: strategies that may still be in a better assignment; None where the optimum is proved.
    """

    found: Found
    bound: float
    rest: Network | None


def certify(
    network: Network, start: Found, *, cap: float = DEFAULT_CAP, stretch: Stretch = ENDLESS, rounds: int = 12
) -> Certified:
    """Improves an assignment and its bound in turn, until they meet or nothing moves.

    A strategy whose floor (the bound on every assignment that uses it) reaches the cost of the best assignment is
    dropped; that reduces the network, which sharpens the next bound; when it is narrow enough it is solved.

    Args:
        network: left as it is.
        start: a known assignment, `search.NOTHING` if none is.
        cap: entries of a table for the exact solve.
        stretch: after whose end no further round starts.
        rounds: bounds computed, at most.
    """
    best, proved = start, -np.inf
    rest = network.copy()
    for _ in range(rounds):
        rest = reduce(rest)
        if not rest.feasible:
            return Certified(best, best.cost, None)
        exact = _exact(rest, cap)
        if exact is not None:
            best = better(best, exact)
            return Certified(best, best.cost, None)
        bound = lower_bound(rest, upper=best.cost, stretch=stretch)
        proved = max(proved, min(bound.value, best.cost))
        improved = _round_up(network, bound, best, stretch)
        progress = improved.improves(best)
        best = improved
        if proved >= _target(best):
            return Certified(best, best.cost, None)
        fixed = fix(rest, bound, _target(best))
        if stretch.over or stretch.close(best.cost, proved) or not (progress or _shrank(rest, fixed)):
            return Certified(best, proved, fixed)
        rest = fixed
    return Certified(best, proved, rest)


def _exact(rest: Network, cap: float) -> Found | None:
    try:
        exact = eliminate(rest, cap=cap)
    except WidthError:
        return None
    return Found(exact.choices, exact.cost)


def _round_up(network: Network, bound: Bound, best: Found, stretch: Stretch) -> Found:
    """The best assignment after the bound's rounded one was improved too, if it is at all near."""
    candidate = Found(bound.choices, bound.cost)
    if not bound.choices or bound.cost > best.cost + abs(best.cost) * 0.1:
        return best
    return better(best, improve(network, candidate, stretch=stretch))


def _target(best: Found) -> float:
    """A bound that reaches this proves the assignment."""
    return best.cost - TOLERANCE * abs(best.cost) if np.isfinite(best.cost) else float("inf")


def fix(network: Network, bound: Bound, target: float) -> Network:
    """Drops every strategy whose floor reaches the target."""
    rows = {node: np.flatnonzero(floor < target) for node, floor in bound.floors.items()}
    return network.restricted(rows)


def _shrank(before: Network, after: Network) -> bool:
    """Whether at least one strategy in fifty is gone."""
    old = sum(map(len, before.vectors.values()))
    return sum(map(len, after.vectors.values())) < 0.98 * old
