"""The elimination order of the frontier (TensorOpt, Figure 3 and Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class EliminationStep:
    """One node: `exact` if it is eliminated, otherwise its strategy is fixed, since its table would be too large."""

    node: int
    exact: bool


def elimination_steps(
    sizes: Mapping[int, int], neighbours: Mapping[int, Iterable[int]], linear: bool, cells: int
) -> Sequence[EliminationStep]:
    """Return the order of the nodes, greedy by smallest table or by least addition to other tables.

    Of the two orders, the one that fixes fewer nodes and takes less work is returned.

    Args:
        sizes: strategies of every node.
        neighbours: the graph, without loops.
        linear: FT-LDP: of equal tables, the one nearest to an end of the graph. Branches are merged into the main line
            first; the line is then consumed from that end, a node with its one neighbour at a time. Otherwise
            FT-Elimination: the two ends of every component go last, so that a line loses inner nodes with two
            neighbours each.
        cells: of the largest table allowed, without the eliminated node.

    Source: TensorOpt 3.2, Algorithm 2.
    """
    # Both are made: neither is always better, and an order costs far less than the frontier.
    orders = [_GreedyElimination(sizes, neighbours, linear, cells, fill) for fill in (False, True)]
    results = [order.run() for order in orders]

    def quality(index: int) -> tuple[int, float]:
        return sum(not step.exact for step in results[index]), orders[index].work

    return results[min(range(len(orders)), key=quality)]


class _GreedyElimination:
    """A greedy order from sizes alone, by the size of the table or by the added edges (`fill`).

    `work` counts the combinations of strategies that are evaluated.
    """

    def __init__(
        self, sizes: Mapping[int, int], neighbours: Mapping[int, Iterable[int]], linear: bool, cells: int, fill: bool
    ) -> None:
        self.fill = fill
        self.work = 0.0
        self.sizes = sizes
        self.cells = cells
        self.neighbours = {node: set(adjacent) for node, adjacent in neighbours.items()}
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
        steps = []
        heap = [(self._score(node), node) for node in self.neighbours]
        heapify(heap)
        while heap:
            score, node = heappop(heap)
            # An outdated entry of the heap.
            if node not in self.neighbours or score != self._score(node):
                continue
            exact = self._table(node) <= self.cells
            # Fix the hub, such as the attention mask that every layer reads.
            if not exact:
                node = max((node, *self.neighbours[node]), key=lambda hub: (len(self.neighbours[hub]), -hub))
            self.work += self._table(node) * self.sizes[node] if exact else 0.0
            for neighbour in self._remove(node, exact):
                heappush(heap, (self._score(neighbour), neighbour))
            steps.append(EliminationStep(node, exact))
        return steps

    def _remove(self, node: int, join: bool) -> Iterable[int]:
        """Remove a node, and join its neighbours if it is eliminated; return the nodes whose score has changed."""
        adjacent = self.neighbours.pop(node)
        changed = set(adjacent)
        for neighbour in adjacent:
            self.neighbours[neighbour].discard(node)
            if join:
                new = adjacent - self.neighbours[neighbour] - {neighbour}
                self.neighbours[neighbour] |= new
                # A new edge joins two neighbours: their common neighbours miss one edge less.
                for opposite in new if self.fill else ():
                    changed |= self.neighbours[neighbour] & self.neighbours[opposite]
            elif self.fill:
                changed |= self.neighbours[neighbour]
        return sorted(changed)

    def _table(self, node: int) -> float:
        return math.prod(self.sizes[neighbour] for neighbour in self.neighbours[node])

    def _score(self, node: int) -> tuple[bool, float, float, int]:
        table = self._table(node) * self.sizes[node]
        if table > self.cells * self.sizes[node]:
            # Too large: after all others, so that fixing hubs comes as late as possible.
            return node in self.last, math.inf, table, self.place[node]
        # Places in the graph break ties, so that equal layers are eliminated from one end to the other.
        return node in self.last, self._missing(node) if self.fill else table, table, self.place[node]

    def _missing(self, node: int) -> float:
        """Return the entries of the edges that eliminating the node would add."""
        adjacent = sorted(self.neighbours[node])
        return sum(
            self.sizes[end]
            * sum(self.sizes[neighbour] for neighbour in adjacent[:place] if neighbour not in self.neighbours[end])
            for place, end in enumerate(adjacent)
        )

    def _farthest(self, node: int) -> int:
        """Return an end of the graph: the node farthest from the node farthest from this one."""
        # Exact on trees, and good enough elsewhere: it only breaks ties.
        for _ in range(2):
            node = next(reversed(self._distances(node)))
        return node

    def _distances(self, start: int) -> dict[int, int]:
        """Return the steps from a node to all reachable nodes, the nearest first."""
        distance = {start: 0}
        layer = [start]
        while layer:
            layer = sorted({neighbour for node in layer for neighbour in self.neighbours[node]} - distance.keys())
            distance.update(dict.fromkeys(layer, 1 + next(reversed(distance.values()))))
        return distance
