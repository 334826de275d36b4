"""The working memory of presolve: a graph from which nodes are removed and to which edges are added."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.jit import jit_inner

OFFSET, WORK = 0, 1
"""Indices of `Arena.numbers`: the cost decided so far; the work so far, in table entries read."""

EDGES, CELLS, USED, REMOVED, MAPPED, FAILED, FULL = range(7)
"""Indices of `Arena.counts`: the used length of each array; 1 once a node has lost its last strategy; a bit for each
array that was too short: edges, tables, usages, choices."""

FIRST_EDGE, WAITING_EDGES, FIRST_NODE, WAITING_NODES = range(7, 11)
"""Indices of `Arena.counts`: the starts and lengths of the ring buffers of queued edges and nodes."""

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
"""Records rather than an array per field: numba compiles more code for every array argument."""


class Arena(NamedTuple):
    """A graph in arrays that numba loops change in place. A dropped strategy has infinite cost.

    Half-edge 2e belongs to the node of the rows of edge e, 2e + 1 to that of the columns.

    Attributes:
        nodes: per node its number of strategies, the start of its costs in `cost`, its first half-edge (-1: none), its
            degree, its first memory item (-1: none), `gone` if it was removed, and `stale` if its items may have become
            constant.
        halves: per half-edge its node, and the next and previous half-edges in the list of that node.
        edges: per edge the start of its table in `table`, row-major over all strategies of its ends, and `dropped` if
            it was removed.
        items: per memory item the moments [low, high), the start of its usages in `usage`, and the next item of its
            node.
        cost: costs of the strategies of all nodes.
        table: all tables.
        usage: all items' usages, one per strategy of the node.
        base: changes of the memory used under any choice (a difference array over moments).
        removed: rows (node, neighbour or -1, neighbour or -1, start in `choice`) in order of removal.
        choice: best strategies of removed nodes, by the strategies of those neighbours.
        numbers, counts: see the constants above.

    The fields `waiting` of all nodes form a ring buffer of queued nodes; `queued` is True for its members. Likewise for
    edges.
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
def other_end(arena, half):  # type: ignore[no-untyped-def]
    """Return the node at the other end of a half-edge's edge."""
    return arena.halves[half ^ 1].end


@jit_inner
def edge_of(half):  # type: ignore[no-untyped-def]
    """Return the edge of a half-edge."""
    return half >> 1


@jit_inner
def push_edge(arena, edge):  # type: ignore[no-untyped-def]
    """Queue an edge, unless it is queued or dropped."""
    if not arena.edges[edge].queued and not arena.edges[edge].dropped:
        arena.edges[edge].queued = True
        # An edge waits at most once, so a ring as long as the array of edges is never full.
        place = (arena.counts[FIRST_EDGE] + arena.counts[WAITING_EDGES]) % len(arena.edges)
        arena.edges[place].waiting = edge
        arena.counts[WAITING_EDGES] += 1


@jit_inner
def push_node(arena, node):  # type: ignore[no-untyped-def]
    """Queue a node, unless it is queued or removed."""
    if not arena.nodes[node].queued and not arena.nodes[node].gone:
        arena.nodes[node].queued = True
        place = (arena.counts[FIRST_NODE] + arena.counts[WAITING_NODES]) % len(arena.nodes)
        arena.nodes[place].waiting = node
        arena.counts[WAITING_NODES] += 1


@jit_inner
def pop_edge(arena):  # type: ignore[no-untyped-def]
    """Return the next queued edge, -1 if there is none."""
    if arena.counts[WAITING_EDGES] == 0:
        return -1
    edge = arena.edges[arena.counts[FIRST_EDGE]].waiting
    arena.counts[FIRST_EDGE] = (arena.counts[FIRST_EDGE] + 1) % len(arena.edges)
    arena.counts[WAITING_EDGES] -= 1
    arena.edges[edge].queued = False
    return edge


@jit_inner
def pop_node(arena):  # type: ignore[no-untyped-def]
    """Return the next queued node, -1 if there is none."""
    if arena.counts[WAITING_NODES] == 0:
        return -1
    node = arena.nodes[arena.counts[FIRST_NODE]].waiting
    arena.counts[FIRST_NODE] = (arena.counts[FIRST_NODE] + 1) % len(arena.nodes)
    arena.counts[WAITING_NODES] -= 1
    arena.nodes[node].queued = False
    return node


@jit_inner
def link(arena, half):  # type: ignore[no-untyped-def]
    """Insert a half-edge at the head of the list of its node."""
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
    """Remove a half-edge from the list of its node."""
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
    """Remove an edge; its table stays where it is."""
    unlink(arena, 2 * edge)
    unlink(arena, 2 * edge + 1)
    arena.edges[edge].dropped = True


@jit_inner
def find_edge(arena, source, target):  # type: ignore[no-untyped-def]
    """Return the half-edge at `source` of the edge between two nodes, -1 if there is none."""
    # A hub may have thousands of edges: search the list of the end with fewer.
    near, far = (source, target) if arena.nodes[source].degree <= arena.nodes[target].degree else (target, source)
    half = arena.nodes[near].head
    while half >= 0:
        arena.numbers[WORK] += 1
        if other_end(arena, half) == far:
            # The two half-edges of an edge differ in their last bit.
            return half if near == source else half ^ 1
        half = arena.halves[half].after
    return -1


@jit_inner
def new_edge(arena, source, target):  # type: ignore[no-untyped-def]
    """Add an edge with a table of zeros, with `source` as rows, and return it; the caller has checked the room."""
    edge = arena.counts[EDGES]
    arena.counts[EDGES] += 1
    arena.halves[2 * edge].end = source
    arena.halves[2 * edge + 1].end = target
    arena.edges[edge].start = arena.counts[CELLS]
    cells = arena.nodes[source].size * arena.nodes[target].size
    arena.table[arena.counts[CELLS] : arena.counts[CELLS] + cells] = 0.0
    arena.counts[CELLS] += cells
    arena.edges[edge].dropped = False
    arena.edges[edge].queued = False
    link(arena, 2 * edge)
    link(arena, 2 * edge + 1)
    return edge


@jit_inner
def strides(arena, half):  # type: ignore[no-untyped-def]
    """Return the start of a half-edge's table, and its strides over the strategies of its node and the other node."""
    edge = edge_of(half)
    columns = arena.nodes[arena.halves[2 * edge + 1].end].size
    # From the end of the columns, the table is transposed.
    if half & 1:
        return arena.edges[edge].start, 1, columns
    return arena.edges[edge].start, columns, 1
