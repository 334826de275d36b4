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

from autoshard.planner.problem import BuiltProblem, Crossing, HideableKind, Hiding
from autoshard.reshard.path import Resharder
from autoshard.solver import Edge
from autoshard.solver.warm import Messages

_SAME = 1e-9
"""Relative difference up to which two prices are one."""


@dataclass(frozen=True, slots=True, eq=False)
class Glance:
    """What was seen of all options of the problem, or of its tied layers, where hidden seconds have one price.

    Attributes:
        hiding: what hidden seconds count; None where they count in full.
        near: per variable, the options that are near the best.
    """

    hiding: Hiding | None
    near: Sequence[np.ndarray]

    def price(self, kind: HideableKind) -> float | None:
        """What a hidden second of a kind of collectives counts; None where one of another kind counts less."""
        if self.hiding is None:
            return 1.0
        return self.hiding.price if self.hiding.kind == kind else None


@dataclass(frozen=True, eq=False)
class Lessons:
    """A problem at prices that may be too low, and what its answers have taught.

    Attributes:
        built: the problem, with the exact prices known so far.
        messages: along every edge and against it, of the problem (of its tied layers, if there are any), as they were
            passed last. Those of an answer are a good start to the next.
        glances: at some prices of hidden seconds, in the order in which they were made.
    """

    built: BuiltProblem
    messages: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None
    glances: tuple[Glance, ...] = ()

    def looked(self, hiding: Hiding | None, near: Sequence[np.ndarray], messages: Messages) -> Lessons:
        """With what was seen of all options at a price, and the messages that told it."""
        return replace(self, messages=(messages.along, messages.against), glances=(*self.glances, Glance(hiding, near)))

    def around(self, hiding: Hiding) -> list[np.ndarray] | None:
        """The options that are near the best at any price, if it was looked for at a lower and at a higher one."""
        same = [glance for glance in self.glances if glance.price(hiding.kind) is not None]
        prices = [price for glance in same if (price := glance.price(hiding.kind)) is not None]
        if not prices or not min(prices) <= hiding.price <= max(prices):
            return None
        every = zip(*(glance.near for glance in same), strict=True)
        return [np.unique(np.concatenate(options)) for options in every]

    def asked(self, hiding: Hiding | None) -> BuiltProblem:
        """The problem in which hidden collectives count so."""
        return self.built if hiding is None else self.built.hiding(hiding)

    def after(self, assignment: Sequence[int], resharder: Resharder) -> Lessons | None:
        """With the exact prices of what an assignment uses, and of what goes the same ways; None if it knew them."""
        lessons: dict[int, list[_Lesson]] = {}  # by table
        seen: set[tuple[int, int, int]] = set()
        edges = self.built.problem.edges
        used: dict[tuple[int, int, int], int] = {}  # equal layers use the same entries of the same tables
        for number in self.built.crossings:
            edge = edges[number]
            used.setdefault((id(edge.costs), assignment[edge.source], assignment[edge.target]), number)
        for (_, row, column), number in used.items():
            edge, crossing = edges[number], self.built.crossings[number]
            source, target = crossing.sources.index[row], crossing.targets.index[column]
            if (id(edge.costs), source, target) in seen:
                continue
            seen.add((id(edge.costs), source, target))
            learned = lessons.setdefault(id(edge.costs), [])
            if any(lesson.covers(source, target) for lesson in learned):
                continue
            lesson = _lesson(crossing, int(source), int(target), resharder)
            if lesson.price(source, target) > edge.costs[row, column] + _SAME * abs(edge.costs[row, column]):
                learned.append(lesson)
        if not any(lessons.values()):
            return None
        return replace(self, built=self._with({table: some for table, some in lessons.items() if some}))

    def _with(self, lessons: dict[int, list[_Lesson]]) -> BuiltProblem:
        edges, hideable = list(self.built.problem.edges), dict(self.built.hideable)
        corrected = _once(lambda costs, crossing, some: _corrected(costs, crossing, some))
        for number, crossing in self.built.crossings.items():
            edge = edges[number]
            some = lessons.get(id(edge.costs))
            if some:
                edges[number] = Edge(edge.source, edge.target, corrected(edge.costs, crossing, some))
                if number in hideable:
                    one = hideable[number]
                    hideable[number] = replace(one, seconds=corrected(one.seconds, crossing, some))
        return replace(self.built, problem=replace(self.built.problem, edges=tuple(edges)), hideable=hideable)


@dataclass(frozen=True, eq=False)
class _Lesson:
    """Exact prices from some of the distinct specs of an edge's source to some of its target."""

    rows: np.ndarray
    columns: np.ndarray
    seconds: np.ndarray

    def covers(self, row: int, column: int) -> bool:
        return row in self.rows and column in self.columns

    def price(self, row: int, column: int) -> float:
        return float(self.seconds[np.searchsorted(self.rows, row), np.searchsorted(self.columns, column)])


def _lesson(crossing: Crossing, row: int, column: int, resharder: Resharder) -> _Lesson:
    """Exact prices from a spec to another, and to all whose paths lie in the same graph: they are found with it."""
    exact = resharder.gradients if crossing.gradient else resharder
    meta, source, targets = crossing.meta, crossing.sources.distinct[row], crossing.targets.distinct
    columns = np.array(exact.kin(meta.shape, targets, column))
    seconds = exact.seconds(meta.shape, meta.dtype.itemsize, [source], [targets[one] for one in columns])
    return _Lesson(np.array([row]), columns, seconds)


def _corrected(costs: np.ndarray, crossing: Crossing, lessons: Sequence[_Lesson]) -> np.ndarray:
    """A table with what was learned; what is forbidden stays so."""
    known = np.zeros((len(crossing.sources.distinct), len(crossing.targets.distinct)))
    for lesson in lessons:
        known[np.ix_(lesson.rows, lesson.columns)] = lesson.seconds
    return np.maximum(costs, known[np.ix_(crossing.sources.index, crossing.targets.index)])


def _once(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The same with equal first arguments answered by one object, so that equal layers go on sharing their tables."""
    made: dict[int, np.ndarray] = {}

    def answer(first: np.ndarray, *others: object) -> np.ndarray:
        if id(first) not in made:
            made[id(first)] = make(first, *others)
        return made[id(first)]

    return answer
