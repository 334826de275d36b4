"""The problem during its solve: a simple graph that shrinks, with a record of its reductions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.problem import Array, IntArray, Problem
from autoshard.solver.tables import Tables


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
