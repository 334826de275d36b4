"""Prices of the paths between many specs, each pair in the graph of its own nests, found in one graph of all nests.

The path of a pair may use the plain nests and those of its two ends, so that it depends on nothing else. Groups of
specs are so many that a graph for every two of them takes minutes where tensors have many dims. The graph of all nests
holds those of all pairs. Where one of its shortest paths keeps to the nests of a pair, it is the pair's; only what is
left is looked for again, with the other states left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.reshard.states import Nest, State, StateGraph
from autoshard.solver.jit import compiled_when_called

Extra = frozenset[tuple[int, frozenset[Nest]]]
"""The dims, and the nests there beside the plain ones, that the paths from or to some specs may use."""

_WORD = 64


@dataclass(frozen=True, slots=True)
class PairEnds:
    """One side of many pairs.

    Attributes:
        rows: positions of the specs among those that were asked for.
        states: theirs.
        places: positions of the states in the graph.
        groups: for every state, the number of the nests beside the plain ones that its paths may use.
        extras: these.
    """

    rows: tuple[int, ...]
    states: tuple[State, ...]
    places: NDArray[np.int64]
    groups: NDArray[np.int64]
    extras: tuple[Extra, ...]

    @staticmethod
    def of(graph: StateGraph, by_extra: Mapping[Extra, Sequence[tuple[int, State]]]) -> PairEnds:
        """The states, in the order of their groups."""
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
    """Seconds of the cheapest path between every source and every target that uses their nests and plain ones alone.

    Args:
        graph: of all nests.
        seconds: of its edges.
        distance: `[sources, states]`, seconds of the cheapest path in the graph.
        plain: per dim, the nests that all paths may use.
        sources, targets: the ends.
    """
    closed_to = _closed_dims(graph, plain, sources.extras), _closed_dims(graph, plain, targets.extras)
    found = distance[:, targets.places]
    proved = np.isinf(found)
    for first in range(0, len(targets.extras), _WORD):
        held = (targets.groups >= first) & (targets.groups < first + _WORD)
        reached = _reachable_groups(
            graph, seconds, distance, sources, closed_to[0], closed_to[1][first : first + _WORD]
        )
        bits = np.uint64(1) << (targets.groups[held] - first).astype(np.uint64)
        proved[:, held] |= (reached[:, targets.places[held]] & bits) != 0
    if proved.all():
        return found
    unproved = np.zeros((len(found), len(targets.extras)), dtype=np.bool_)
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
        found,
    )
    return found


def _closed_dims(graph: StateGraph, plain: Sequence[frozenset[Nest]], extras: Sequence[Extra]) -> NDArray[np.uint64]:
    """`[extras, states]`: as bits, the dims whose nest is neither a plain one nor one of the group's."""
    found = np.zeros((len(extras), len(graph.states)), dtype=np.uint64)
    for number, extra in enumerate(extras):
        more = dict(extra)
        for dim, choices in enumerate(graph.nests):
            usable = plain[dim] | more.get(dim, frozenset())
            closed = np.array([nest not in usable for nest in choices])[graph.numbers[:, dim]]
            found[number] |= closed.astype(np.uint64) << np.uint64(dim)
    return found


def _reachable_groups(
    graph: StateGraph,
    seconds: NDArray[np.float64],
    distance: NDArray[np.float64],
    sources: PairEnds,
    from_source: NDArray[np.uint64],
    to_target: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """`[sources, states]`: as bits, to which groups of targets a shortest path may go on that has come so far."""
    shifts = np.uint64(1) << np.arange(len(to_target), dtype=np.uint64)
    allowed = np.stack(
        [np.bitwise_or.reduce(((one & to_target) == 0) * shifts[:, None], axis=0) for one in from_source]
    )[sources.groups]
    count = len(graph.states)
    with np.errstate(invalid="ignore"):
        before = distance[:, graph.source]
        tight = (before + seconds == distance[:, graph.target]) & np.isfinite(before)
    row, edge = np.nonzero(tight)
    start, end = row * count + graph.source[edge], row * count + graph.target[edge]  # `end` ascends, as targets do
    first = np.flatnonzero(np.diff(end, prepend=-1))
    ends, limit = end[first], allowed.reshape(-1)
    reached = np.zeros(len(distance) * count, dtype=np.uint64)
    own = np.arange(len(distance)) * count + sources.places
    reached[own] = limit[own]
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
    found: NDArray[np.float64],
) -> None:
    """Write the price of the cheapest path over no other states than those of both ends into a table.

    Args:
        source: where edges begin, by the state in which they end.
        into: the first edge into every state, and behind them all.
        seconds: of the edges.
        from_source, to_target: of the groups, as `_closed_dims` has them.
        tasks: pairs of a row of the table and a group of targets.
        groups, starts: the group and the state of every row.
        ends: the state of every column.
        order, first: the columns by group, and where those of every group begin.
        found: the table.
    """
    distance = np.empty(len(into) - 1)
    usable = np.empty(len(into) - 1, dtype=np.int64)
    for task in range(len(tasks)):
        row, target = tasks[task]
        one, other = from_source[groups[row]], to_target[target]
        distance[:] = np.inf
        distance[starts[row]] = 0.0
        count = 0
        for state in range(len(distance)):
            if one[state] & other[state] == 0:
                usable[count] = state
                count += 1
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
            found[row, column] = distance[ends[column]]
