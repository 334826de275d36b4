"""Lower bounds of networks by message passing, and proofs of optimality by them.

The bound is for the problem and for each strategy. A proof drops the strategies that no better assignment uses, and
solves the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.eliminate import DEFAULT_CAP, WidthError, eliminate
from autoshard.solver.local_search import ScoredAssignment, cheaper_of, improve
from autoshard.solver.network import Network, reduce
from autoshard.solver.problem import Array
from autoshard.solver.solver_budget import UNLIMITED, Budget
from autoshard.solver.trws import Messages

_PATIENCE = 40
"""Iterations in which a bound must move by a twentieth of the gap: what it drops saves more time than it takes."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of a network.

    Attributes:
        value: no assignment of the network costs less.
        floors: node -> per remaining strategy, a lower bound of all assignments that use it.
        choices: the best assignment rounded meanwhile (node -> strategy of the problem), including the nodes that were
            reduced away; empty if none was finite.
        cost: its cost in the network.
        iterations: number of forward and backward passes.
    """

    value: float
    floors: dict[int, Array]
    choices: dict[int, int]
    cost: float
    iterations: int


def lower_bound(
    core: Network, *, upper: float = float("inf"), iterations: int = 200, budget: Budget = UNLIMITED
) -> Bound:
    """Return a lower bound of a reduced network by message passing.

    Args:
        core: a feasible network after `reduce` (every strategy supported by every neighbour).
        upper: cost of a known assignment: the search ends when the bound reaches it.
        iterations: forward and backward passes, at most.
        budget: no further iteration starts after its end.
    """
    nodes = sorted(core.vectors)
    messages = Messages(core.to_problem(nodes), range(len(nodes)))
    relaxed = messages.run(iterations, upper=upper - core.offset, patience=_PATIENCE, budget=budget)
    floors = {node: floors + core.offset for node, floors in zip(nodes, messages.floors(), strict=True)}
    chosen = zip(nodes, relaxed.assignment, strict=False)
    choices = core.expand({node: int(core.labels[node][place]) for node, place in chosen}) if relaxed.assignment else {}
    return Bound(relaxed.bound + core.offset, floors, choices, relaxed.cost + core.offset, relaxed.iterations)


TOLERANCE = 1e-9
"""Relative difference in cost below which two assignments count as equally good."""


@dataclass(frozen=True, slots=True)
class CertifyResult:
    """An assignment with a bound, and the network of strategies that a better one may use.

    Attributes:
        best: the best assignment known.
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
    cap: float | None = DEFAULT_CAP,
    budget: Budget = UNLIMITED,
    rounds: int = 12,
) -> CertifyResult:
    """Improve an assignment and its bound in turn, until they meet or nothing moves.

    A strategy is dropped if its floor, the bound of all assignments that use it, reaches the cost of the best
    assignment. That reduces the network, which tightens the next bound. A network that is narrow enough is solved
    exactly.

    Args:
        network: left as it is.
        start: a known assignment, `NO_ASSIGNMENT` if none is known.
        cap: entries of a table for the exact solve; None for no exact solve.
        budget: no further round starts after its end.
        rounds: bounds computed, at most.
    """
    best, proved = start, -np.inf
    rest = network.copy()
    for _ in range(rounds):
        rest = reduce(rest)
        # Strategies were dropped only where no better assignment uses them: nothing left means that the best one is
        # optimal.
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
        # An assignment far above the best one is not worth the time; a tenth is a guess that works.
        if bound.choices and bound.cost <= best.cost + abs(best.cost) * 0.1:
            candidate = ScoredAssignment(bound.choices, bound.cost)
            # In the whole network: the rounded assignment may be improved by strategies that were dropped from the
            # rest.
            improved = cheaper_of(best, improve(network, candidate, budget=budget))
        progress = improved.improves(best)
        best = improved
        if proved >= _target(best):
            return CertifyResult(best, best.cost, None)
        target = _target(best)
        fixed = rest.restrict({node: np.flatnonzero(floor < target) for node, floor in bound.floors.items()})
        old, new = (sum(map(len, part.vectors.values())) for part in (rest, fixed))
        # One strategy in fifty must go for another round; a guess that works.
        if budget.is_over or budget.is_close(best.cost, proved) or not (progress or new < 0.98 * old):
            return CertifyResult(best, proved, fixed)
        rest = fixed
    return CertifyResult(best, proved, rest)


def _eliminate(rest: Network, cap: float) -> ScoredAssignment | None:
    """Return the optimum of a network; None if it is too wide."""
    try:
        solved = eliminate(rest, cap=cap)
    except WidthError:
        return None
    return ScoredAssignment(solved.choices, solved.cost)


def _target(best: ScoredAssignment) -> float:
    """Return the bound that proves the assignment."""
    return best.cost - TOLERANCE * abs(best.cost) if np.isfinite(best.cost) else float("inf")
