"""The graph of frontiers, and the eliminations that simplify it (TensorOpt, Figure 3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from autoshard.solver.frontier_table import UNIT, Joiner, Table
from autoshard.solver.problem import IntArray

Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A part of the costs: a frontier for every combination of strategies of the nodes in its scope."""

    scope: Scope
    table: Table


class Graph:
    """Costs of nodes and groups of nodes, as frontiers. Nodes are eliminated one by one until a frontier is left.

    A table may be over more than two nodes. So one elimination serves as all of the paper's exact ones: with two
    neighbours it is node elimination (Eq. 4), factors of one scope are edge elimination (Eq. 5), with one neighbour it
    is a step of the linear dynamic programming (Algorithm 3), and where a node has more, a table over all of them
    stands for the node of concatenated strategies that branch elimination makes (Eq. 6).

    Args:
        sizes: strategies of every node.
        factors: the costs.
        joiner: joins tables.
    """

    def __init__(self, sizes: Mapping[int, int], factors: Iterable[Factor], joiner: Joiner) -> None:
        self.sizes = sizes
        self.joiner = joiner
        self.buckets: dict[int, list[Factor]] = {node: [] for node in sizes}
        self.settled: dict[int, int] = {}
        self.rest = UNIT  # costs that no node is left of
        for factor in factors:
            self._file(factor)

    def eliminate(self, node: int) -> None:
        """Hands the costs of a node on to a table over its neighbours; keeps the frontier of the whole."""
        factors = sorted(self._drawn(node), key=lambda factor: (len(factor.table.memory), factor.scope))
        scope = tuple(dict.fromkeys(other for factor in factors for other in factor.scope if other != node))
        last = factors.pop() if len(factors) > 1 else Factor((), UNIT)
        together = factors[0]
        for factor in factors[1:]:
            joint = (*dict.fromkeys((*together.scope, *factor.scope)),)
            together = self._product(together, factor, joint)
        # The node's strategies vary fastest, in the table and in what it is summed from.
        inner = (*(other for other in together.scope if other != node), node)
        if inner != together.scope:
            together = Factor(inner, together.table.take(self._cells(together.scope, inner)))
        joint = (*scope, node)
        left, right = self._cells(together.scope, joint), self._cells(last.scope, joint)
        summed = self.joiner.join(together.table, last.table, left, right, self.sizes[node], node)
        self._file(Factor(scope, summed))

    def settle(self, node: int, strategy: int) -> None:
        """Decides the strategy of a node for good: heuristic elimination (Eq. 7), which may lose points."""
        self.settled[node] = strategy
        for factor in self._drawn(node):
            scope = tuple(other for other in factor.scope if other != node)
            cells = self._cells(factor.scope, scope, {node: strategy})
            self._file(Factor(scope, factor.table.take(cells)))

    def _file(self, factor: Factor) -> None:
        """Puts a factor where its nodes find it; adds up two of the same scope, and keeps apart what has none."""
        if not factor.scope:
            self.rest = self.joiner.join(self.rest, factor.table, _FIRST, _FIRST)
            return
        for other in self.buckets[factor.scope[0]]:
            if set(other.scope) == set(factor.scope):
                self._remove(other)
                factor = self._product(other, factor, other.scope)
                break
        for node in factor.scope:
            self.buckets[node].append(factor)

    def _drawn(self, node: int) -> list[Factor]:
        """The factors of a node, which leave the graph with it."""
        factors = list(self.buckets[node])
        for factor in factors:
            self._remove(factor)
        del self.buckets[node]
        return factors

    def _remove(self, factor: Factor) -> None:
        for node in factor.scope:
            self.buckets[node].remove(factor)

    def _product(self, one: Factor, other: Factor, scope: Scope) -> Factor:
        """The sum of two factors, over a scope that holds both of theirs."""
        cells = self._cells(one.scope, scope), self._cells(other.scope, scope)
        return Factor(scope, self.joiner.join(one.table, other.table, *cells))

    def _cells(self, scope: Scope, joint: Scope, fixed: Mapping[int, int] | None = None) -> IntArray:
        """Which cell of a table over `scope` every cell over `joint` is; nodes not in `joint` are fixed."""
        shape = tuple(self.sizes[node] for node in joint)
        cells = np.zeros(shape, dtype=np.int64)
        stride = 1
        for node in reversed(scope):
            if fixed is not None and node in fixed:
                cells += stride * fixed[node]
            else:
                axis = joint.index(node)
                cells += stride * np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
            stride *= self.sizes[node]
        return cells.ravel()


_FIRST = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to a node: it is eliminated, or, where that would take too large a table, settled."""

    node: int
    exact: bool


def steps(
    sizes: Mapping[int, int], neighbours: Mapping[int, Iterable[int]], linear: bool, cells: int
) -> Sequence[Step]:
    """The order in which nodes go: always one of smallest table, or always one that adds least to other tables.

    Of the two orders, the one that settles fewer nodes and takes less work.

    Args:
        sizes: strategies of every node.
        neighbours: the graph, without loops.
        linear: FT-LDP: of equal tables, the one nearest to an end of the graph. What hangs off the main line is taken
            into it first; the line is then consumed from that end, a node with its one neighbour at a time. Otherwise
            FT-Elimination: the two ends of every component go last, so that a line loses inner nodes with two
            neighbours each.
        cells: of the largest table allowed, the node that is eliminated not counted.

    Source: TensorOpt 3.2, Algorithm 2.
    """
    orders = [_Order(sizes, neighbours, linear, cells, fill) for fill in (False, True)]
    found = [order.run() for order in orders]
    return min(zip(orders, found, strict=True), key=lambda one: (sum(not s.exact for s in one[1]), one[0].work))[1]


class _Order:
    """A greedy order, made on the sizes alone; by the table's size, or by what elimination adds to the graph (`fill`).

    `work` counts the combinations of strategies that are looked at.
    """

    def __init__(
        self, sizes: Mapping[int, int], neighbours: Mapping[int, Iterable[int]], linear: bool, cells: int, fill: bool
    ) -> None:
        self.fill = fill
        self.work = 0.0
        self.sizes = sizes
        self.cells = cells
        self.neighbours = {node: set(others) for node, others in neighbours.items()}
        self.place: dict[int, int] = {}
        self.last: set[int] = set()
        for node in neighbours:
            if node not in self.place:
                reached = self._distances(self._farthest(node))
                start, end = next(iter(reached)), next(reversed(reached))
                self.place.update(reached)
                if not linear:
                    self.last |= {start, end}

    def run(self) -> list[Step]:
        found = []
        heap = [(self._score(node), node) for node in self.neighbours]
        heapify(heap)
        while heap:
            score, node = heappop(heap)
            if node not in self.neighbours or score != self._score(node):
                continue
            exact = self._table(node) <= self.cells
            if not exact:  # like the attention mask that every layer reads
                node = max((node, *self.neighbours[node]), key=lambda one: (len(self.neighbours[one]), -one))
            self.work += self._table(node) * self.sizes[node] if exact else 0.0
            for other in self._remove(node, exact):
                heappush(heap, (self._score(other), other))
            found.append(Step(node, exact))
        return found

    def _remove(self, node: int, join: bool) -> Iterable[int]:
        """Takes a node out, and joins its neighbours if it is eliminated; returns those whose score has changed."""
        others = self.neighbours.pop(node)
        changed = set(others)
        for other in others:
            self.neighbours[other].discard(node)
            if join:
                new = others - self.neighbours[other] - {other}
                self.neighbours[other] |= new
                for third in new if self.fill else ():
                    changed |= self.neighbours[other] & self.neighbours[third]
            elif self.fill:
                changed |= self.neighbours[other]
        return sorted(changed)

    def _table(self, node: int) -> float:
        return math.prod(self.sizes[other] for other in self.neighbours[node])

    def _score(self, node: int) -> tuple[bool, float, float, int]:
        table = self._table(node) * self.sizes[node]
        if table > self.cells * self.sizes[node]:
            return node in self.last, math.inf, table, self.place[node]
        return node in self.last, self._missing(node) if self.fill else table, table, self.place[node]

    def _missing(self, node: int) -> float:
        """Entries of the edges that eliminating the node would add."""
        others = sorted(self.neighbours[node])
        return sum(
            self.sizes[one] * sum(self.sizes[other] for other in others[:place] if other not in self.neighbours[one])
            for place, one in enumerate(others)
        )

    def _farthest(self, node: int) -> int:
        """An end of the graph: farthest from what is farthest from a node."""
        for _ in range(2):
            node = next(reversed(self._distances(node)))
        return node

    def _distances(self, start: int) -> dict[int, int]:
        """Steps from a node to all that can be reached, the nearest first."""
        distance = {start: 0}
        layer = [start]
        while layer:
            layer = sorted({other for node in layer for other in self.neighbours[node]} - distance.keys())
            distance.update(dict.fromkeys(layer, 1 + next(reversed(distance.values()))))
        return distance
