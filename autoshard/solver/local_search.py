"""Search for good assignments of problems too wide for one exact pass: axis by axis, then large neighbourhoods."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.solver.chains import starts
from autoshard.solver.core import Core, CoreArrays, Mask
from autoshard.solver.eliminate import WidthError, eliminate
from autoshard.solver.presolve import FOLD, presolve
from autoshard.solver.problem import IntArray
from autoshard.solver.solver_budget import UNLIMITED, Budget

_ORDERS = 6
"""Orders of mesh axes tried as starts: all of them up to three axes."""

_AXIS_CAP = 10_000_000
"""Entries of a table when one axis is solved."""

_FORESTS, _PATIENCE = 100, 6
"""Neighbourhoods of a search, and searches without improvement after which it ends. With half of both, six of the
planner's forty wide problems end at a more expensive assignment."""

_MOST = 200_000
"""Most table entries that the solve of a neighbourhood may read: with five times as many, searches take twice as long
without a gain."""

_AXIS_WORK = 5
"""Units of work of an axis per table entry."""

_IMPROVEMENT = 1e-12
"""Relative improvement below which an assignment is no better: the rounding of sums."""


@dataclass(frozen=True, slots=True)
class ScoredAssignment:
    """An assignment (a strategy of the problem per node) and its cost; empty and `inf` where none is known."""

    choices: tuple[int, ...]
    cost: float

    def improves(self, other: ScoredAssignment) -> bool:
        """Return True if this assignment is better by more than rounding."""
        if not np.isfinite(other.cost):
            return bool(np.isfinite(self.cost))
        return self.cost < other.cost - _IMPROVEMENT * abs(other.cost)


NO_ASSIGNMENT = ScoredAssignment((), float("inf"))


def score(core: Core, places: IntArray | None, cost: float | None = None) -> ScoredAssignment:
    """Map a choice for a core, with its cost if known, to an assignment of the problem; `NO_ASSIGNMENT` if it is
    forbidden."""
    if places is None:
        return NO_ASSIGNMENT
    cost = core.value(places) if cost is None else cost
    return ScoredAssignment(tuple(core.expand(places).tolist()), cost) if np.isfinite(cost) else NO_ASSIGNMENT


def cheaper_of(first: ScoredAssignment, second: ScoredAssignment) -> ScoredAssignment:
    """Return the cheaper assignment, the first one if they are equal up to rounding."""
    return second if second.improves(first) else first


def alternate(
    core: Core,
    components: Sequence[IntArray],
    *,
    start: ScoredAssignment = NO_ASSIGNMENT,
    budget: Budget = UNLIMITED,
) -> ScoredAssignment:
    """Solve one mesh axis after another exactly, with fixed labels on the others, until no axis improves.

    Every order of axes gives a start: the first axis is solved as if the others could be chosen freely at every node
    and edge, the second given the first, and so on. With fixed labels a node can always keep its current strategy, so
    the cost never rises.

    Args:
        core: the problem with its dominated strategies.
        components: per node of the problem the labels [strategies, mesh axes].
        start: a known assignment.
        budget: no further exact solve starts after its end.
    """
    if not core.nodes:
        return score(core, np.zeros(0, dtype=np.int64))
    labels = _labels(core, components)
    axes = range(labels.shape[1])
    best = _descend(core, labels, start, tuple(axes), budget) if start.choices else start
    for sequence in itertools.islice(itertools.permutations(axes), _ORDERS):
        if budget.is_over:
            break
        budget.spend(_AXIS_WORK * len(axes) * core.cells)
        candidate = _initial_assignment(core, labels, sequence)
        if candidate.choices:
            best = cheaper_of(best, _descend(core, labels, candidate, sequence, budget))
    return best


def _labels(core: Core, components: Sequence[IntArray]) -> IntArray:
    """Return the labels [strategies of all nodes, mesh axes] of a core."""
    nodes, strategies = core.origins()
    begins = starts(np.array([len(labels) for labels in components], dtype=np.int64))
    result: IntArray = np.concatenate(components)[begins[nodes] + strategies]
    return result


def _initial_assignment(core: Core, labels: IntArray, sequence: tuple[int, ...]) -> ScoredAssignment:
    """Solve the axes in sequence, each under the labels chosen before and with the later axes free."""
    remaining = core
    for axis in sequence:
        projected, names = _project_axis(remaining, labels[:, axis])
        try:
            places = eliminate(projected, cap=_AXIS_CAP).places
        except WidthError:
            return NO_ASSIGNMENT
        if places is None:
            return NO_ASSIGNMENT
        # Later axes choose among the strategies with this axis's label.
        chosen = labels[:, axis] == names[projected.offset[:-1] + places][remaining.owner]
        remaining, labels = remaining.restrict(chosen), labels[chosen]
    # Strategies may have equal labels on all axes: take the cheapest.
    return score(remaining, np.array([vector.argmin() for vector in remaining.vectors], dtype=np.int64))


def _project_axis(core: Core, labels: IntArray) -> tuple[Core, IntArray]:
    """Return the core whose strategies are the labels of one axis, each at its least cost, and these labels.

    The minima of nodes and edges are independent: the projection is a relaxation in which the other axes are chosen
    separately for every node and edge. It only guides the first labels; costs are exact from `_descend` on.
    """
    owner = core.owner
    order = np.lexsort((labels, owner))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (np.diff(owner[order]) != 0) | (np.diff(labels[order]) != 0)
    first = np.flatnonzero(is_first)
    size = np.bincount(owner[order][first], minlength=core.nodes)
    # Per node the positions sorted by label, and the start of each label in them.
    rows = np.split(order - core.offset[owner[order]], core.offset[1:-1])
    groups = np.split(first - core.offset[owner[order][first]], starts(size)[1:-1])
    tables = []
    for (source, target), table in zip(core.ends.tolist(), core.tables, strict=True):
        least = np.minimum.reduceat(table[rows[source]], groups[source], axis=0)
        tables.append(np.minimum.reduceat(least[:, rows[target]], groups[target], axis=1).ravel())
    projected = replace(
        core,
        size=size,
        offset=starts(size),
        cost=np.minimum.reduceat(core.cost[order], first),
        start=starts(np.array([len(table) for table in tables], dtype=np.int64)),
        table=np.concatenate([*tables, np.zeros(0)]),
        stages=(),
    )
    return projected, labels[order][first]


def _descend(
    core: Core, labels: IntArray, start: ScoredAssignment, sequence: tuple[int, ...], budget: Budget
) -> ScoredAssignment:
    """Solve axis after axis in turn, until a whole round improves nothing."""
    best = start
    unimproved = 0
    for axis in itertools.cycle(sequence):
        if unimproved >= len(sequence) or budget.is_over:
            break
        candidate = _solve_axis(core, labels, best, axis, budget)
        unimproved = 0 if candidate.improves(best) else unimproved + 1
        best = cheaper_of(best, candidate)
    return best


def _solve_axis(core: Core, labels: IntArray, current: ScoredAssignment, axis: int, budget: Budget) -> ScoredAssignment:
    """Return the optimum over one axis, with every node keeping its labels on the others."""
    places = core.contract(np.array(current.choices))
    same: Mask = labels == labels[core.offset[:-1] + places][core.owner]
    # Agreement on every other axis.
    same[:, axis] = True
    restricted = core.restrict(np.all(same, axis=1))
    budget.spend(_AXIS_WORK * core.cells)
    try:
        exact = eliminate(restricted, cap=_AXIS_CAP)
    except WidthError:
        # Too wide for one exact pass: solve neighbourhoods instead.
        return improve(presolve(restricted, effort=FOLD), current, patience=1, budget=budget)
    return score(restricted, exact.places, exact.cost)


def improve(
    core: Core,
    start: ScoredAssignment,
    *,
    patience: int = _PATIENCE,
    most: int = _MOST,
    seed: int = 0,
    budget: Budget = UNLIMITED,
) -> ScoredAssignment:
    """Solve random trees of nodes exactly, with all others fixed, repeatedly; see `Descent`.

    Args:
        core: without a limit, after a presolve that drops no dominated strategies, which the start may use.
        start: a finite assignment of the problem.
        patience: searches of `_FORESTS` neighbourhoods without improvement after which the search ends.
        most: table entries that the solve of a neighbourhood may read.
        seed: of the random numbers.
        budget: no further search starts after its end.
    """
    # A presolved core has no negative costs, so no assignment costs less than the constant.
    if not start.cost > core.constant:
        return start
    from autoshard.solver.flat.descent import Descent  # with numba

    descent = Descent(core, CoreArrays.of(core), start.cost - core.constant, seed, most)
    descent.begin(core.contract(np.array(start.choices)), np.zeros(len(core.base)))
    descent.search(patience, budget, forests=_FORESTS)
    return cheaper_of(start, score(core, descent.best, descent.cost))


def soften(core: Core) -> Core:
    """Return a core in which forbidden pairs have a finite cost above that of all allowed choices together."""
    largest = [np.abs(values[np.isfinite(values)]).max(initial=0.0) for values in (*core.tables, *core.vectors)]
    # Twice the sum of all costs: no two choices of allowed pairs differ by more.
    penalty = 1.0 + 2.0 * float(sum(largest))
    return replace(core, table=np.where(np.isinf(core.table), penalty, core.table))
