"""The working memory of exact presolve: a graph in flat arrays that nodes leave and edges join."""

from __future__ import annotations

from typing import Any, NamedTuple

from autoshard.solver.flat.jit import compiled

OFFSET, WORK = 0, 1
"""Places in `Arena.numbers`: cost decided so far; steps done so far, in table entries looked at."""

EDGES, CELLS, ITEMS, USED, REMOVED, MAPPED, FAILED, FULL = range(8)
"""Places in `Arena.counts`: how much of each array is in use; whether a node lost its last strategy; whether room ran
out."""


class Arena(NamedTuple):
    """A graph, in arrays that numba's loops change in place. A strategy is gone when its cost is infinite.

    Half-edge 2e stands at the node of the rows of edge e, 2e + 1 at that of the columns.

    Attributes:
        size, offset: per node its number of strategies, and where its costs start in `cost`.
        cost: all nodes' strategies' costs.
        gone: per node, whether it was removed.
        head, degree: per node its first half-edge (-1: none), and how many it has.
        end, after, before: per half-edge its node, and its neighbours in the list of that node.
        start: per edge where its table starts in `table`, row-major over all strategies of its ends.
        dropped: per edge, whether it was removed.
        table: all tables.
        first_item, next_item: per node its first memory item, per item the next one of its node.
        low, high, usage_start: per item the moments [low, high) and where its usages start in `usage`.
        usage: all items' usages, one per strategy of the node.
        stale: per node, whether its items may have become constant.
        base: change at each moment of what is used whatever is chosen (a difference array).
        removed: rows (node, neighbour or -1, neighbour or -1, start in `choice`) in order of removal.
        choice: best strategies of removed nodes, by the strategies of those neighbours.
        numbers, counts: see the constants above.
        edge_queue, node_queue: rings; `queue_ends` their heads and lengths, `queued_*` who is in them.
    """

    size: Any
    offset: Any
    cost: Any
    gone: Any
    head: Any
    degree: Any
    end: Any
    after: Any
    before: Any
    start: Any
    dropped: Any
    table: Any
    first_item: Any
    next_item: Any
    low: Any
    high: Any
    usage_start: Any
    usage: Any
    stale: Any
    base: Any
    removed: Any
    choice: Any
    numbers: Any
    counts: Any
    edge_queue: Any
    node_queue: Any
    queue_ends: Any
    queued_edge: Any
    queued_node: Any


@compiled
def push_edge(arena, edge):  # type: ignore[no-untyped-def]
    """Notes an edge to be looked at."""
    if not arena.queued_edge[edge] and not arena.dropped[edge]:
        arena.queued_edge[edge] = True
        capacity = len(arena.edge_queue)
        arena.edge_queue[(arena.queue_ends[0] + arena.queue_ends[1]) % capacity] = edge
        arena.queue_ends[1] += 1


@compiled
def push_node(arena, node):  # type: ignore[no-untyped-def]
    """Notes a node to be looked at."""
    if not arena.queued_node[node] and not arena.gone[node]:
        arena.queued_node[node] = True
        capacity = len(arena.node_queue)
        arena.node_queue[(arena.queue_ends[2] + arena.queue_ends[3]) % capacity] = node
        arena.queue_ends[3] += 1


@compiled
def pop_edge(arena):  # type: ignore[no-untyped-def]
    """The next edge to look at, -1 if none."""
    if arena.queue_ends[1] == 0:
        return -1
    edge = arena.edge_queue[arena.queue_ends[0]]
    arena.queue_ends[0] = (arena.queue_ends[0] + 1) % len(arena.edge_queue)
    arena.queue_ends[1] -= 1
    arena.queued_edge[edge] = False
    return edge


@compiled
def pop_node(arena):  # type: ignore[no-untyped-def]
    """The next node to look at, -1 if none."""
    if arena.queue_ends[3] == 0:
        return -1
    node = arena.node_queue[arena.queue_ends[2]]
    arena.queue_ends[2] = (arena.queue_ends[2] + 1) % len(arena.node_queue)
    arena.queue_ends[3] -= 1
    arena.queued_node[node] = False
    return node


@compiled
def link(arena, half):  # type: ignore[no-untyped-def]
    """Puts a half-edge first in the list of its node."""
    node = arena.end[half]
    following = arena.head[node]
    arena.after[half] = following
    arena.before[half] = -1
    if following >= 0:
        arena.before[following] = half
    arena.head[node] = half
    arena.degree[node] += 1


@compiled
def unlink(arena, half):  # type: ignore[no-untyped-def]
    """Takes a half-edge out of the list of its node."""
    node = arena.end[half]
    previous, following = arena.before[half], arena.after[half]
    if previous >= 0:
        arena.after[previous] = following
    else:
        arena.head[node] = following
    if following >= 0:
        arena.before[following] = previous
    arena.degree[node] -= 1


@compiled
def drop_edge(arena, edge):  # type: ignore[no-untyped-def]
    """Takes an edge out; its table stays where it is."""
    unlink(arena, 2 * edge)
    unlink(arena, 2 * edge + 1)
    arena.dropped[edge] = True


@compiled
def find_edge(arena, one, other):  # type: ignore[no-untyped-def]
    """The half-edge at `one` of the edge that joins two nodes, -1 if none does."""
    near, far = (one, other) if arena.degree[one] <= arena.degree[other] else (other, one)
    half = arena.head[near]
    while half >= 0:
        arena.numbers[WORK] += 1
        if arena.end[half ^ 1] == far:
            return half if near == one else half ^ 1
        half = arena.after[half]
    return -1


@compiled
def new_edge(arena, one, other):  # type: ignore[no-untyped-def]
    """A new edge with a table of zeros, `one` at its rows; the caller has seen to it that there is room."""
    edge = arena.counts[EDGES]
    arena.counts[EDGES] += 1
    arena.end[2 * edge] = one
    arena.end[2 * edge + 1] = other
    arena.start[edge] = arena.counts[CELLS]
    cells = arena.size[one] * arena.size[other]
    arena.table[arena.counts[CELLS] : arena.counts[CELLS] + cells] = 0.0
    arena.counts[CELLS] += cells
    arena.dropped[edge] = False
    arena.queued_edge[edge] = False
    link(arena, 2 * edge)
    link(arena, 2 * edge + 1)
    return edge


@compiled
def strides(arena, half):  # type: ignore[no-untyped-def]
    """Where the table of a half-edge starts, and the steps from strategy to strategy of its node and of the other."""
    edge = half >> 1
    columns = arena.size[arena.end[2 * edge + 1]]
    if half & 1:
        return arena.start[edge], 1, columns
    return arena.start[edge], columns, 1
