"""Removal of strategies and pairs that another choice dominates in cost and memory for all choices of the neighbours.

The loops change the arrays of `arena.py` in place.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.arena import (
    FAILED,
    FULL,
    WORK,
    edge_of,
    other_end,
    pop_edge,
    pop_node,
    push_edge,
    push_node,
    strides,
)
from autoshard.solver.flat.rules import queue_after_loss, tidy_edge, tidy_node
from autoshard.solver.jit import jit, jit_inner

_MAX_WORK = 30_000_000
"""Table entries that the search of one node for dominated strategies may read."""

_PAIR_DEGREE = 4
"""Most neighbours of a node that is searched for dominated pairs."""

_WIDEST = 160
"""Most strategies of a node whose memory is compared, since the work is quadratic."""


@jit_inner
def uses_no_more(arena, node, alive):  # type: ignore[no-untyped-def]
    """Return [s, t]: True if strategy alive[t] of a node uses no more memory than alive[s] at every moment."""
    count = len(alive)
    less = np.ones((count, count), dtype=np.bool_)
    items = 0
    item = arena.nodes[node].first_item
    while item >= 0:
        items += 1
        item = arena.items[item].following
    if items == 0:
        return less
    moments = np.empty(2 * items, dtype=np.int64)
    which = np.empty(2 * items, dtype=np.int64)
    place = 0
    item = arena.nodes[node].first_item
    while item >= 0:
        moments[place], which[place] = arena.items[item].low, item
        moments[place + 1], which[place + 1] = arena.items[item].high, -item - 1
        place += 2
        item = arena.items[item].following
    # Insertion sort: a node has few items.
    for position in range(1, 2 * items):
        moment, event, place = moments[position], which[position], position
        while place > 0 and moments[place - 1] > moment:
            moments[place], which[place] = moments[place - 1], which[place - 1]
            place -= 1
        moments[place], which[place] = moment, event
    usages = np.zeros(count)
    for position in range(2 * items):
        event = which[position]
        sign = 1.0 if event >= 0 else -1.0
        begin = arena.items[event if event >= 0 else -event - 1].start
        for s in range(count):
            usages[s] += sign * arena.usage[begin + alive[s]]
        # Between two consecutive ends nothing changes: one comparison holds for all moments in between.
        if position + 1 < 2 * items and moments[position + 1] > moments[position]:
            for s in range(count):
                for t in range(count):
                    if usages[t] > usages[s] + 1e-9 * abs(usages[s]):
                        less[s, t] = False
    arena.numbers[WORK] += 2 * items * count * count
    return less


@jit_inner
def alive_strategies(arena, node):  # type: ignore[no-untyped-def]
    """Return the remaining strategies of a node, ascending."""
    offset, size = arena.nodes[node].offset, arena.nodes[node].size
    alive = np.empty(size, dtype=np.int64)
    count = 0
    for s in range(size):
        if arena.cost[offset + s] < np.inf:
            alive[count] = s
            count += 1
    return alive[:count]


@jit_inner
def largest_increase(arena, half, s, t, most):  # type: ignore[no-untyped-def]
    """Return the most that t instead of s adds on an edge, over all choices of the other end; stop above `most`."""
    neighbour = other_end(arena, half)
    begin, row, column = strides(arena, half)
    far_offset = arena.nodes[neighbour].offset
    worst = -np.inf
    for j in range(arena.nodes[neighbour].size):
        if arena.cost[far_offset + j] < np.inf:
            before = arena.table[begin + s * row + j * column]
            # Where s is forbidden, t is no worse whatever it costs.
            if before < np.inf:
                worst = max(worst, arena.table[begin + t * row + j * column] - before)
                if worst > most:
                    break
    return worst


@jit_inner
def drop_dominated(arena, node):  # type: ignore[no-untyped-def]
    """Drop dominated strategies (Goldstein's criterion, including memory); return their number."""
    alive = alive_strategies(arena, node)
    count = len(alive)
    if count < 2 or count > _WIDEST:
        return 0
    around = 0
    half = arena.nodes[node].head
    while half >= 0:
        around += arena.nodes[other_end(arena, half)].size
        half = arena.halves[half].after
    if around * count * count > 8 * _MAX_WORK:
        return 0
    less = uses_no_more(arena, node, alive)
    offset = arena.nodes[node].offset
    lost = 0
    # From last to first, and only against remaining strategies, so that the first of equal ones stays.
    for place in range(count - 1, -1, -1):
        s = alive[place]
        for rival in range(count):
            t = alive[rival]
            if rival == place or not less[place, rival] or arena.cost[offset + t] == np.inf:
                continue
            # On normalised edges, increases are never negative, so the sum only grows.
            total = arena.cost[offset + t] - arena.cost[offset + s]
            half = arena.nodes[node].head
            while half >= 0 and total <= 0.0:
                arena.numbers[WORK] += arena.nodes[other_end(arena, half)].size
                total += max(largest_increase(arena, half, s, t, -total), 0.0)
                half = arena.halves[half].after
            if total <= 0.0:
                arena.cost[offset + s] = np.inf
                lost += 1
                break
    if lost:
        queue_after_loss(arena, node)
    return lost


@jit_inner
def drop_dominated_pairs(arena, node):  # type: ignore[no-untyped-def]
    """Forbid pairs of strategies of a node and a neighbour if, given the neighbour's, another strategy of the node is
    better; return their number.

    If one strategy is left for each strategy of the neighbour, the node can be merged into the neighbour.
    """
    if arena.nodes[node].degree == 0 or arena.nodes[node].degree > _PAIR_DEGREE:
        return 0
    alive = alive_strategies(arena, node)
    count = len(alive)
    if count < 2 or count > _WIDEST:
        return 0
    less = uses_no_more(arena, node, alive)
    edges = arena.nodes[node].degree
    halves = np.empty(edges, dtype=np.int64)
    half = arena.nodes[node].head
    for place in range(edges):
        halves[place] = half
        half = arena.halves[half].after
    # The worst case of every edge once: for each pair below, those of the other edges are summed.
    added = np.zeros((edges, count, count))
    for place in range(edges):
        for s in range(count):
            for t in range(count):
                if less[s, t] and s != t:
                    added[place, s, t] = largest_increase(arena, halves[place], alive[s], alive[t], np.inf)
        arena.numbers[WORK] += count * count * arena.nodes[other_end(arena, halves[place])].size
    offset = arena.nodes[node].offset
    forbidden = 0
    for place in range(edges):
        neighbour = other_end(arena, halves[place])
        begin, row, column = strides(arena, halves[place])
        before = forbidden
        for j in range(arena.nodes[neighbour].size):
            if arena.cost[arena.nodes[neighbour].offset + j] == np.inf:
                continue
            for s in range(count - 1, -1, -1):
                pair_cost = arena.table[begin + alive[s] * row + j * column]
                if pair_cost == np.inf:
                    continue
                for t in range(count):
                    if s == t or not less[s, t]:
                        continue
                    rival = arena.table[begin + alive[t] * row + j * column]
                    total = arena.cost[offset + alive[t]] + rival - arena.cost[offset + alive[s]] - pair_cost
                    for other_place in range(edges):
                        if other_place != place:
                            total += added[other_place, s, t]
                    if total <= 0.0:
                        arena.table[begin + alive[s] * row + j * column] = np.inf
                        forbidden += 1
                        break
        if forbidden > before:
            # The worst cases of the node's other edges may have changed.
            push_edge(arena, edge_of(halves[place]))
            return forbidden
    return forbidden


@jit
def process_queues(arena, upper, nodes, pairs, work):  # type: ignore[no-untyped-def]
    """Process queued edges and nodes until none is left, a node has no strategy left, or an array is full.

    Whenever nothing is queued, the next of the first `nodes` nodes is searched for dominated strategies, and with
    `pairs` for dominated pairs, until `work` table entries have been read.

    Returns:
        The number of dropped strategies and pairs.
    """
    dropped, node = 0, 0
    while arena.counts[FAILED] == 0 and arena.counts[FULL] == 0:
        edge = pop_edge(arena)
        if edge >= 0:
            if not arena.edges[edge].dropped:
                tidy_edge(arena, edge, upper)
                if arena.counts[FULL]:
                    push_edge(arena, edge)
            continue
        queued = pop_node(arena)
        if queued >= 0:
            if not arena.nodes[queued].gone:
                tidy_node(arena, queued, upper)
            continue
        # Cheap rules first: dominance runs only when nothing is queued, and its consequences before the next node.
        while node < nodes and arena.nodes[node].gone:
            node += 1
        if node >= nodes or arena.numbers[WORK] > work:
            break
        dropped += drop_dominated(arena, node)
        if pairs:
            dropped += drop_dominated_pairs(arena, node)
        push_node(arena, node)
        node += 1
    return dropped
