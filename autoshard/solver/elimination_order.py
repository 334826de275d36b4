"""Greedy elimination orders, which keep tables small."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import log

_WORK = 20
"""Most entries of all tables together, as a multiple of those of the largest table allowed."""

_CHEAP_ORDER = 1e6
"""Entries of all tables up to which the first order is good enough."""

_CHAIN = 1e6
"""Most entries of the table that eliminating a node of two neighbours may make without scoring other nodes."""

Score = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """An elimination order.

    Attributes:
        steps: per eliminated node, in order, its neighbours at that time.
        conditioned: nodes that are fixed instead, since their tables would be too large.
        width: most neighbours of a node at its elimination.
        largest: entries of the largest table, the node itself included.
        entries: entries of all tables together, a measure of the work.
        fits: False if the cap stopped the search for an order (`largest` is then the table that exceeded it).
    """

    steps: tuple[tuple[int, tuple[int, ...]], ...]
    conditioned: tuple[int, ...]
    width: int
    largest: float
    entries: float
    fits: bool


def find_order(sizes: Mapping[int, int], neighbours: Mapping[int, Iterable[int]], cap: float) -> EliminationOrder:
    """Return a greedy order by least fill or, if that one is expensive, the better of it and one by other weights.

    Args:
        sizes: strategies of each node.
        neighbours: the graph.
        cap: most entries of a table.
    """
    # Neither score is always better. With logarithms, a few wide nodes do not outweigh all others.
    first = greedy_order(EliminationGraph(sizes, neighbours, cap), weighted_fill, chains=True)
    if first.fits and first.entries <= _CHEAP_ORDER:
        return first
    second = greedy_order(EliminationGraph(sizes, neighbours, cap), logarithmic_fill, chains=True)
    return min(first, second, key=lambda order: (not order.fits, order.entries))


class EliminationGraph:
    """The remaining graph during elimination.

    Args:
        sizes: strategies of each node.
        neighbours: the graph, without loops.
        cap: most entries of a table: of the sum before the minimum over the node, or of the minimum if `reduced`.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        neighbours: Mapping[int, Iterable[int]],
        cap: float,
        *,
        reduced: bool = False,
    ) -> None:
        self.sizes = sizes
        self.cap = cap
        self.logarithms = {node: log(size) for node, size in sizes.items()}
        self._most = {node: cap * size if reduced else cap for node, size in sizes.items()}
        self.neighbours = {node: set(adjacent) for node, adjacent in neighbours.items()}

    def table(self, node: int) -> float:
        """Return the entries of the sum of the node's tables, counted until the cap is exceeded."""
        entries, most = float(self.sizes[node]), self._most[node]
        for neighbour in self.neighbours[node]:
            entries *= self.sizes[neighbour]
            if entries > most:
                break
        return entries

    def fits(self, node: int, table: float) -> bool:
        """Return True if a table that `table` returned is within the cap."""
        return table <= self._most[node]

    def missing(self, node: int, weights: Mapping[int, float] | None = None) -> float:
        """Return the entries of the edges that eliminating the node would add; `weights` replace sizes."""
        weights = self.sizes if weights is None else weights
        total = 0.0
        adjacent = self.neighbours[node]
        for neighbour in adjacent:
            absent = adjacent - self.neighbours[neighbour]
            # The neighbour itself is never among its own neighbours.
            if len(absent) > 1:
                total += weights[neighbour] * sum(weights[opposite] for opposite in absent if opposite != neighbour)
        # Every absent edge was counted from both of its ends.
        return total / 2

    def drop(self, node: int) -> set[int]:
        """Remove a node; return its neighbours."""
        adjacent = self.neighbours.pop(node)
        for neighbour in adjacent:
            self.neighbours[neighbour].discard(node)
        return adjacent

    def eliminate(self, node: int) -> set[int]:
        """Remove a node and connect its neighbours; return the nodes whose score may have changed."""
        adjacent = self.drop(node)
        touched = set(adjacent)
        for neighbour in adjacent:
            new = adjacent - self.neighbours[neighbour]
            new.discard(neighbour)
            for opposite in new:
                # A new edge changes the fill of the common neighbours of its ends.
                if opposite > neighbour:
                    touched |= self.neighbours[neighbour] & self.neighbours[opposite]
        for neighbour in adjacent:
            self.neighbours[neighbour] |= adjacent
            self.neighbours[neighbour].discard(neighbour)
        return touched


def weighted_fill(graph: EliminationGraph, node: int) -> Score:
    """Return the entries of the added edges, then of the table."""
    return _fill(graph, node, graph.sizes)


def logarithmic_fill(graph: EliminationGraph, node: int) -> Score:
    """Return the entries of the added edges by the logarithms of their ends' sizes, then those of the table."""
    return _fill(graph, node, graph.logarithms)


def _fill(graph: EliminationGraph, node: int, weights: Mapping[int, float]) -> Score:
    table = graph.table(node)
    # A hub has very many pairs of neighbours: do not count them if its table is too large anyway.
    return (graph.missing(node, weights) if graph.fits(node, table) else float("inf")), table


def greedy_order(
    graph: EliminationGraph,
    score: Callable[[EliminationGraph, int], Score],
    worth: Callable[[EliminationGraph, int], Score] | None = None,
    *,
    chains: bool = False,
) -> EliminationOrder:
    """Eliminate the node of least score repeatedly.

    Args:
        graph: changed in place.
        score: of a node.
        worth: of fixing a node: if a table exceeds the cap, its node with the largest worth is fixed. None to end the
            search there.
        chains: True to eliminate nodes with at most two neighbours first, which needs no scores.
    """
    steps, tables = _eliminate_chains(graph) if chains else ([], [])
    width, largest, entries = 2 * bool(steps), max(tables, default=1.0), sum(tables)
    # A heap with lazy deletion: an entry counts only if it has the node's newest score.
    scores = {node: score(graph, node) for node in graph.neighbours}
    heap = [(value, node) for node, value in scores.items()]
    heapify(heap)
    conditioned: list[int] = []
    while heap:
        value, node = heappop(heap)
        # An outdated entry of the heap.
        if scores.get(node) != value:
            continue
        table = graph.table(node)
        if worth is None and (not graph.fits(node, table) or entries > _WORK * graph.cap):
            largest, width = max(largest, table), max(width, len(graph.neighbours[node]))
            return EliminationOrder(tuple(steps), (), width, largest, float("inf"), False)
        if worth is not None and not graph.fits(node, table):
            held = max((node, *graph.neighbours[node]), key=lambda member: worth(graph, member))
            # The node itself is eliminated later, when its table is smaller.
            if held != node:
                heappush(heap, (value, node))
            node = held
            conditioned.append(node)
            touched = graph.drop(node)
        else:
            steps.append((node, tuple(graph.neighbours[node])))
            width, largest, entries = max(width, len(graph.neighbours[node])), max(largest, table), entries + table
            touched = graph.eliminate(node)
        del scores[node]
        for neighbour in touched - {node}:
            fresh = score(graph, neighbour)
            if fresh != scores[neighbour]:
                scores[neighbour] = fresh
                heappush(heap, (fresh, neighbour))
    return EliminationOrder(tuple(steps), tuple(conditioned), width, largest, entries, True)


def _eliminate_chains(graph: EliminationGraph) -> tuple[list[tuple[int, tuple[int, ...]]], list[float]]:
    """Eliminate nodes with at most two neighbours while tables are small; return the steps and tables' entries."""
    steps, tables = [], []
    waiting = deque(graph.neighbours)
    while waiting:
        node = waiting.popleft()
        adjacent = graph.neighbours.get(node)
        if adjacent is None or len(adjacent) > 2:
            continue
        table = graph.table(node)
        if graph.fits(node, table) and table <= _CHAIN * graph.sizes[node]:
            steps.append((node, tuple(adjacent)))
            tables.append(table)
            waiting.extend(graph.eliminate(node))
    return steps, tables
