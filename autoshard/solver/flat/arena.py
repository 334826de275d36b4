"""The working memory of exact presolve: a graph in flat arrays that nodes leave and edges join."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.flat.numba_jit import jit_inner

OFFSET, WORK = 0, 1
"""Places in `Arena.numbers`: cost decided so far; steps done so far, in table entries looked at."""

EDGES, CELLS, ITEMS, USED, REMOVED, MAPPED, FAILED, FULL = range(8)
"""Places in `Arena.counts`: how much of each array is in use; whether a node lost its last strategy; whether room ran
out."""

FIRST_EDGE, WAITING_EDGES, FIRST_NODE, WAITING_NODES = range(8, 12)
"""Places in `Arena.counts`: where the rings of waiting edges and nodes begin, and how many wait."""

ARENA_NODE = np.dtype(
    [
        *((name, np.int64) for name in ("size", "offset", "head", "degree", "first_item", "waiting")),
        *((name, np.bool_) for name in ("gone", "stale", "queued")),
    ],
    align=True,
)
ARENA_HALF = np.dtype([(name, np.int64) for name in ("end", "after", "before")], align=True)
ARENA_EDGE = np.dtype(
    [("start", np.int64), ("waiting", np.int64), ("dropped", np.bool_), ("queued", np.bool_)], align=True
)
ARENA_ITEM = np.dtype([(name, np.int64) for name in ("low", "high", "start", "following")], align=True)
"""Records rather than an array per field: what numba compiles grows with the number of arrays that a loop is given."""


class Arena(NamedTuple):
    """A graph, in arrays that numba's loops change in place. A strategy is gone when its cost is infinite.

    Half-edge 2e stands at the node of the rows of edge e, 2e + 1 at that of the columns.

    Attributes:
        nodes: per node its number of strategies, where its costs start in `cost`, its first half-edge (-1: none), how
            many it has, its first memory item (-1: none), whether it was removed, and whether its items may have
            become constant.
        halves: per half-edge its node, and the half-edges after and before it in the list of that node.
        edges: per edge where its table starts in `table`, row-major over all strategies of its ends, and whether it
            was removed.
        items: per memory item the moments [low, high), where its usages start in `usage`, and the next one of its node.
        cost: all nodes' strategies' costs.
        table: all tables.
        usage: all items' usages, one per strategy of the node.
        base: change at each moment of what is used whatever is chosen (a difference array).
        removed: rows (node, neighbour or -1, neighbour or -1, start in `choice`) in order of removal.
        choice: best strategies of removed nodes, by the strategies of those neighbours.
        numbers, counts: see the constants above.

    The fields `waiting` of all nodes together are a ring of those to look at, `queued` says who is in it; likewise the
    edges'.
    """

    nodes: Any
    halves: Any
    edges: Any
    items: Any
    cost: Any
    table: Any
    usage: Any
    base: Any
    removed: Any
    choice: Any
    numbers: Any
    counts: Any


@jit_inner
def push_edge(arena, edge):  # type: ignore[no-untyped-def]
    """Notes an edge to be looked at."""
    if not arena.edges[edge].queued and not arena.edges[edge].dropped:
        arena.edges[edge].queued = True
        place = (arena.counts[FIRST_EDGE] + arena.counts[WAITING_EDGES]) % len(arena.edges)
        arena.edges[place].waiting = edge
        arena.counts[WAITING_EDGES] += 1


@jit_inner
def push_node(arena, node):  # type: ignore[no-untyped-def]
    """Notes a node to be looked at."""
    if not arena.nodes[node].queued and not arena.nodes[node].gone:
        arena.nodes[node].queued = True
        place = (arena.counts[FIRST_NODE] + arena.counts[WAITING_NODES]) % len(arena.nodes)
        arena.nodes[place].waiting = node
        arena.counts[WAITING_NODES] += 1


@jit_inner
def pop_edge(arena):  # type: ignore[no-untyped-def]
    """The next edge to look at, -1 if none."""
    if arena.counts[WAITING_EDGES] == 0:
        return -1
    edge = arena.edges[arena.counts[FIRST_EDGE]].waiting
    arena.counts[FIRST_EDGE] = (arena.counts[FIRST_EDGE] + 1) % len(arena.edges)
    arena.counts[WAITING_EDGES] -= 1
    arena.edges[edge].queued = False
    return edge


@jit_inner
def pop_node(arena):  # type: ignore[no-untyped-def]
    """The next node to look at, -1 if none."""
    if arena.counts[WAITING_NODES] == 0:
        return -1
    node = arena.nodes[arena.counts[FIRST_NODE]].waiting
    arena.counts[FIRST_NODE] = (arena.counts[FIRST_NODE] + 1) % len(arena.nodes)
    arena.counts[WAITING_NODES] -= 1
    arena.nodes[node].queued = False
    return node


@jit_inner
def link(arena, half):  # type: ignore[no-untyped-def]
    """Puts a half-edge first in the list of its node."""
    node = arena.halves[half].end
    following = arena.nodes[node].head
    arena.halves[half].after = following
    arena.halves[half].before = -1
    if following >= 0:
        arena.halves[following].before = half
    arena.nodes[node].head = half
    arena.nodes[node].degree += 1


@jit_inner
def unlink(arena, half):  # type: ignore[no-untyped-def]
    """Takes a half-edge out of the list of its node."""
    node = arena.halves[half].end
    previous, following = arena.halves[half].before, arena.halves[half].after
    if previous >= 0:
        arena.halves[previous].after = following
    else:
        arena.nodes[node].head = following
    if following >= 0:
        arena.halves[following].before = previous
    arena.nodes[node].degree -= 1


@jit_inner
def drop_edge(arena, edge):  # type: ignore[no-untyped-def]
    """Takes an edge out; its table stays where it is."""
    unlink(arena, 2 * edge)
    unlink(arena, 2 * edge + 1)
    arena.edges[edge].dropped = True


@jit_inner
def find_edge(arena, one, other):  # type: ignore[no-untyped-def]
    """The half-edge at `one` of the edge that joins two nodes, -1 if none does."""
    near, far = (one, other) if arena.nodes[one].degree <= arena.nodes[other].degree else (other, one)
    half = arena.nodes[near].head
    while half >= 0:
        arena.numbers[WORK] += 1
        if arena.halves[half ^ 1].end == far:
            return half if near == one else half ^ 1
        half = arena.halves[half].after
    return -1


@jit_inner
def new_edge(arena, one, other):  # type: ignore[no-untyped-def]
    """A new edge with a table of zeros, `one` at its rows; the caller has seen to it that there is room."""
    edge = arena.counts[EDGES]
    arena.counts[EDGES] += 1
    arena.halves[2 * edge].end = one
    arena.halves[2 * edge + 1].end = other
    arena.edges[edge].start = arena.counts[CELLS]
    cells = arena.nodes[one].size * arena.nodes[other].size
    arena.table[arena.counts[CELLS] : arena.counts[CELLS] + cells] = 0.0
    arena.counts[CELLS] += cells
    arena.edges[edge].dropped = False
    arena.edges[edge].queued = False
    link(arena, 2 * edge)
    link(arena, 2 * edge + 1)
    return edge


@jit_inner
def strides(arena, half):  # type: ignore[no-untyped-def]
    """Where the table of a half-edge starts, and the steps from strategy to strategy of its node and of the other."""
    edge = half >> 1
    columns = arena.nodes[arena.halves[2 * edge + 1].end].size
    if half & 1:
        return arena.edges[edge].start, 1, columns
    return arena.edges[edge].start, columns, 1
