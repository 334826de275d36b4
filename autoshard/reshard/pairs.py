"""Prices of the paths between many pairs of specs from one graph of all nests.

The path of a pair may use only the plain nests and those of its two ends, so that it depends on nothing else. Tensors
of many dims have so many groups of specs that a graph for every two of them takes minutes. The graph of all nests
contains the graphs of all pairs. If one of its shortest paths uses only the nests of a pair, that path is the pair's.
The other pairs are solved again without the states that they may not use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.reshard.states import Nest, State, StateGraph
from autoshard.solver.jit import compiled_when_called

Extra = frozenset[tuple[int, frozenset[Nest]]]
"""The dims, each with its nests beside the plain ones, that the paths from or to some specs may use."""

# Bits: groups of targets that are followed together.
_WORD = 64


@dataclass(frozen=True, slots=True)
class PairEnds:
    """One side of many pairs.

    Attributes:
        rows: positions of the specs in the table of prices.
        states: the states of the specs.
        places: positions of the states in the graph.
        groups: for every state, the position in `extras` of the nests that its paths may use beside the plain ones.
        extras: these nests.
    """

    rows: tuple[int, ...]
    states: tuple[State, ...]
    places: NDArray[np.int64]
    groups: NDArray[np.int64]
    extras: tuple[Extra, ...]

    @staticmethod
    def of(graph: StateGraph, by_extra: Mapping[Extra, Sequence[tuple[int, State]]]) -> PairEnds:
        """Return the states in the order of their groups."""
        listed = [(row, state, group) for group, rows in enumerate(by_extra.values()) for row, state in rows]
        rows, states, groups = zip(*listed, strict=True) if listed else ((), (), ())
        places = np.array([graph.index[state] for state in states], dtype=np.int64)
        return PairEnds(rows, states, places, np.array(groups, dtype=np.int64), tuple(by_extra))


def distances_of_pairs(
    graph: StateGraph,
    seconds: NDArray[np.float64],
    distance: NDArray[np.float64],
    plain: Sequence[frozenset[Nest]],
    sources: PairEnds,
    targets: PairEnds,
) -> NDArray[np.float64]:
    """Return the seconds of the cheapest path of every pair that uses plain nests and those of its ends alone.

    Args:
        graph: the graph of all nests.
        seconds: of its edges.
        distance: `[sources, states]`, seconds of the cheapest path in the graph.
        plain: per dim, the nests that all paths may use.
        sources, targets: the ends.
    """
    closed_to = _closed_dims(graph, plain, sources.extras), _closed_dims(graph, plain, targets.extras)
    # Lower bounds: these paths may use any nest.
    prices = distance[:, targets.places]
    # No path at all in the larger graph means none in the smaller one.
    proved = np.isinf(prices)
    for first in range(0, len(targets.extras), _WORD):
        of_word = (targets.groups >= first) & (targets.groups < first + _WORD)
        reached = _reachable_groups(
            graph, seconds, distance, sources, closed_to[0], closed_to[1][first : first + _WORD]
        )
        bits = np.uint64(1) << (targets.groups[of_word] - first).astype(np.uint64)
        proved[:, of_word] |= (reached[:, targets.places[of_word]] & bits) != 0
    if proved.all():
        return prices
    # A search from one source serves all targets of a group.
    unproved = np.zeros((len(prices), len(targets.extras)), dtype=np.bool_)
    rows, columns = np.nonzero(~proved)
    unproved[rows, targets.groups[columns]] = True
    order = np.argsort(targets.groups, kind="stable")
    begins = np.searchsorted(targets.groups[order], np.arange(len(targets.extras) + 1))
    _price_within(
        graph.source,
        np.searchsorted(graph.target, np.arange(len(graph.states) + 1)),
        seconds,
        *closed_to,
        np.argwhere(unproved),
        sources.groups,
        sources.places,
        targets.places,
        order,
        begins,
        prices,
    )
    return prices


def _closed_dims(graph: StateGraph, plain: Sequence[frozenset[Nest]], extras: Sequence[Extra]) -> NDArray[np.uint64]:
    """Return as bits, `[extras, states]`, the dims whose nest is neither a plain one nor one of the group's."""
    dims = np.zeros((len(extras), len(graph.states)), dtype=np.uint64)
    for number, extra in enumerate(extras):
        more = dict(extra)
        for dim, choices in enumerate(graph.nests):
            usable = plain[dim] | more.get(dim, frozenset())
            closed = np.array([nest not in usable for nest in choices])[graph.numbers[:, dim]]
            dims[number] |= closed.astype(np.uint64) << np.uint64(dim)
    return dims


def _reachable_groups(
    graph: StateGraph,
    seconds: NDArray[np.float64],
    distance: NDArray[np.float64],
    sources: PairEnds,
    from_source: NDArray[np.uint64],
    to_target: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Return as bits, `[sources, states]`, the groups of targets whose states alone a shortest path to a state uses."""
    shifts = np.uint64(1) << np.arange(len(to_target), dtype=np.uint64)
    # A pair may use a state if each dim is open to one of its ends: no dim is closed to both.
    allowed = np.stack(
        [np.bitwise_or.reduce(((closed & to_target) == 0) * shifts[:, None], axis=0) for closed in from_source]
    )[sources.groups]
    count = len(graph.states)
    with np.errstate(invalid="ignore"):
        # Edges of shortest paths. Distances are sums in the order of the path, so equality is exact.
        before = distance[:, graph.source]
        tight = (before + seconds == distance[:, graph.target]) & np.isfinite(before)
    row, edge = np.nonzero(tight)
    # `end` ascends, as targets do.
    start, end = row * count + graph.source[edge], row * count + graph.target[edge]
    first = np.flatnonzero(np.diff(end, prepend=-1))
    ends, limit = end[first], allowed.reshape(-1)
    reached = np.zeros(len(distance) * count, dtype=np.uint64)
    begin = np.arange(len(distance)) * count + sources.places
    reached[begin] = limit[begin]
    # Bits flow along these edges until nothing changes; a state passes on only bits of groups that may use it.
    while len(first):
        more = reached[ends] | (np.bitwise_or.reduceat(reached[start], first) & limit[ends])
        if np.array_equal(more, reached[ends]):
            break
        reached[ends] = more
    return reached.reshape(-1, count)


@compiled_when_called
def _price_within(  # pragma: no cover
    source: NDArray[np.int32],
    into: NDArray[np.int64],
    seconds: NDArray[np.float64],
    from_source: NDArray[np.uint64],
    to_target: NDArray[np.uint64],
    tasks: NDArray[np.int64],
    groups: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    prices: NDArray[np.float64],
) -> None:
    """Write the price of the cheapest path over the states that both ends may use into a table.

    Args:
        source: the states where edges begin; edges are ordered by the state where they end.
        into: the first edge into every state, and the number of edges.
        seconds: of the edges.
        from_source, to_target: `_closed_dims` of the groups of either end.
        tasks: pairs of a row of the table and a group of targets.
        groups, starts: the group and the state of every row.
        ends: the state of every column.
        order, first: the columns by group, and the beginning of every group in them.
        prices: the table.
    """
    distance = np.empty(len(into) - 1)
    usable = np.empty(len(into) - 1, dtype=np.int64)
    for task in range(len(tasks)):
        row, target = tasks[task]
        source_closed, target_closed = from_source[groups[row]], to_target[target]
        distance[:] = np.inf
        distance[starts[row]] = 0.0
        count = 0
        for state in range(len(distance)):
            if source_closed[state] & target_closed[state] == 0:
                usable[count] = state
                count += 1
        # Bellman-Ford, in place: within a sweep, later states see the gains of earlier ones.
        closer = True
        while closer:
            closer = False
            for state in usable[:count]:
                for edge in range(into[state], into[state + 1]):
                    through = distance[source[edge]] + seconds[edge]
                    if through < distance[state]:
                        distance[state] = through
                        closer = True
        for column in order[first[target] : first[target + 1]]:
            prices[row, column] = distance[ends[column]]
