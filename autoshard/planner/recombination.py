"""The cheapest plan within a memory limit whose every decision is that of one of some known plans.

Prices of memory lead to plans on the convex hull of cost and bytes, with gaps between them. Here the problem has the
limit itself, but only the strategies of the known plans. It is solved exactly if it is small.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from autoshard.planner.planning_problem import BuiltProblem
from autoshard.solver import Edge, Problem, solve

_WORK = 100_000_000  # of the solver, about a second
_EXACT = 4_000  # nodes of the largest problem that is solved exactly
_GAP = 1e-3  # relative gap between cost and bound at which the solver stops


def recombine(
    built: BuiltProblem, known: Sequence[Sequence[int]], besides: np.ndarray, limit: int, seconds: float
) -> list[int] | None:
    """Return the cheapest assignment found within a limit; None if there is none.

    Args:
        built: the problem without prices.
        known: the assignments; every variable gets its option in one of them.
        besides: bytes held at every moment in addition to those of the problem, of shape `(moments,)`; may be negative.
        limit: bytes per device.
        seconds: the time limit.
    """
    rows = _Rows(built, [np.unique(options) for options in np.transpose(known)])
    problem = rows.problem(besides, limit)
    method = "auto" if problem.size <= _EXACT else "alternate"
    found = solve(problem, method=method, work_limit=_WORK, time_limit=seconds, gap=_GAP)
    if found.interrupted:
        raise KeyboardInterrupt
    return rows.whole(found.assignment) if found.assignment else None


@dataclass
class _Rows:
    """A problem with few options of every variable, and the memory of every live range.

    The solver counts the memory of a node in one interval. So every further live range of a variable is a separate node
    with the same options, and a live range of two variables is a node whose options are their pairs.
    """

    built: BuiltProblem
    kept: list[np.ndarray]
    costs: list[np.ndarray] = field(default_factory=list)
    usages: list[np.ndarray] = field(default_factory=list)
    intervals: list[tuple[int, int]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The nodes of variables with several options.
        self.nodes = {number: place for place, number in enumerate(n for n, k in enumerate(self.kept) if len(k) > 1)}

    def whole(self, assignment: Sequence[int]) -> list[int]:
        """Return an assignment of the whole problem."""
        return [
            int(options[assignment[self.nodes[number]] if number in self.nodes else 0])
            for number, options in enumerate(self.kept)
        ]

    def problem(self, besides: np.ndarray, limit: int) -> Problem:
        """Return the problem; see `recombine`."""
        built, kept, nodes = self.built, self.kept, self.nodes
        own = {number: built.problem.costs[number][kept[number]] for number in nodes}
        fixed = np.zeros(len(besides) + 1)  # changes of the bytes that all assignments hold
        lives: dict[int, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)  # of variables
        pairs: list[tuple[int, int, np.ndarray, tuple[int, int]]] = []

        def hold(number: int, held: np.ndarray, life: tuple[int, int]) -> None:
            if number in nodes:
                lives[number][life] = lives[number].get(life, 0.0) + held
            else:
                fixed[life[0]] += held[0]
                fixed[life[1]] -= held[0]

        for number, of_variable in enumerate(built.live_ranges):
            for live in of_variable:
                hold(number, live.bytes[kept[number]].astype(np.float64), (live.start, live.end))
        ties: list[Edge] = []
        for number, edge in enumerate(built.problem.edges):
            source, target = edge.source, edge.target
            options = np.ix_(kept[source], kept[target])
            table = edge.costs[options]
            if source in nodes and target in nodes:
                ties.append(Edge(nodes[source], nodes[target], table))
            elif source in nodes:
                own[source] = own[source] + table[:, 0]
            elif target in nodes:
                own[target] = own[target] + table[0]
            for live in built.edge_live_ranges.get(number, ()):
                held, life = np.where(np.isfinite(table), live.bytes[options], 0.0), (live.start, live.end)
                if (held == held[:1]).all():
                    hold(target, held[0], life)
                elif (held == held[:, :1]).all():
                    hold(source, held[:, 0], life)
                else:
                    pairs.append((source, target, held, life))
        for number in nodes:
            self._add(own[number], np.zeros(len(own[number])), (0, 0))
        self.edges += ties
        for number, by_life in lives.items():
            for life, held in by_life.items():
                self._hold(nodes[number], held, life, fixed)
        for source, target, held, life in pairs:
            rows, columns = held.shape
            self._tie(nodes[source], _row_ties(rows, columns))
            self._tie(nodes[target], _column_ties(rows, columns))
            self._add(np.zeros(held.size), self._beside(held, life, fixed).ravel(), life)
        held = np.cumsum(fixed)[:-1] + besides
        # Nodes can't hold negative bytes: if fixed bytes are negative, they and the limit are shifted.
        shift = max(0.0, -float(held.min(initial=0.0)))
        self._add_fixed(held + shift)
        return Problem(tuple(self.costs), tuple(self.edges), tuple(self.usages), tuple(self.intervals), limit + shift)

    def _hold(self, node: int, held: np.ndarray, life: tuple[int, int], fixed: np.ndarray) -> None:
        """Let a node hold these bytes, with their minimum as fixed bytes."""
        beside = self._beside(held, life, fixed)
        if life[0] >= life[1] or not beside.any():
            return
        if self.intervals[node] == (0, 0):
            self.usages[node], self.intervals[node] = beside, life
            return
        self._tie(node, _row_ties(len(held), 1))
        self._add(np.zeros(len(held)), beside, life)

    def _beside(self, held: np.ndarray, life: tuple[int, int], fixed: np.ndarray) -> np.ndarray:
        """Add the minimum of some bytes to the fixed ones, and return the differences from it."""
        least = held.min()
        fixed[life[0]] += least
        fixed[life[1]] -= least
        return held - least

    def _add_fixed(self, held: np.ndarray) -> None:
        """Add a node for every part of the step that holds its fixed bytes."""
        ends = {moment for life in self.intervals if life[0] < life[1] for moment in life}
        cuts = sorted({0, len(held), *ends})
        for start, end in itertools.pairwise(cuts):
            self._add(np.zeros(1), held[start:end].max(keepdims=True), (start, end))

    def _add(self, costs: np.ndarray, usage: np.ndarray, life: tuple[int, int]) -> None:
        self.costs.append(costs)
        self.usages.append(usage)
        self.intervals.append(life)

    def _tie(self, node: int, table: np.ndarray) -> None:
        """Tie the next added node to another one."""
        self.edges.append(Edge(node, len(self.costs), table))


@cache
def _row_ties(rows: int, columns: int) -> np.ndarray:
    """Return the table that ties a node to one whose options are pairs (row, column), with its options as rows."""
    return np.where(np.repeat(np.eye(rows, dtype=bool), columns, axis=1), 0.0, np.inf)


@cache
def _column_ties(rows: int, columns: int) -> np.ndarray:
    """Return the table that ties a node to one whose options are pairs (row, column), with its options as columns."""
    return np.where(np.tile(np.eye(columns, dtype=bool), rows), 0.0, np.inf)
