"""Segments between critical nodes, merged one after another into one node (Rhino 4.3.2, the top of three levels)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.problem import Array, IntArray, Problem

_SURVIVOR_FACTOR = 4
"""Inside a segment there may be so many times the survivors that its pivot leaves."""


@dataclass(slots=True)
class _MergedSegments:
    """All segments so far, merged into one node; its strategies are the survivors.

    Attributes:
        costs: of each survivor, with what its open ends are expected to cost.
        open: nodes that are decided and have edges to nodes that are not.
        choices: [survivors, open nodes].
        steps: per node decided, each survivor's parent among the survivors before it, and its strategy.
    """

    costs: Array = field(default_factory=lambda: np.zeros(1))
    open: list[int] = field(default_factory=list)
    choices: IntArray = field(default_factory=lambda: np.zeros((1, 0), dtype=np.int64))
    steps: list[tuple[IntArray, IntArray]] = field(default_factory=list)


def merge_segments(problem: Problem, expected: Sequence[Array], pivots: Collection[int], width: int) -> tuple[int, ...]:
    """An assignment, found from the first node to the last.

    A survivor is an assignment of all nodes so far. Of survivors that agree wherever there is an edge to a node
    to come, the cheapest is kept, which loses nothing. At a pivot the `width` cheapest are kept, and the cheapest for
    every strategy of the pivot: this is the dynamic programming along the backbone, and what it loses are dear
    combinations of what else crosses the cut. Segments are merged without loss as long as the survivors do not swell.

    Args:
        problem: nodes in the order of the search, each edge from the earlier to the later node; at most one edge
            joins two nodes. The memory limit plays no part.
        expected: per edge and strategy of its source, what the edge is expected to cost.
        pivots: the nodes that end segments.
        width: survivors.

    Returns:
        A strategy per node; empty where every survivor ran into something forbidden.
    """
    edges: list[list[tuple[int, Array, Array]]] = [[] for _ in problem.costs]  # into each node: source, table, expected
    ahead = [np.zeros(len(vector)) for vector in problem.costs]
    last = np.full(problem.size, -1)
    for edge, costs in zip(problem.edges, expected, strict=True):
        edges[edge.target].append((edge.source, edge.costs, costs))
        ahead[edge.source] = ahead[edge.source] + costs
        last[edge.source] = max(last[edge.source], edge.target)
    head = _MergedSegments()
    for node, vector in enumerate(problem.costs):
        costs = head.costs[:, None] + (vector + ahead[node])[None, :]
        for source, table, costs_expected in edges[node]:
            costs += (table - costs_expected[:, None])[head.choices[:, head.open.index(source)]]
        _add_node(head, node, costs, last, width if node in pivots else _SURVIVOR_FACTOR * width, node in pivots)
        if not len(head.costs):
            return ()
    return _trace_back(head)


def _add_node(head: _MergedSegments, node: int, costs: Array, last: IntArray, width: int, pivot: bool) -> None:
    """Adds a node to the head, by the costs [survivors, strategies] that its strategies lead to."""
    strategies = costs.shape[1]
    staying = [column for column, other in enumerate(head.open) if last[other] > node]
    flat = costs.ravel()
    kept = np.flatnonzero(np.isfinite(flat))
    if len(staying) < len(head.open) or last[node] < 0:
        alike = _row_classes(head.choices[:, staying])
        group = np.repeat(alike, strategies) if last[node] < 0 else _pair_classes(alike, strategies)
        kept = _cheapest_of(group, flat, kept)
    if len(kept) > width:
        kept = _keep_cheapest(flat, kept, width, kept % strategies if pivot else None)
    parent, choice = kept // strategies, kept % strategies
    head.costs, head.choices = flat[kept], head.choices[parent][:, staying]
    head.open = [head.open[column] for column in staying]
    head.steps.append((parent, choice))
    if last[node] >= 0:
        head.open.append(node)
        head.choices = np.column_stack((head.choices, choice))


def _pair_classes(alike: IntArray, strategies: int) -> IntArray:
    return (alike[:, None] * strategies + np.arange(strategies)).ravel()


def _row_classes(choices: IntArray) -> IntArray:
    """A number per row, the same for equal rows."""
    number = np.zeros(len(choices), dtype=np.int64)
    for column in choices.T:
        number = np.unique(number * (column.max(initial=0) + 1) + column, return_inverse=True)[1].ravel()
    return number


def _cheapest_of(group: IntArray, costs: Array, places: IntArray) -> IntArray:
    """Of all places the cheapest of each group, in ascending order; of equal ones the first."""
    order = places[np.lexsort((costs[places], group[places]))]
    first = np.ones(len(order), dtype=bool)
    first[1:] = group[order[1:]] != group[order[:-1]]
    return np.sort(order[first])


def _keep_cheapest(costs: Array, places: IntArray, width: int, strategy: IntArray | None) -> IntArray:
    """The cheapest places, and the cheapest of each strategy where strategies are told, in ascending order."""
    kept = places[np.argsort(costs[places], kind="stable")[:width]]
    if strategy is not None:
        group = np.zeros(len(costs), dtype=np.int64)
        group[places] = strategy
        kept = np.union1d(kept, _cheapest_of(group, costs, places))
    return np.sort(kept)


def _trace_back(head: _MergedSegments) -> tuple[int, ...]:
    """The assignment of the cheapest survivor."""
    survivor = int(head.costs.argmin())
    choices = []
    for parent, choice in reversed(head.steps):
        choices.append(int(choice[survivor]))
        survivor = int(parent[survivor])
    return tuple(reversed(choices))
