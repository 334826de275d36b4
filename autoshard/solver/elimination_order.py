"""Elimination orders that keep tables small."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

DEFAULT_CAP = 50_000_000
"""Entries of the largest table that elimination builds."""

_WORK = 20
"""All tables together may have this many times the entries of the largest table allowed."""

_CHEAP = 1e6
"""Entries of all tables up to which the first order is good enough."""

Score = tuple[float, float]


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """An elimination order.

    Attributes:
        steps: per eliminated node, in order, its neighbours at that time.
        conditioned: nodes that are held at a value instead, since their tables would be too large.
        width: most neighbours of a node at its elimination.
        largest: entries of the largest table, the node itself included.
        entries: entries of all tables together: the work.
        fits: False if the cap stopped the search for an order (`largest` is then the table that exceeded it).
    """

    steps: tuple[tuple[int, tuple[int, ...]], ...]
    conditioned: tuple[int, ...]
    width: int
    largest: float
    entries: float
    fits: bool


def find_order(
    sizes: Mapping[int, int], neighbours: Mapping[int, Mapping[int, object]], cap: float
) -> EliminationOrder:
    """Return a greedy order by least weighted fill or, if that one is expensive, the better of it and least table.

    Args:
        sizes: strategies of each node.
        neighbours: the graph.
        cap: most entries of a table.
    """
    # Neither score is best everywhere: fill keeps later tables small, least table pays off where a few nodes are wide.
    first = greedy_order(sizes, neighbours, cap, weighted_fill)
    if first.fits and first.entries <= _CHEAP:
        return first
    second = greedy_order(sizes, neighbours, cap, table_size)
    return min(first, second, key=lambda order: (not order.fits, order.entries))


def conditioned_order(
    sizes: Mapping[int, int],
    neighbours: Mapping[int, Mapping[int, object]],
    cap: float,
    reluctance: Mapping[int, float],
) -> EliminationOrder:
    """Return an order within the cap, made possible by holding some nodes.

    Args:
        reluctance: node -> penalty of holding it; among the nodes of a table that is too large, the one with the most
            neighbours per (1 + reluctance) is held.
    """
    return greedy_order(sizes, neighbours, cap, weighted_fill, reluctance)


class EliminationGraph:
    """The remaining graph during elimination; `cap` is the largest table allowed."""

    def __init__(self, sizes: Mapping[int, int], neighbours: Mapping[int, Mapping[int, object]], cap: float) -> None:
        self.sizes = sizes
        self.cap = cap
        self.neighbours = {node: set(adjacent) for node, adjacent in neighbours.items()}

    def table(self, node: int) -> float:
        """Return the entries of the table of eliminating the node, counted until the cap is exceeded."""
        entries = float(self.sizes[node])
        for neighbour in self.neighbours[node]:
            entries *= self.sizes[neighbour]
            if entries > self.cap:
                break
        return entries

    def missing(self, node: int) -> float:
        """Return the entries of the edges that eliminating the node would add."""
        total = 0.0
        adjacent = self.neighbours[node]
        for neighbour in adjacent:
            absent = adjacent - self.neighbours[neighbour]
            # The neighbour itself is always absent from its own neighbours.
            if len(absent) > 1:
                total += self.sizes[neighbour] * sum(
                    self.sizes[opposite] for opposite in absent if opposite != neighbour
                )
        # Every absent edge was counted from both of its ends.
        return total / 2

    def drop(self, node: int) -> set[int]:
        """Remove a node; return its neighbours."""
        adjacent = self.neighbours.pop(node)
        for neighbour in adjacent:
            self.neighbours[neighbour].discard(node)
        return adjacent

    def eliminate(self, node: int) -> set[int]:
        """Remove a node and join its neighbours; return the nodes whose score may have changed."""
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
    return _score(graph, node)


def table_size(graph: EliminationGraph, node: int) -> Score:
    """Return the entries of the table, then of the added edges."""
    return _score(graph, node)[::-1]


def _score(graph: EliminationGraph, node: int) -> Score:
    """Return the entries of the added edges and of the table."""
    table = graph.table(node)
    # A hub has very many pairs of neighbours: they are not counted if its table is too large anyway.
    return (graph.missing(node) if table <= graph.cap else float("inf")), table


def greedy_order(
    sizes: Mapping[int, int],
    neighbours: Mapping[int, Mapping[int, object]],
    cap: float,
    score: Callable[[EliminationGraph, int], Score],
    reluctance: Mapping[int, float] | None = None,
) -> EliminationOrder:
    """Eliminate the node of least score, again and again.

    Without `reluctance` the search ends at the first table over the cap; with it, a node of that table is hub instead.
    """
    graph = EliminationGraph(sizes, neighbours, cap)
    # A heap with lazy deletion: entries are never changed, the newest score of a node decides which entry counts.
    scores = {node: score(graph, node) for node in graph.neighbours}
    heap = [(value, node) for node, value in scores.items()]
    heapify(heap)
    steps: list[tuple[int, tuple[int, ...]]] = []
    conditioned: list[int] = []
    width, largest, entries = 0, 1.0, 0.0
    while heap:
        value, node = heappop(heap)
        # An outdated entry of the heap.
        if scores.get(node) != value:
            continue
        table = graph.table(node)
        if reluctance is None and (table > cap or entries > _WORK * cap):
            largest, width = max(largest, table), max(width, len(graph.neighbours[node]))
            return EliminationOrder(tuple(steps), (), width, largest, float("inf"), False)
        if table > cap and reluctance is not None:
            hub = _node_to_hold(graph, node, reluctance)
            # The node itself is still to be eliminated, when its table is smaller.
            if hub != node:
                heappush(heap, (value, node))
            node = hub
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


def _node_to_hold(graph: EliminationGraph, node: int, reluctance: Mapping[int, float]) -> int:
    """Return the node of a table to hold: many neighbours, many strategies, little reluctance."""

    def worth(neighbour: int) -> tuple[float, int]:
        # Holding a node shrinks every table that it is in, by its number of strategies; the root keeps a wide node of
        # few neighbours from being held before a hub.
        weight = len(graph.neighbours[neighbour]) * graph.sizes[neighbour] ** 0.5
        return weight / (1.0 + reluctance.get(neighbour, 0.0)), -neighbour

    return max((node, *graph.neighbours[node]), key=worth)
