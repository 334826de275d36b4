"""TRW-S messages on a problem, which can start from those of another problem.

Any messages give a lower bound, and good messages a good one. A large problem that repeats a small one starts from the
messages of the small one, which change little except where the repetition begins and ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard.solver.ascent import Ascent
from autoshard.solver.chains import DETAIL, PART, ChainGraph, Chains, link_halves, subtract_rounding
from autoshard.solver.problem import Array, IntArray, Problem
from autoshard.solver.tables import EquivalenceClasses, equal_rows_and_columns

_PERIOD = 5
"""Iterations from one rounded assignment to the next."""

_WORK = 4
"""Units of work of an iteration per table entry: a pass each way, with reads and writes."""


class Messages(Ascent):
    """Message passing on a problem without reduction and without its memory limit; see `chains`.

    Args:
        problem: the problem.
        order: per node, its place in a pass; equal ones by their number. Nodes that depend on each other should be
            close.

    Attributes:
        along: per edge, the message to its target.
        against: per edge, the message to its source.
    """

    def __init__(self, problem: Problem, order: Sequence[float]) -> None:
        self.problem = problem
        sequence = np.argsort(np.asarray(order, dtype=np.float64), kind="stable")
        # Per node its number in the order of a pass.
        self._rank = np.empty(problem.size, dtype=np.int64)
        self._rank[sequence] = np.arange(problem.size)
        self._sizes = np.array([len(vector) for vector in problem.costs], dtype=np.int64)
        ends = np.array([(edge.source, edge.target) for edge in problem.edges], dtype=np.int64).reshape(-1, 2)
        nodes, around, self._places = link_halves(self._sizes[sequence], self._rank[ends])
        graph = _lay_tables(problem, ChainGraph(nodes, around, np.zeros(0)), self._places)
        chains = Chains(graph, np.concatenate([*(problem.costs[node] for node in sequence), np.zeros(0)]))
        super().__init__(chains, period=_PERIOD, work=_WORK * sum(math.prod(edge.shape) for edge in problem.edges))

    @property
    def assignment(self) -> tuple[int, ...]:
        """The best rounded assignment so far; empty if none was finite."""
        return () if self.best is None else self._choice(self.best)

    def _choice(self, places: IntArray) -> tuple[int, ...]:
        return tuple(places[self._rank].tolist())

    def _pass(self) -> float:
        return float(subtract_rounding(self.chains.iterate()))

    def _evaluate(self, places: IntArray) -> float:
        return self.problem.cost(self._choice(places))

    @property
    def along(self) -> list[Array]:
        return self._messages(1)

    @property
    def against(self) -> list[Array]:
        return self._messages(0)

    def _messages(self, side: int) -> list[Array]:
        """Return per edge the message to its source (0) or its target (1)."""
        begins = self.chains.graph.around["message"][self._places[:, side]].tolist()
        lengths = [edge.shape[side] for edge in self.problem.edges]
        return [self.chains.messages[begin : begin + n] for begin, n in zip(begins, lengths, strict=True)]

    def start_from(self, along: Sequence[Array | None], against: Sequence[Array | None]) -> None:
        """Start from these messages; None means zero."""
        for messages, others in ((self.along, along), (self.against, against)):
            for message, other in zip(messages, others, strict=True):
                if other is not None:
                    message[:] = other

    def strategies_within(self, slack: float | Array) -> list[IntArray]:
        """Return per node the strategies of assignments that cost at most `slack` above the bound, ascending.

        The slack is one number for all nodes, or one per node. The increase of the bound by a strategy is from the last
        backward pass and relative to the bound before it: the result is exact up to the gain of this pass.
        """
        slacks = np.broadcast_to(slack, self.problem.size)
        beliefs = self._by_node(self.chains.beliefs)
        return [np.flatnonzero(costs <= costs.min() + most) for costs, most in zip(beliefs, slacks, strict=True)]

    def floors(self) -> list[Array]:
        """Return per node and strategy a bound of all assignments that use it, by the last iteration."""
        return self._by_node(subtract_rounding(self.chains.floors()))

    def _by_node(self, values: Array) -> list[Array]:
        begins = self.chains.offset[self._rank].tolist()
        return [values[begin : begin + size] for begin, size in zip(begins, self._sizes.tolist(), strict=True)]


_LARGE = 1 << 14
"""Least entries of a table that is stored once: two copies would take more time to write and read than they save."""


class _TableLayout:
    """Distinct tables: small ones twice, with the rows of the source and with those of the target, large ones once.

    A table that is alone on its edge is stored by classes of equal rows and columns; a part of a sum is stored whole,
    since parts rarely have the same classes.
    """

    def __init__(self) -> None:
        self.classes: list[IntArray] = [np.zeros(0, dtype=np.int64)]
        self._length = self._classed = 0
        self._laid: list[tuple[int, Array]] = []
        self._whole: dict[int, tuple[int, int]] = {}
        self._alone: dict[int, tuple[tuple[int, int], tuple[tuple[int, int], ...]]] = {}

    def whole(self, table: Array) -> tuple[int, int]:
        """Return the starts of a table for both ends."""
        if id(table) not in self._whole:
            self._whole[id(table)] = self._add(table)
        return self._whole[id(table)]

    def alone(self, table: Array) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]]:
        """Return the starts of a table by classes, and the start and number of the classes of both ends."""
        if id(table) not in self._alone:
            found = equal_rows_and_columns(table)
            if found is None:
                self._alone[id(table)] = self.whole(table), tuple((0, length) for length in table.shape)
            else:
                few = table[np.ix_(found[0].first, found[1].first)]
                self._alone[id(table)] = self._add(few), tuple(map(self._add_classes, found))
        return self._alone[id(table)]

    def _add(self, table: Array) -> tuple[int, int]:
        begin = self._length
        self._laid.append((begin, table))
        self._length += table.size if _is_large(table.shape) else 2 * table.size
        return begin, begin if _is_large(table.shape) else begin + table.size

    def entries(self) -> Array:
        """Return the entries of all tables."""
        entries = np.empty(self._length)
        for begin, table in self._laid:
            middle, end = begin + table.size, begin + 2 * table.size
            entries[begin:middle].reshape(table.shape)[:] = table
            if not _is_large(table.shape):
                entries[middle:end].reshape(table.shape[::-1])[:] = table.T
        return entries

    def _add_classes(self, classes: EquivalenceClasses) -> tuple[int, int]:
        self.classes.append(classes.number)
        begin, self._classed = self._classed, self._classed + len(classes.number)
        return begin, len(classes.first)


def _is_large(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) >= _LARGE


def _lay_tables(problem: Problem, graph: ChainGraph, places: IntArray) -> ChainGraph:
    """Return the graph with the tables of a problem; `places` are the half-edges of an edge's source and target."""
    layout = _TableLayout()
    starts: list[tuple[int, int]] = []
    details: list[tuple[float, ...]] = []
    parts: list[tuple[float, float]] = []
    for edge in problem.edges:
        (factor, table), *more = edge.parts
        start, ends = (layout.whole(table), tuple((0, n) for n in table.shape)) if more else layout.alone(table)
        starts.append(start)
        for side in (0, 1):
            turned = side == 1 and _is_large((ends[0][1], ends[1][1]))
            details.append((*ends[side], *ends[1 - side], turned, len(parts), len(parts) + len(more), factor))
            parts += [(layout.whole(other)[side], times / factor) for times, other in more]
    graph.around["table"][places.ravel()] = np.array(starts, dtype=np.int64).ravel()
    by_half = np.zeros(len(details), dtype=DETAIL)
    by_half[places.ravel()] = np.array(details, dtype=DETAIL)
    return graph._replace(
        table=layout.entries(),
        details=by_half,
        parts=np.array(parts, dtype=PART),
        classes=np.concatenate(layout.classes),
    )
