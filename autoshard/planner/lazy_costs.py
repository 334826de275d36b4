"""A problem at loose prices that learns exact ones where its answers use them.

On three axes and more there are too many pairs of specs to find a path for each, but few of them matter. Prices that
no path is below make a problem whose optimum bounds that of the exact one. Where its answer counts on a price that is
too low, the exact one takes its place, and the next answer is looked for. An answer all of whose prices are exact is,
as far as it is proved, the best of the exact problem too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.planner.planning_problem import BuiltProblem, HideableKind, OverlapDiscount, ReshardEdge
from autoshard.reshard.path import Resharder
from autoshard.solver import Edge
from autoshard.solver.trws import Messages

_PRICE_TOLERANCE = 1e-9
"""Relative difference up to which two prices are one."""


@dataclass(frozen=True, slots=True, eq=False)
class OptionScan:
    """What was seen of all options of the problem, or of its tied layers, where hidden seconds have one price.

    Attributes:
        hiding: what hidden seconds count; None where they count in full.
        near: per variable, the options that are near the best.
    """

    discount: OverlapDiscount | None
    near: Sequence[np.ndarray]

    def price(self, kind: HideableKind) -> float | None:
        """What a hidden second of a kind of collectives counts; None where one of another kind counts less."""
        if self.discount is None:
            return 1.0
        return self.discount.price if self.discount.kind == kind else None


@dataclass(frozen=True, eq=False)
class LazyCosts:
    """A problem at prices that may be too low, and what its answers have taught.

    Attributes:
        built: the problem, with the exact prices known so far.
        messages: along every edge and against it, of the problem (of its tied layers, if there are any), as they were
            passed last. Those of an answer are a good start to the next.
        glances: at some prices of hidden seconds, in the order in which they were made.
    """

    built: BuiltProblem
    messages: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None
    scans: tuple[OptionScan, ...] = ()

    def with_scan(self, hiding: OverlapDiscount | None, near: Sequence[np.ndarray], messages: Messages) -> LazyCosts:
        """With what was seen of all options at a price, and the messages that told it."""
        return replace(self, messages=(messages.along, messages.against), scans=(*self.scans, OptionScan(hiding, near)))

    def near_options(self, hiding: OverlapDiscount) -> list[np.ndarray] | None:
        """The options that are near the best at any price, if it was looked for at a lower and at a higher one."""
        same = [glance for glance in self.scans if glance.price(hiding.kind) is not None]
        prices = [price for glance in same if (price := glance.price(hiding.kind)) is not None]
        if not prices or not min(prices) <= hiding.price <= max(prices):
            return None
        every = zip(*(glance.near for glance in same), strict=True)
        return [np.unique(np.concatenate(options)) for options in every]

    def discounted_problem(self, hiding: OverlapDiscount | None) -> BuiltProblem:
        """The problem in which hidden collectives count so."""
        return self.built if hiding is None else self.built.with_discount(hiding)

    def with_exact_costs(self, assignment: Sequence[int], resharder: Resharder) -> LazyCosts | None:
        """With the exact prices of what an assignment uses, and of what goes the same ways; None if it knew them."""
        lessons: dict[int, list[_ExactCosts]] = {}  # by table
        seen: set[tuple[int, int, int]] = set()
        edges = self.built.problem.edges
        used: dict[tuple[int, int, int], int] = {}  # equal layers use the same entries of the same tables
        for number in self.built.reshard_edges:
            edge = edges[number]
            used.setdefault((id(edge.costs), assignment[edge.source], assignment[edge.target]), number)
        for (_, row, column), number in used.items():
            edge, crossing = edges[number], self.built.reshard_edges[number]
            source, target = crossing.sources.index[row], crossing.targets.index[column]
            if (id(edge.costs), source, target) in seen:
                continue
            seen.add((id(edge.costs), source, target))
            learned = lessons.setdefault(id(edge.costs), [])
            if any(lesson.covers(source, target) for lesson in learned):
                continue
            lesson = _find_exact_costs(crossing, int(source), int(target), resharder)
            if lesson.price(source, target) > edge.costs[row, column] + _PRICE_TOLERANCE * abs(edge.costs[row, column]):
                learned.append(lesson)
        if not any(lessons.values()):
            return None
        return replace(self, built=self._replace_costs({table: some for table, some in lessons.items() if some}))

    def _replace_costs(self, lessons: dict[int, list[_ExactCosts]]) -> BuiltProblem:
        edges, hideable = list(self.built.problem.edges), dict(self.built.hideable)
        corrected = _memoize_by_identity(lambda costs, crossing, some: _apply_exact_costs(costs, crossing, some))
        for number, crossing in self.built.reshard_edges.items():
            edge = edges[number]
            some = lessons.get(id(edge.costs))
            if some:
                edges[number] = Edge(edge.source, edge.target, corrected(edge.costs, crossing, some))
                if number in hideable:
                    one = hideable[number]
                    hideable[number] = replace(one, seconds=corrected(one.seconds, crossing, some))
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


def _find_exact_costs(crossing: ReshardEdge, row: int, column: int, resharder: Resharder) -> _ExactCosts:
    """Exact prices from a spec to another, and to all whose paths lie in the same graph: they are found with it."""
    exact = resharder.gradients if crossing.gradient else resharder
    meta, source, targets = crossing.meta, crossing.sources.distinct[row], crossing.targets.distinct
    columns = np.array(exact.same_graph_positions(meta.shape, targets, column))
    seconds = exact.seconds(meta.shape, meta.dtype.itemsize, [source], [targets[one] for one in columns])
    return _ExactCosts(np.array([row]), columns, seconds)


def _apply_exact_costs(costs: np.ndarray, crossing: ReshardEdge, lessons: Sequence[_ExactCosts]) -> np.ndarray:
    """A table with what was learned; what is forbidden stays so."""
    known = np.zeros((len(crossing.sources.distinct), len(crossing.targets.distinct)))
    for lesson in lessons:
        known[np.ix_(lesson.rows, lesson.columns)] = lesson.seconds
    return np.maximum(costs, known[np.ix_(crossing.sources.index, crossing.targets.index)])


def _memoize_by_identity(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The same with equal first arguments answered by one object, so that equal layers go on sharing their tables."""
    made: dict[int, np.ndarray] = {}

    def lookup(first: np.ndarray, *others: object) -> np.ndarray:
        if id(first) not in made:
            made[id(first)] = make(first, *others)
        return made[id(first)]

    return lookup
