"""Exact reductions: choices that are decided, or handed on to a neighbour, without changing the optimum."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from autoshard.solver.network import Network
from autoshard.solver.problem import Array, IntArray

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
    finite = tables.cached("finite", (vector,), lambda: bool(np.isfinite(vector).all()))
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
        row = tables.cached("row", (table,), lambda table=table: tables.intern(table[0]))  # type: ignore[misc]
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
    keep = network.tables.cached(
        "undominated", (vector, *usages, *edges), lambda: _undominated_strategies(network, vector, usages, edges)
    )
    if len(keep) == size:
        return False
    network.keep(node, keep)
    return True


def _undominated_strategies(network: Network, vector: Array, usages: tuple[Array, ...], edges: list[Array]) -> IntArray:
    """Return the positions of the strategies that remain; the first of equal ones stays."""
    size = len(vector)
    keep = np.ones(size, dtype=bool)
    # Otherwise inf - inf would be NaN; the queue drops forbidden strategies first, and the search comes back.
    if np.isfinite(vector).all():
        # loss[s, t]: the most that choosing t instead of s can add, over all choices of the neighbours.
        loss = vector[None, :] - vector[:, None]
        for table in edges:
            loss = loss + network.tables.advantage(table)
        better = loss <= 0
        for usage in usages:
            better &= usage[None, :] <= usage[:, None]
        np.fill_diagonal(better, False)
        # Only a strategy that is still there may drop another: rounding must not drop a whole circle.
        for strategy in reversed(range(size)):
            keep[strategy] = not (better[strategy] & keep).any()
    return network.tables.intern(np.flatnonzero(keep))
