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

Extra = frozenset[tuple[int, frozenset[Nest]]]
"""The dims, and the nests there beside the plain ones, that the paths from or to some specs may use."""

_WORD = 64


@dataclass(frozen=True, slots=True)
class Ends:
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
    def of(graph: StateGraph, by_extra: Mapping[Extra, Sequence[tuple[int, State]]]) -> Ends:
        """The states, in the order of their groups."""
        listed = [(row, state, group) for group, rows in enumerate(by_extra.values()) for row, state in rows]
        rows, states, groups = zip(*listed, strict=True) if listed else ((), (), ())
        places = np.array([graph.index[state] for state in states], dtype=np.int64)
        return Ends(rows, states, places, np.array(groups, dtype=np.int64), tuple(by_extra))


def distances_of_pairs(
    graph: StateGraph,
    seconds: NDArray[np.float64],
    distance: NDArray[np.float64],
    plain: Sequence[frozenset[Nest]],
    sources: Ends,
    targets: Ends,
) -> NDArray[np.float64]:
    """Seconds of the cheapest path between every source and every target that uses their nests and plain ones alone.

    Args:
        graph: of all nests.
        seconds: of its edges.
        distance: `[sources, states]`, seconds of the cheapest path in the graph.
        plain: per dim, the nests that all paths may use.
        sources, targets: the ends.
    """
    open_to = _open_states(graph, plain, sources.extras), _open_states(graph, plain, targets.extras)
    found = distance[:, targets.places]
    proved = np.isinf(found)
    for first in range(0, len(targets.extras), _WORD):
        held = (targets.groups >= first) & (targets.groups < first + _WORD)
        reached = _reached(graph, seconds, distance, sources, open_to[0], open_to[1][first : first + _WORD])
        bits = np.uint64(1) << (targets.groups[held] - first).astype(np.uint64)
        proved[:, held] |= (reached[:, targets.places[held]] & bits) != 0
    for source, target in {(sources.groups[row], targets.groups[column]) for row, column in np.argwhere(~proved)}:
        columns = np.flatnonzero(targets.groups == target)
        rows = np.flatnonzero((sources.groups == source) & ~proved[:, columns].all(axis=1))
        states = (open_to[0][source] | open_to[1][target]).all(axis=1)
        within = _within(graph, seconds, states, sources.places[rows])
        found[np.ix_(rows, columns)] = within[targets.places[columns]].T
    return found


def _open_states(graph: StateGraph, plain: Sequence[frozenset[Nest]], extras: Sequence[Extra]) -> NDArray[np.bool_]:
    """`[extras, states, dims]`: whether the nest of a dim is a plain one, or one of the group's."""
    found = np.zeros((len(extras), *graph.numbers.shape), dtype=np.bool_)
    for number, extra in enumerate(extras):
        more = dict(extra)
        for dim, choices in enumerate(graph.nests):
            usable = plain[dim] | more.get(dim, frozenset())
            found[number, :, dim] = np.array([nest in usable for nest in choices])[graph.numbers[:, dim]]
    return found


def _reached(
    graph: StateGraph,
    seconds: NDArray[np.float64],
    distance: NDArray[np.float64],
    sources: Ends,
    from_source: NDArray[np.bool_],
    to_target: NDArray[np.bool_],
) -> NDArray[np.uint64]:
    """`[sources, states]`: as bits, to which groups of targets a shortest path may go on that has come so far."""
    shifts = np.uint64(1) << np.arange(len(to_target), dtype=np.uint64)
    allowed = np.stack(
        [((one | to_target).all(axis=2) * shifts[:, None]).sum(axis=0, dtype=np.uint64) for one in from_source]
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


def _within(
    graph: StateGraph, seconds: NDArray[np.float64], states: NDArray[np.bool_], places: NDArray[np.int64]
) -> NDArray[np.float64]:
    """`[states, places]`: seconds from some places to every state, over no other states than those given."""
    edges = np.flatnonzero(states[graph.source] & states[graph.target])
    source, target, price = graph.source[edges], graph.target[edges], seconds[edges, None]
    distance = np.full((len(graph.states), len(places)), np.inf)
    distance[places, np.arange(len(places))] = 0.0
    first = np.flatnonzero(np.diff(target, prepend=-1))
    ends = target[first]
    while len(first):
        closer = np.minimum(distance[ends], np.minimum.reduceat(distance[source] + price, first, axis=0))
        if np.array_equal(closer, distance[ends]):
            break
        distance[ends] = closer
    return distance
