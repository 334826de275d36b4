"""The order in which nodes are eliminated (TensorOpt, Figure 3 and Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class EliminationStep:
    """What happens to a node: it is eliminated, or, where that would take too large a table, settled."""

    node: int
    exact: bool


def elimination_steps(
    sizes: Mapping[int, int], neighbours: Mapping[int, Iterable[int]], linear: bool, cells: int
) -> Sequence[EliminationStep]:
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
    orders = [_GreedyElimination(sizes, neighbours, linear, cells, fill) for fill in (False, True)]
    found = [order.run() for order in orders]
    return min(zip(orders, found, strict=True), key=lambda one: (sum(not s.exact for s in one[1]), one[0].work))[1]


class _GreedyElimination:
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

    def run(self) -> list[EliminationStep]:
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
            found.append(EliminationStep(node, exact))
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
