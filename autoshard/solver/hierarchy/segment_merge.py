"""Merge of the segments between critical nodes, one after another (Rhino 4.3.2, the top of three levels)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.problem import Array, IntArray, Problem

_SURVIVOR_FACTOR = 4
"""Survivors inside a segment, as a multiple of those that its pivot leaves; a guess that works."""


@dataclass(slots=True)
class _MergedSegments:
    """All segments so far, merged into one node whose strategies are the survivors.

    Attributes:
        costs: of each survivor, with the expected costs of its open edges.
        open: decided nodes with edges to undecided ones.
        choices: [survivors, open nodes].
        steps: per decided node, each survivor's parent among the survivors before it, and its strategy.
    """

    costs: Array = field(default_factory=lambda: np.zeros(1))
    open: list[int] = field(default_factory=list)
    choices: IntArray = field(default_factory=lambda: np.zeros((1, 0), dtype=np.int64))
    steps: list[tuple[IntArray, IntArray]] = field(default_factory=list)


def merge_segments(problem: Problem, expected: Sequence[Array], pivots: Collection[int], width: int) -> tuple[int, ...]:
    """Return an assignment, searched from the first node to the last.

    A survivor is an assignment of all nodes so far. Of survivors that agree on all nodes with edges to undecided ones,
    only the cheapest is kept, which loses nothing. At a pivot the `width` cheapest are kept, and the cheapest for every
    strategy of the pivot. This is the dynamic programming along the backbone; it loses only expensive combinations of
    the other nodes across the cut. Segments are merged without loss while the survivors stay few.

    Args:
        problem: nodes in the order of the search, each edge from the earlier to the later node; at most one edge joins
            two nodes. The memory limit plays no part.
        expected: per edge and strategy of its source, the expected cost of the edge.
        pivots: the nodes that end segments.
        width: survivors.

    Returns:
        A strategy per node; empty if every survivor met something forbidden.
    """
    # Into each node: source, table, expected.
    edges: list[list[tuple[int, Array, Array]]] = [[] for _ in problem.costs]
    expected_ahead = [np.zeros(len(vector)) for vector in problem.costs]
    last = np.full(problem.size, -1)
    for edge, costs in zip(problem.edges, expected, strict=True):
        edges[edge.target].append((edge.source, edge.costs, costs))
        expected_ahead[edge.source] = expected_ahead[edge.source] + costs
        last[edge.source] = max(last[edge.source], edge.target)
    head = _MergedSegments()
    for node, vector in enumerate(problem.costs):
        costs = head.costs[:, None] + (vector + expected_ahead[node])[None, :]
        for source, table, costs_expected in edges[node]:
            # The real cost of an edge takes the place of the expected one.
            costs += (table - costs_expected[:, None])[head.choices[:, head.open.index(source)]]
        _add_node(head, node, costs, last, width if node in pivots else _SURVIVOR_FACTOR * width, node in pivots)
        if not len(head.costs):
            return ()
    return _trace_back(head)


def _add_node(head: _MergedSegments, node: int, costs: Array, last: IntArray, width: int, pivot: bool) -> None:
    """Add a node to the head, given the costs [survivors, strategies] of its strategies."""
    strategies = costs.shape[1]
    open_columns = [column for column, open_node in enumerate(head.open) if last[open_node] > node]
    # Place p of the flat array is survivor p // strategies with strategy p % strategies.
    flat = costs.ravel()
    kept = np.flatnonzero(np.isfinite(flat))
    if len(open_columns) < len(head.open) or last[node] < 0:
        alike = _row_classes(head.choices[:, open_columns])
        if last[node] < 0:
            # No edge to a later node: its strategy need not be remembered.
            group = np.repeat(alike, strategies)
        else:
            group = (alike[:, None] * strategies + np.arange(strategies)).ravel()
        # Where the future cannot tell two survivors apart, the dearer one can never win.
        kept = _cheapest_of(group, flat, kept)
    if len(kept) > width:
        kept = _keep_cheapest(flat, kept, width, kept % strategies if pivot else None)
    parent, choice = kept // strategies, kept % strategies
    head.costs, head.choices = flat[kept], head.choices[parent][:, open_columns]
    head.open = [head.open[column] for column in open_columns]
    head.steps.append((parent, choice))
    if last[node] >= 0:
        head.open.append(node)
        head.choices = np.column_stack((head.choices, choice))


def _row_classes(choices: IntArray) -> IntArray:
    """Return a number per row, the same for equal rows."""
    number = np.zeros(len(choices), dtype=np.int64)
    for column in choices.T:
        # Renumbered after every column: products of many columns would overflow.
        number = np.unique(number * (column.max(initial=0) + 1) + column, return_inverse=True)[1].ravel()
    return number


def _cheapest_of(group: IntArray, costs: Array, places: IntArray) -> IntArray:
    """Return the cheapest place of each group, ascending; the first of equal ones."""
    order = places[np.lexsort((costs[places], group[places]))]
    first = np.ones(len(order), dtype=bool)
    first[1:] = group[order[1:]] != group[order[:-1]]
    return np.sort(order[first])


def _keep_cheapest(costs: Array, places: IntArray, width: int, strategy: IntArray | None) -> IntArray:
    """Return the cheapest places, and the cheapest of each strategy if strategies are given, ascending."""
    kept = places[np.argsort(costs[places], kind="stable")[:width]]
    if strategy is not None:
        group = np.zeros(len(costs), dtype=np.int64)
        group[places] = strategy
        kept = np.union1d(kept, _cheapest_of(group, costs, places))
    return np.sort(kept)


def _trace_back(head: _MergedSegments) -> tuple[int, ...]:
    """Return the assignment of the cheapest survivor."""
    survivor = int(head.costs.argmin())
    choices = []
    for parent, choice in reversed(head.steps):
        choices.append(int(choice[survivor]))
        survivor = int(parent[survivor])
    return tuple(reversed(choices))
