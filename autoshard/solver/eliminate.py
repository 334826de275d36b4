"""Exact bucket elimination: min-plus dynamic programming over an elimination order that keeps tables small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from autoshard.solver.buckets import Scope, buckets, spread
from autoshard.solver.core import Core
from autoshard.solver.elimination_order import EliminationOrder, find_order
from autoshard.solver.presolve import REDUCE, presolve
from autoshard.solver.problem import Array, IntArray, SolverError

DEFAULT_CAP = 50_000_000
"""Entries of the largest table that elimination builds."""

_SMALL = 1 << 16
"""Most entries of joint tables that are built whole; the choice of the node is recomputed from their parts.

Larger tables are computed one strategy at a time, and the choice is stored.
"""

_CHEAP = 1.2e7
"""Entries of all tables up to which elimination starts at once, without presolve."""

Factor = tuple[Scope, Array]
Choose = Callable[[IntArray], int]


class WidthError(SolverError):
    """Elimination would need a table larger than the cap."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """An optimum: a choice per node (None if nothing is feasible), and its cost."""

    places: IntArray | None
    cost: float


def eliminate(core: Core, *, cap: float = DEFAULT_CAP) -> Optimum:
    """Solve a core exactly, ignoring memory.

    Nodes are eliminated one after another: the tables of a node are summed, and the minimum over its strategies is a
    table over its neighbours. Where that takes long, the core is presolved first.

    Args:
        core: not changed.
        cap: entries of the largest table allowed, checked before any table is built.

    Raises:
        WidthError: the order found needs a larger table.
    """
    if not core.feasible:
        return Optimum(None, float("inf"))
    # Presolve takes longer than most eliminations, so do it only where tables would be large.
    order = _order(core, min(cap, _CHEAP))
    if order.fits and order.entries <= _CHEAP:
        return run_order(core, order)
    reduced = presolve(core, effort=REDUCE)
    if not reduced.feasible:
        return Optimum(None, float("inf"))
    order = _order(reduced, cap)
    if not order.fits:
        raise WidthError(
            f"elimination needs more than the {cap:.3g} table entries allowed (it came to a table of "
            f"{order.largest:.3g} over {order.width + 1} nodes): the problem is too entangled for one exact pass. Use "
            'method="auto", which bounds and searches, or give fewer strategies per node'
        )
    optimum = run_order(reduced, order)
    return optimum if optimum.places is None else Optimum(reduced.expand(optimum.places, core), optimum.cost)


def _order(core: Core, cap: float) -> EliminationOrder:
    return find_order(dict(enumerate(core.size.tolist())), core.neighbours(), cap)


def run_order(core: Core, order: EliminationOrder) -> Optimum:
    """Return the best choice for a core, by elimination of all nodes in a given order."""
    rank = {node: position for position, (node, _) in enumerate(order.steps)}
    factors: list[Factor] = [((node,), vector) for node, vector in enumerate(core.vectors)]
    for (source, target), table in zip(core.ends.tolist(), core.tables, strict=True):
        turned = rank[source] > rank[target]
        factors.append(((target, source), table.T) if turned else ((source, target), table))
    sizes, constant = core.size.tolist(), core.constant
    minima: list[Factor] = []
    choosers: list[Choose] = []
    tree = buckets(list(rank), factors, itemgetter(0))
    for bucket in tree:
        # Axes in the order of elimination: the node itself first, so that the entries of a strategy are contiguous.
        joint = bucket.scope[::-1]
        terms = [*bucket.terms, *(minima[child] for child in bucket.children)]
        result, choose = _minimum_over(joint, terms, sizes)
        minima.append((joint[1:], result))
        choosers.append(choose)
        if not bucket.rest:
            constant += float(result)
    if not np.isfinite(constant):
        return Optimum(None, float("inf"))
    places = np.zeros(core.nodes, dtype=np.int64)
    # The last node depends on no other, and each earlier node on nodes that are already chosen.
    for bucket, choose in zip(reversed(tree), reversed(choosers), strict=True):
        places[bucket.node] = choose(places)
    return Optimum(places, constant)


def _minimum_over(joint: Scope, factors: list[Factor], sizes: list[int]) -> tuple[Array, Choose]:
    """Return the minimum of the sum of the factors over the first node of `joint`, a table over the others, and a
    chooser of the node."""
    shape = tuple(sizes[member] for member in joint)
    # Narrow factors first, so that partial sums stay small.
    factors = sorted(factors, key=lambda factor: (factor[1].size, factor[0]))
    tables = [spread(table, part, joint) for part, table in factors]
    # A larger joint table is never stored whole.
    if np.prod(shape, dtype=float) > _SMALL:
        return _minimum_by_strategy(joint[1:], shape, tables)
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    # Recomputing one column of the argmin on the way back is cheaper than storing all.
    return np.broadcast_to(total, shape).min(0), _recompute(factors)


def _recompute(factors: list[Factor]) -> Choose:
    """Return a chooser that adds up the factors at the neighbours' values."""

    def choose(places: IntArray) -> int:
        total: Array = np.zeros(())
        for part, table in factors:
            index: tuple[Any, ...] = (slice(None), *(places[neighbour] for neighbour in part[1:]))
            total = total + table[index]
        return int(np.argmin(total))

    return choose


def _minimum_by_strategy(scope: Scope, shape: tuple[int, ...], tables: list[Array]) -> tuple[Array, Choose]:
    """Compute `_minimum_over` for large tables, one strategy at a time, and store the best strategies."""
    result = np.full(shape[1:], np.inf)
    # One byte per entry if possible: this is the largest array of a solve.
    winner = np.zeros(shape[1:], dtype=np.uint8 if shape[0] <= 256 else np.uint32)
    for strategy in range(shape[0]):
        total = np.zeros(())
        for table in tables:
            total = total + (table[strategy] if table.shape[0] > 1 else table[0])
        # Strictly less: the first of equal strategies wins, as with `argmin`.
        better = np.broadcast_to(total < result, shape[1:])
        winner[better] = strategy
        np.minimum(result, total, out=result)
    return result, lambda places: int(winner[tuple(places[neighbour] for neighbour in scope)])
