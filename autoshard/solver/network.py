"""The problem during its solve: a simple graph that exact reductions shrink, with a record of them.

A reduction decides choices, or hands them on to a neighbour, without a change of the optimum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.problem import Array, Edge, IntArray, Problem
from autoshard.solver.tables import Tables, find_undominated


@dataclass(frozen=True, slots=True)
class Removal:
    """An eliminated node, and the tables that determine its best strategy.

    Attributes:
        node: the node.
        labels: its strategies at that time, in the problem's numbering.
        vector: their costs.
        neighbours: per neighbour its index, its labels at that time, and the table [node, neighbour].
    """

    node: int
    labels: IntArray
    vector: Array
    neighbours: tuple[tuple[int, IntArray, Array], ...]


@dataclass(slots=True)
class Network:
    """Nodes, merged edges, and the reductions so far; node and strategy numbers are those of the problem.

    Attributes:
        tables: the shared memory of table arithmetic.
        vectors: node -> costs of its remaining strategies.
        labels: node -> the problem's numbers of its remaining strategies, ascending.
        edges: node -> neighbour -> table [node, neighbour]; every edge is listed at both ends.
        offset: cost already decided.
        removals: eliminated nodes, in order.
        usages: node -> bytes of its remaining strategies; empty where memory plays no part.
        held: node -> bytes of an eliminated node, equal for all its strategies.
        feasible: False once a node has no strategy left.
    """

    tables: Tables
    vectors: dict[int, Array] = field(default_factory=dict)
    labels: dict[int, IntArray] = field(default_factory=dict)
    edges: dict[int, dict[int, Array]] = field(default_factory=dict)
    offset: float = 0.0
    removals: list[Removal] = field(default_factory=list)
    usages: dict[int, Array] = field(default_factory=dict)
    held: dict[int, float] = field(default_factory=dict)
    feasible: bool = True

    @classmethod
    def of(cls, problem: Problem, tables: Tables, *, memory: bool = False) -> Network:
        """Return the problem as a network: parallel edges merged, nothing removed; usages kept if `memory` matters."""
        network = cls(tables)
        for node, vector in enumerate(problem.costs):
            network.vectors[node] = tables.intern(vector)
            # Labels shrink with the strategies, so that every result is in the problem's numbers.
            network.labels[node] = tables.intern(np.arange(len(vector)))
            network.edges[node] = {}
        for edge in problem.edges:
            network.add_edge(edge.source, edge.target, tables.intern(edge.costs))
        if memory and problem.usages is not None:
            network.usages = {node: tables.intern(usage) for node, usage in enumerate(problem.usages)}
        return network

    def copy(self) -> Network:
        """Return an independent copy with a child of the table cache; tables are never changed in place."""
        return Network(
            self.tables.child(),
            dict(self.vectors),
            dict(self.labels),
            {node: dict(neighbours) for node, neighbours in self.edges.items()},
            self.offset,
            list(self.removals),
            dict(self.usages),
            dict(self.held),
            self.feasible,
        )

    def add_edge(self, source: int, target: int, table: Array) -> None:
        """Add a table [source, target] to the edge, or as a new edge."""
        present = self.edges[source].get(target)
        if present is not None:
            # Parallel edges add up: two nodes share one table, and degrees count neighbours.
            table = self.tables.add(present, table)
        self.edges[source][target] = table
        # A view, not a copy; the cache returns the same view for the same table, so both ends keep one identity.
        self.edges[target][source] = self.tables.transpose(table)

    def add_costs(self, node: int, vector: Array) -> None:
        """Add to the costs of a node."""
        self.vectors[node] = self.tables.add(self.vectors[node], self.tables.intern(vector))

    def drop_edge(self, source: int, target: int) -> None:
        """Remove an edge."""
        del self.edges[source][target]
        del self.edges[target][source]

    def keep(self, node: int, rows: IntArray) -> None:
        """Restrict a node to some of its remaining strategies (positions, ascending)."""
        rows = self.tables.intern(rows)
        all_rows = self.tables.intern(np.arange(len(self.vectors[node])))
        # Interned arrays of equal content are one object.
        if rows is all_rows:
            return
        self.vectors[node] = self.tables.take_entries(self.vectors[node], rows)
        self.labels[node] = self.tables.take_entries(self.labels[node], rows)
        if self.usages:
            self.usages[node] = self.tables.take_entries(self.usages[node], rows)
        # Equal layers cut equal tables by equal rows: after the first of them, every cut is a look-up.
        for neighbour, table in self.edges[node].items():
            columns = self.tables.intern(np.arange(table.shape[1]))
            restricted = self.tables.take(table, rows, columns)
            self.edges[node][neighbour] = restricted
            self.edges[neighbour][node] = self.tables.transpose(restricted)
        if not len(rows):
            self.feasible = False

    def remove(self, node: int) -> None:
        """Remove a node and record it; the caller has handed its costs on to its neighbours."""
        # The labels are those of this moment, since the neighbours may lose strategies later.
        neighbours = tuple((neighbour, self.labels[neighbour], table) for neighbour, table in self.edges[node].items())
        self.removals.append(Removal(node, self.labels[node], self.vectors[node], neighbours))
        for neighbour in self.edges.pop(node):
            del self.edges[neighbour][node]
        if self.usages:
            # All remaining strategies use the same memory (see `reduce`), so the first one stands for any choice.
            self.held[node] = float(self.usages.pop(node)[0])
        del self.vectors[node], self.labels[node]

    def restrict(self, rows: dict[int, IntArray]) -> Network:
        """Return a copy in which each node of `rows` keeps only these remaining strategies (positions, ascending).

        This is faster than `keep` on every node: each edge is cut once.
        """
        tables = self.tables
        kept = {node: tables.intern(rows[node]) for node in rows}
        for node, vector in self.vectors.items():
            if node not in kept:
                kept[node] = tables.intern(np.arange(len(vector)))
        network = Network(tables, offset=self.offset, removals=list(self.removals), held=dict(self.held))
        network.vectors = {node: tables.take_entries(vector, kept[node]) for node, vector in self.vectors.items()}
        network.labels = {node: tables.take_entries(labels, kept[node]) for node, labels in self.labels.items()}
        network.usages = {node: tables.take_entries(usage, kept[node]) for node, usage in self.usages.items()}
        network.edges = {node: {} for node in self.vectors}
        for node, neighbours in self.edges.items():
            for neighbour, table in neighbours.items():
                if node < neighbour:
                    cut = tables.take(table, kept[node], kept[neighbour])
                    network.edges[node][neighbour] = cut
                    network.edges[neighbour][node] = tables.transpose(cut)
        network.feasible = self.feasible and all(map(len, kept.values()))
        return network

    def to_problem(self, sequence: Sequence[int]) -> Problem:
        """Return what is left as a problem, nodes in a given order, edges from the earlier to the later node."""
        place = {node: number for number, node in enumerate(sequence)}
        edges = (
            Edge(place[node], place[neighbour], table)
            for node in sequence
            for neighbour, table in self.edges[node].items()
            if place[node] < place[neighbour]
        )
        return Problem(tuple(self.vectors[node] for node in sequence), tuple(edges))

    @property
    def cells(self) -> int:
        """Entries of all edge tables."""
        edges = ((node, neighbour, table) for node, around in self.edges.items() for neighbour, table in around.items())
        return sum(table.size for node, neighbour, table in edges if node < neighbour)

    def expand(self, choices: dict[int, int]) -> dict[int, int]:
        """Complete an assignment of the remaining nodes (node -> strategy of the problem) with the removed ones."""
        choices = dict(choices)
        # A node's neighbours at its removal were removed later, or are left: their choices are known.
        for removal in reversed(self.removals):
            costs = removal.vector
            for neighbour, labels, table in removal.neighbours:
                costs = costs + table[:, labels.searchsorted(choices[neighbour])]
            choices[removal.node] = int(removal.labels[costs.argmin()])
        return choices

    def positions(self, choices: dict[int, int]) -> dict[int, int] | None:
        """Return an assignment as positions among the remaining strategies; None if a choice is not among them."""
        result = {}
        for node, labels in self.labels.items():
            position = int(labels.searchsorted(choices[node]))
            # `searchsorted` gives a place for absent labels too.
            if position == len(labels) or labels[position] != choices[node]:
                return None
            result[node] = position
        return result

    def value(self, choices: dict[int, int]) -> float:
        """Return the cost of an assignment of the remaining nodes (strategies of the problem), including the offset."""
        places = self.positions(choices)
        if places is None:
            return float("inf")
        total = self.offset
        for node, vector in self.vectors.items():
            place = places[node]
            total += vector[place]
            for neighbour, table in self.edges[node].items():
                if node < neighbour:
                    total += table[place, places[neighbour]]
        return float(total)


_LARGEST_EDGE = 1_000_000
"""Entries of an edge table that eliminating a node of degree two may create."""

_DOMINANCE_DOMAIN = 48
"""Most strategies of a node that is searched for dominated ones: the work is cubic."""


def reduce(network: Network, *, dominance: bool = True) -> Network:
    """Reduce a network in place until nothing more can be done, and return it.

    Forbidden and unsupported strategies are dropped, nodes of one strategy folded into their neighbours, edges
    normalised (minima into the nodes, separable tables dropped), nodes of degree two and less eliminated, and dominated
    strategies dropped. Where the network carries usages, a node is eliminated only if its remaining strategies use the
    same memory, and a strategy dominates only if it uses no more.

    Args:
        network: changed in place; `feasible` becomes False if some node loses every strategy.
        dominance: True to drop dominated strategies, which keeps one optimum, not all of them.
    """
    if not all(map(len, network.vectors.values())):
        # Every strategy of some node had been dropped before.
        network.feasible = False
        return network
    queue = _Queue(network.vectors)
    for node in list(network.vectors):
        # Every edge once, before any rule: rules compare minima, which say nothing while a cost may sit on either side.
        for neighbour in list(network.edges[node]):
            if node < neighbour:
                _normalise(network, node, neighbour, queue)
    while queue and network.feasible:
        # Cheap rules first, until they are exhausted. Dominance is cubic, so it should see the smallest network.
        _drain_queue(network, queue, tidy=True)
        if dominance and network.feasible:
            for node in list(network.vectors):
                if _drop_dominated(network, node):
                    _normalise_all(network, node, queue)
    return network


def fold(network: Network) -> Network:
    """Apply the cheap part of `reduce` in place: fold nodes of one strategy, eliminate nodes of degree two and less."""
    _drain_queue(network, _Queue(network.vectors), tidy=False)
    return network


class _Queue:
    """Nodes to process, each at most once, first in first out."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._waiting: deque[int] = deque()
        self._members: set[int] = set()
        self.update(nodes)

    def add(self, node: int) -> None:
        if node not in self._members:
            self._members.add(node)
            self._waiting.append(node)

    def update(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self.add(node)

    def pop(self) -> int:
        node = self._waiting.popleft()
        self._members.discard(node)
        return node

    def __bool__(self) -> bool:
        return bool(self._waiting)


def _drain_queue(network: Network, queue: _Queue, *, tidy: bool) -> None:
    """Process the queue and all nodes that each step adds; tables are read only if `tidy`."""
    while queue and network.feasible:
        node = queue.pop()
        # Another step removed the node while it waited.
        if node not in network.vectors:
            continue
        if _drop_forbidden(network, node, tidy):
            if tidy:
                _normalise_all(network, node, queue)
            queue.add(node)
        elif len(network.vectors[node]) == 1:
            _fold(network, node, queue)
        # With different usages, the best strategy would depend on the limit as well as on the neighbours.
        elif len(network.edges[node]) <= 2 and (
            not network.usages or network.usages[node].min() == network.usages[node].max()
        ):
            _eliminate(network, node, queue, tidy)


def _drop_forbidden(network: Network, node: int, tidy: bool) -> bool:
    """Drop strategies of infinite cost and, with `tidy`, those that some neighbour does not support."""
    tables = network.tables
    vector = network.vectors[node]
    finite = tables.compute("finite", (vector,), lambda: bool(np.isfinite(vector).all()))
    unsupported = []
    if tidy:
        unsupported = [t for t in network.edges[node].values() if len(tables.usable_rows(t)) < len(vector)]
    if finite and not unsupported:
        return False
    mask = np.isfinite(vector)
    for table in unsupported:
        supported = np.zeros(len(vector), dtype=bool)
        supported[tables.usable_rows(table)] = True
        mask &= supported
    network.keep(node, np.flatnonzero(mask))
    return True


def _normalise_all(network: Network, node: int, queue: _Queue) -> None:
    """Queue a node that lost strategies, and normalise its edges."""
    queue.add(node)
    for neighbour in list(network.edges[node]):
        _normalise(network, node, neighbour, queue)


def _normalise(network: Network, node: int, neighbour: int, queue: _Queue) -> None:
    """Move the minima of an edge's rows and columns into its nodes; drop the edge if nothing is left of it."""
    table = network.edges[node][neighbour]
    tables = network.tables
    queue.add(node)
    queue.add(neighbour)
    # A strategy without support is dropped first, when the queue comes to its node: its minimum is infinite.
    if len(tables.usable_rows(table)) < table.shape[0]:
        return
    if len(tables.usable_rows(tables.transpose(table))) < table.shape[1]:
        return
    rows, columns, rest = tables.normalise(table)
    network.add_costs(node, rows)
    network.add_costs(neighbour, columns)
    # The rest is at least 0 everywhere, so that the sum of all node minima is a bound, and a rest of zeros decides
    # nothing.
    network.drop_edge(node, neighbour)
    if rest is not None:
        network.add_edge(node, neighbour, rest)


def _fold(network: Network, node: int, queue: _Queue) -> None:
    """Remove a node of one strategy: its row of each edge is a cost of the neighbour."""
    network.offset += float(network.vectors[node][0])
    neighbours = dict(network.edges[node])
    tables = network.tables
    network.remove(node)
    for neighbour, table in neighbours.items():
        row = tables.compute("row", (table,), lambda table=table: tables.intern(table[0]))  # type: ignore[misc]
        network.add_costs(neighbour, row)
        queue.add(neighbour)


def _eliminate(network: Network, node: int, queue: _Queue, tidy: bool) -> None:
    """Remove a node of degree two or less: its best strategy follows from its neighbours'."""
    tables = network.tables
    vector = network.vectors[node]
    neighbours = list(network.edges[node].items())
    # The table that replaces the node may be far larger than its two edges: elimination with a good order does better.
    if len(neighbours) == 2 and neighbours[0][1].shape[1] * neighbours[1][1].shape[1] > _LARGEST_EDGE:
        return
    network.remove(node)
    if not neighbours:
        network.offset += float(vector.min())
        return
    if len(neighbours) == 1:
        [(neighbour, table)] = neighbours
        network.add_costs(neighbour, tables.message(vector, table))
        queue.add(neighbour)
        return
    (left, first), (right, second) = neighbours
    network.add_edge(left, right, tables.series(vector, first, second))
    if tidy:
        _normalise(network, left, right, queue)
    queue.add(left)
    queue.add(right)


def _drop_dominated(network: Network, node: int) -> bool:
    """Drop strategies that another one beats for all choices of the neighbours (Goldstein's criterion)."""
    vector = network.vectors[node]
    size = len(vector)
    if not 1 < size <= _DOMINANCE_DOMAIN:
        return False
    edges = list(network.edges[node].values())
    if any(table.size * size > _LARGEST_EDGE for table in edges):
        return False
    # The answer depends on these arrays alone, which equal layers share: one comparison serves all of them.
    usages = (network.usages[node],) if network.usages else ()
    keep = network.tables.compute(
        "undominated", (vector, *usages, *edges), lambda: _undominated_strategies(network, vector, usages, edges)
    )
    if len(keep) == size:
        return False
    network.keep(node, keep)
    return True


def _undominated_strategies(network: Network, vector: Array, usages: tuple[Array, ...], edges: list[Array]) -> IntArray:
    """Return the positions of the strategies that remain."""
    # Otherwise inf - inf would be NaN; the queue drops forbidden strategies first, and the search comes back.
    if not np.isfinite(vector).all():
        return network.tables.intern(np.arange(len(vector)))
    loss = vector[None, :] - vector[:, None]
    for table in edges:
        loss = loss + network.tables.advantage(table)
    more_memory = (usage[None, :] - usage[:, None] for usage in usages)
    return network.tables.intern(find_undominated(loss, *more_memory))
