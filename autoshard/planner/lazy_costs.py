"""A problem with lower bounds as prices, which are replaced by exact prices where solutions use them.

On three axes and more there are too many pairs of specs to find a path for each, but few of them matter. A problem at
lower bounds of the prices has an optimum that bounds that of the exact problem. If its solution counts on a price that
is too low, the exact one takes its place, and the problem is solved again. A solution all of whose prices are exact is
the best of the exact problem too, up to the gap that is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.planner.planning_problem import BuiltProblem, HideableKind, OverlapDiscount, ReshardEdge
from autoshard.reshard.path import Resharder
from autoshard.solver import Edge
from autoshard.solver.trws import Messages

_PRICE_TOLERANCE = 1e-9  # relative difference up to which two prices are equal


@dataclass(frozen=True, slots=True, eq=False)
class OptionScan:
    """The options near the best at one discount.

    Attributes:
        discount: the price of hidden seconds; None if they count in full.
        near: per variable of the problem, or of its tied layers, the options that are near the best.
    """

    discount: OverlapDiscount | None
    near: Sequence[np.ndarray]

    def price(self, kind: HideableKind) -> float | None:
        """Return the price of a hidden second of a kind; None if the discount is on another kind."""
        if self.discount is None:
            return 1.0
        return self.discount.price if self.discount.kind == kind else None


@dataclass(frozen=True, eq=False)
class LazyCosts:
    """A problem at prices that may be too low.

    Attributes:
        built: the problem, with the exact prices that are known.
        messages: the last messages along its edges and against them (of its tied layers, if there are any). They are a
            good start for the next messages.
        scans: scans of all options at several discounts, in the order in which they were made.
    """

    built: BuiltProblem
    messages: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None
    scans: tuple[OptionScan, ...] = ()

    def with_scan(self, discount: OverlapDiscount | None, near: Sequence[np.ndarray], messages: Messages) -> LazyCosts:
        """Return the same problem with one more scan, and the messages that it led to."""
        scans = (*self.scans, OptionScan(discount, near))
        return replace(self, messages=(messages.along, messages.against), scans=scans)

    def near_options(self, discount: OverlapDiscount) -> list[np.ndarray] | None:
        """Return the options near the best at any price of a kind; None without scans at a lower and a higher price."""
        scans = [scan for scan in self.scans if scan.price(discount.kind) is not None]
        prices = [price for scan in scans if (price := scan.price(discount.kind)) is not None]
        if not prices or not min(prices) <= discount.price <= max(prices):
            return None
        return [np.unique(np.concatenate(options)) for options in zip(*(scan.near for scan in scans), strict=True)]

    def with_exact_costs(self, assignment: Sequence[int], resharder: Resharder) -> LazyCosts | None:
        """Return the problem with the exact prices of an assignment's reshards; None if they were exact already."""
        exact_costs: dict[int, list[_ExactCosts]] = {}  # by identity of the edge's table
        seen: set[tuple[int, int, int]] = set()
        edges = self.built.problem.edges
        used: dict[tuple[int, int, int], int] = {}  # equal layers use the same entries of the same tables
        for number in self.built.reshard_edges:
            edge = edges[number]
            used.setdefault((id(edge.costs), assignment[edge.source], assignment[edge.target]), number)
        for (_, row, column), number in used.items():
            edge, reshard = edges[number], self.built.reshard_edges[number]
            source, target = reshard.sources.index[row], reshard.targets.index[column]
            if (id(edge.costs), source, target) in seen:
                continue
            seen.add((id(edge.costs), source, target))
            known = exact_costs.setdefault(id(edge.costs), [])
            # An earlier search for paths has found this price too.
            if any(exact.covers(source, target) for exact in known):
                continue
            exact = _find_exact_costs(reshard, int(source), int(target), resharder)
            if exact.price(source, target) > edge.costs[row, column] + _PRICE_TOLERANCE * abs(edge.costs[row, column]):
                known.append(exact)
        if not any(exact_costs.values()):
            return None
        return replace(self, built=self._replace_costs(exact_costs))

    def _replace_costs(self, exact_costs: dict[int, list[_ExactCosts]]) -> BuiltProblem:
        edges, hideable = list(self.built.problem.edges), dict(self.built.hideable)
        raised = _memoize_by_identity(_raise_to_exact_costs)
        for number, reshard in self.built.reshard_edges.items():
            edge = edges[number]
            known = exact_costs.get(id(edge.costs))
            if known:
                edges[number] = Edge(edge.source, edge.target, raised(edge.costs, reshard, known))
                if number in hideable:
                    seconds = raised(hideable[number].seconds, reshard, known)
                    hideable[number] = replace(hideable[number], seconds=seconds)
        return replace(self.built, problem=replace(self.built.problem, edges=tuple(edges)), hideable=hideable)


@dataclass(frozen=True, eq=False)
class _ExactCosts:
    """Exact prices from some of the distinct specs of an edge's source to some of its target."""

    rows: np.ndarray
    columns: np.ndarray
    seconds: np.ndarray

    def covers(self, row: int, column: int) -> bool:
        return row in self.rows and column in self.columns

    def price(self, row: int, column: int) -> float:
        return float(self.seconds[np.searchsorted(self.rows, row), np.searchsorted(self.columns, column)])


def _find_exact_costs(reshard: ReshardEdge, row: int, column: int, resharder: Resharder) -> _ExactCosts:
    """Return the exact prices from one spec to another, and to all specs whose paths one search finds together."""
    exact = resharder.gradients if reshard.gradient else resharder
    meta, source, targets = reshard.meta, reshard.sources.distinct[row], reshard.targets.distinct
    columns = np.array(exact.same_graph_positions(meta.shape, targets, column))
    seconds = exact.seconds(meta.shape, meta.dtype.itemsize, [source], [targets[column] for column in columns])
    return _ExactCosts(np.array([row]), columns, seconds)


def _raise_to_exact_costs(costs: np.ndarray, reshard: ReshardEdge, exact_costs: Sequence[_ExactCosts]) -> np.ndarray:
    known = np.zeros((len(reshard.sources.distinct), len(reshard.targets.distinct)))
    for exact in exact_costs:
        known[np.ix_(exact.rows, exact.columns)] = exact.seconds
    # The maximum leaves forbidden pairs infinite.
    return np.maximum(costs, known[np.ix_(reshard.sources.index, reshard.targets.index)])


def _memoize_by_identity(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return a function with one result per first argument, so that equal layers go on sharing their tables."""
    results: dict[int, np.ndarray] = {}

    def lookup(first: np.ndarray, *others: object) -> np.ndarray:
        if id(first) not in results:
            results[id(first)] = function(first, *others)
        return results[id(first)]

    return lookup
