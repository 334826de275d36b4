"""Strategies, and pairs of them, that another choice beats whatever the neighbours choose, in cost and in memory."""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.arena import FAILED, FULL, WORK, pop_edge, pop_node, push_edge, push_node, strides
from autoshard.solver.flat.jit import compiled
from autoshard.solver.flat.rules import strategies_lost, tidy_edge, tidy_node

_DEAREST = 30_000_000
"""Table entries that the search of one node for dominated strategies may look at."""

_PAIRED = 4
"""Neighbours up to which a node is searched for dominated pairs."""

_WIDEST = 160
"""Strategies up to which memory is compared: the work is quadratic."""


@compiled
def settle(arena, upper):  # type: ignore[no-untyped-def]
    """Looks at queued edges and nodes until none is left, one has no strategy left, or room runs out."""
    while arena.counts[FAILED] == 0 and arena.counts[FULL] == 0:
        edge = pop_edge(arena)
        if edge >= 0:
            if not arena.dropped[edge]:
                tidy_edge(arena, edge, upper)
                if arena.counts[FULL]:
                    push_edge(arena, edge)
            continue
        node = pop_node(arena)
        if node < 0:
            return
        if not arena.gone[node]:
            tidy_node(arena, node, upper)


@compiled
def uses_no_more(arena, node, alive):  # type: ignore[no-untyped-def]
    """[s, t]: whether strategy alive[t] of a node uses no more memory than alive[s] at any moment."""
    count = len(alive)
    less = np.ones((count, count), dtype=np.bool_)
    items = 0
    item = arena.first_item[node]
    while item >= 0:
        items += 1
        item = arena.next_item[item]
    if items == 0:
        return less
    moments = np.empty(2 * items, dtype=np.int64)
    which = np.empty(2 * items, dtype=np.int64)
    place = 0
    item = arena.first_item[node]
    while item >= 0:
        moments[place], which[place] = arena.low[item], item
        moments[place + 1], which[place + 1] = arena.high[item], -item - 1
        place += 2
        item = arena.next_item[item]
    held = np.zeros(count)
    order = np.argsort(moments)
    for position in range(2 * items):
        event = which[order[position]]
        sign = 1.0 if event >= 0 else -1.0
        begin = arena.usage_start[event if event >= 0 else -event - 1]
        for s in range(count):
            held[s] += sign * arena.usage[begin + alive[s]]
        if position + 1 < 2 * items and moments[order[position + 1]] > moments[order[position]]:
            for s in range(count):
                for t in range(count):
                    if held[t] > held[s] + 1e-9 * abs(held[s]):
                        less[s, t] = False
    arena.numbers[WORK] += 2 * items * count * count
    return less


@compiled
def alive_strategies(arena, node):  # type: ignore[no-untyped-def]
    """The strategies that a node still has, ascending."""
    own = arena.offset[node]
    return np.flatnonzero(arena.cost[own : own + arena.size[node]] < np.inf)


@compiled
def loses(arena, half, s, t, most):  # type: ignore[no-untyped-def]
    """The most that choosing t instead of s adds on an edge, over the choices of the other end; stops above `most`."""
    other = arena.end[half ^ 1]
    begin, row, column = strides(arena, half)
    far = arena.offset[other]
    worst = -np.inf
    for j in range(arena.size[other]):
        if arena.cost[far + j] < np.inf:
            before = arena.table[begin + s * row + j * column]
            if before < np.inf:
                worst = max(worst, arena.table[begin + t * row + j * column] - before)
                if worst > most:
                    break
    return worst


@compiled
def drop_dominated(arena, node):  # type: ignore[no-untyped-def]
    """Drops strategies that another one beats (Goldstein's criterion, memory included). Returns how many."""
    alive = alive_strategies(arena, node)
    count = len(alive)
    if count < 2 or count > _WIDEST:
        return 0
    around = 0
    half = arena.head[node]
    while half >= 0:
        around += arena.size[arena.end[half ^ 1]]
        half = arena.after[half]
    if around * count * count > 8 * _DEAREST:
        return 0
    less = uses_no_more(arena, node, alive)
    own = arena.offset[node]
    lost = 0
    for place in range(count - 1, -1, -1):
        s = alive[place]
        for rival in range(count):
            t = alive[rival]
            if rival == place or not less[place, rival] or arena.cost[own + t] == np.inf:
                continue
            # On a normalised edge another strategy never gains: the sum only grows.
            total = arena.cost[own + t] - arena.cost[own + s]
            half = arena.head[node]
            while half >= 0 and total <= 0.0:
                arena.numbers[WORK] += arena.size[arena.end[half ^ 1]]
                total += max(loses(arena, half, s, t, -total), 0.0)
                half = arena.after[half]
            if total <= 0.0:
                arena.cost[own + s] = np.inf
                lost += 1
                break
    if lost:
        strategies_lost(arena, node)
    return lost


@compiled
def drop_dominated_pairs(arena, node):  # type: ignore[no-untyped-def]
    """Forbids pairs of a node's strategy with a neighbour's where, given the neighbour's, another strategy of the
    node is better: where one is best for each strategy of the neighbour, the node can be merged into it."""
    if arena.degree[node] == 0 or arena.degree[node] > _PAIRED:
        return 0
    alive = alive_strategies(arena, node)
    count = len(alive)
    if count < 2 or count > _WIDEST:
        return 0
    less = uses_no_more(arena, node, alive)
    edges = arena.degree[node]
    halves = np.empty(edges, dtype=np.int64)
    half = arena.head[node]
    for place in range(edges):
        halves[place] = half
        half = arena.after[half]
    added = np.zeros((edges, count, count))
    for place in range(edges):
        for s in range(count):
            for t in range(count):
                if less[s, t] and s != t:
                    added[place, s, t] = loses(arena, halves[place], alive[s], alive[t], np.inf)
        arena.numbers[WORK] += count * count * arena.size[arena.end[halves[place] ^ 1]]
    own = arena.offset[node]
    forbidden = 0
    for place in range(edges):
        other = arena.end[halves[place] ^ 1]
        begin, row, column = strides(arena, halves[place])
        before = forbidden
        for j in range(arena.size[other]):
            if arena.cost[arena.offset[other] + j] == np.inf:
                continue
            for s in range(count - 1, -1, -1):
                mine = arena.table[begin + alive[s] * row + j * column]
                if mine == np.inf:
                    continue
                for t in range(count):
                    if s == t or not less[s, t]:
                        continue
                    rival = arena.table[begin + alive[t] * row + j * column]
                    total = arena.cost[own + alive[t]] + rival - arena.cost[own + alive[s]] - mine
                    for third in range(edges):
                        if third != place:
                            total += added[third, s, t]
                    if total <= 0.0:
                        arena.table[begin + alive[s] * row + j * column] = np.inf
                        forbidden += 1
                        break
        if forbidden > before:
            # What other edges of this node lose by a change may be different now.
            push_edge(arena, halves[place] >> 1)
            return forbidden
    return forbidden


@compiled
def dominate(arena, upper, pairs, work):  # type: ignore[no-untyped-def]
    """One pass over all nodes, each settled before the next; returns what was dropped. Ends after so much work."""
    dropped = 0
    for node in range(len(arena.size)):
        if arena.gone[node]:
            continue
        if arena.numbers[WORK] > work:
            return dropped
        dropped += drop_dominated(arena, node)
        if pairs:
            dropped += drop_dominated_pairs(arena, node)
        push_node(arena, node)
        settle(arena, upper)
        if arena.counts[FAILED] or arena.counts[FULL]:
            return dropped
    return dropped
