"""What exact presolve does to one edge or one node; every step keeps at least one optimum."""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.arena import (
    CELLS,
    EDGES,
    FAILED,
    FULL,
    ITEMS,
    MAPPED,
    OFFSET,
    REMOVED,
    USED,
    WORK,
    drop_edge,
    find_edge,
    link,
    new_edge,
    push_edge,
    push_node,
    strides,
)
from autoshard.solver.flat.jit import compiled

_NEGLIGIBLE = 1e-14
"""What rounding leaves of a zero, relative to what was subtracted."""

_GROWTH = 20_000
"""Table entries that merging a node may add."""


@compiled
def strategies_lost(arena, node):  # type: ignore[no-untyped-def]
    """Everything that may follow from a node's having fewer strategies is to be looked at."""
    half = arena.head[node]
    while half >= 0:
        push_edge(arena, half >> 1)
        half = arena.after[half]
    arena.stale[node] = True
    push_node(arena, node)


@compiled
def tidy_side(arena, half):  # type: ignore[no-untyped-def]
    """Moves row minima (rows: the strategies of the half-edge's node) into the node; unsupported strategies go."""
    node, other = arena.end[half], arena.end[half ^ 1]
    begin, row, column = strides(arena, half)
    own, far = arena.offset[node], arena.offset[other]
    lost, moved = False, False
    for s in range(arena.size[node]):
        if arena.cost[own + s] == np.inf:
            continue
        least = np.inf
        place = begin + s * row
        for t in range(arena.size[other]):
            if arena.cost[far + t] < np.inf:
                least = min(least, arena.table[place + t * column])
        if least == np.inf:
            arena.cost[own + s] = np.inf
            lost = True
        elif least != 0.0:
            moved = True
            arena.cost[own + s] += least
            scale = abs(least) * _NEGLIGIBLE
            for t in range(arena.size[other]):
                value = arena.table[place + t * column] - least
                arena.table[place + t * column] = 0.0 if abs(value) <= scale else value
    arena.numbers[WORK] += arena.size[node] * arena.size[other]
    if lost:
        strategies_lost(arena, node)
    elif moved:
        push_node(arena, node)


@compiled
def forbid_dear(arena, edge, upper):  # type: ignore[no-untyped-def]
    """Forbids pairs that alone bring the cost to `upper`: nodes and tables are otherwise at least zero."""
    one, other = arena.end[2 * edge], arena.end[2 * edge + 1]
    begin, row, column = strides(arena, 2 * edge)
    slack = upper - arena.numbers[OFFSET]
    for s in range(arena.size[one]):
        first = arena.cost[arena.offset[one] + s]
        for t in range(arena.size[other]):
            if first + arena.cost[arena.offset[other] + t] + arena.table[begin + s * row + t * column] >= slack:
                arena.table[begin + s * row + t * column] = np.inf


@compiled
def tidy_edge(arena, edge, upper):  # type: ignore[no-untyped-def]
    """Normalises an edge; drops it if nothing is left; merges an end that the other end determines."""
    if upper < np.inf:
        forbid_dear(arena, edge, upper)
    tidy_side(arena, 2 * edge)
    tidy_side(arena, 2 * edge + 1)
    one, other = arena.end[2 * edge], arena.end[2 * edge + 1]
    begin, row, column = strides(arena, 2 * edge)
    largest = 0.0
    by_row, by_column = True, True
    for s in range(arena.size[one]):
        if arena.cost[arena.offset[one] + s] == np.inf:
            continue
        allowed = 0
        for t in range(arena.size[other]):
            if arena.cost[arena.offset[other] + t] < np.inf:
                value = arena.table[begin + s * row + t * column]
                largest = max(largest, value)
                allowed += value < np.inf
        by_row &= allowed == 1
    for t in range(arena.size[other]):
        if arena.cost[arena.offset[other] + t] == np.inf:
            continue
        allowed = 0
        for s in range(arena.size[one]):
            if arena.cost[arena.offset[one] + s] < np.inf:
                allowed += arena.table[begin + s * row + t * column] < np.inf
        by_column &= allowed == 1
    if largest == 0.0:
        drop_edge(arena, edge)
        push_node(arena, one)
        push_node(arena, other)
        return
    # Where each determines the other, the one with fewer edges goes.
    if by_row and by_column and arena.degree[one] < arena.degree[other]:
        by_row = False
    if not (by_row and merge(arena, 2 * edge)) and by_column:
        merge(arena, 2 * edge + 1)


@compiled
def merge(arena, half):  # type: ignore[no-untyped-def]
    """Merges the far node of a half-edge into the near one, which determines it. False if that costs too much."""
    keep, leave = arena.end[half], arena.end[half ^ 1]
    wide, narrow = arena.size[keep], arena.size[leave]
    growth, cells = 0, 0
    other = arena.head[leave]
    while other >= 0:
        if other != half ^ 1:
            third = arena.end[other ^ 1]
            growth += (wide - narrow) * arena.size[third]
            cells += wide * arena.size[third]
        other = arena.after[other]
    if growth > _GROWTH:
        return False
    items = 0
    item = arena.first_item[leave]
    while item >= 0:
        items += 1
        item = arena.next_item[item]
    if not has_room(arena, arena.degree[leave], cells, items, items * wide, wide):
        return False
    chosen = remember(arena, leave, keep, -1, wide)
    begin, row, column = strides(arena, half)
    own, far = arena.offset[keep], arena.offset[leave]
    for s in range(wide):
        if arena.cost[own + s] == np.inf:
            continue
        for t in range(narrow):
            value = arena.table[begin + s * row + t * column]
            if value < np.inf and arena.cost[far + t] < np.inf:
                arena.choice[chosen + s] = t
                arena.cost[own + s] += value + arena.cost[far + t]
    drop_edge(arena, half >> 1)
    while arena.head[leave] >= 0:
        move_edge(arena, arena.head[leave], keep, chosen)
    move_items(arena, leave, keep, chosen)
    arena.gone[leave] = True
    push_node(arena, keep)
    return True


@compiled
def move_edge(arena, half, keep, chosen):  # type: ignore[no-untyped-def]
    """An edge of a merged node becomes, or is added to, one of the node that determines it."""
    third = arena.end[half ^ 1]
    begin, row, column = strides(arena, half)
    drop_edge(arena, half >> 1)
    into = find_edge(arena, keep, third)
    if into < 0:
        into = 2 * new_edge(arena, keep, third)
    to, to_row, to_column = strides(arena, into)
    for s in range(arena.size[keep]):
        if arena.cost[arena.offset[keep] + s] < np.inf:
            source = begin + arena.choice[chosen + s] * row
            for t in range(arena.size[third]):
                arena.table[to + s * to_row + t * to_column] += arena.table[source + t * column]
    arena.numbers[WORK] += arena.size[keep] * arena.size[third]
    push_edge(arena, into >> 1)


@compiled
def move_items(arena, leave, keep, chosen):  # type: ignore[no-untyped-def]
    """What a merged node uses, as a function of the strategy of the node that determines it."""
    item = arena.first_item[leave]
    arena.first_item[leave] = -1
    while item >= 0:
        following = arena.next_item[item]
        source, target = arena.usage_start[item], arena.counts[USED]
        arena.counts[USED] += arena.size[keep]
        for s in range(arena.size[keep]):
            arena.usage[target + s] = arena.usage[source + arena.choice[chosen + s]]
        arena.usage_start[item] = target
        arena.next_item[item] = arena.first_item[keep]
        arena.first_item[keep] = item
        item = following
    arena.stale[keep] = True


@compiled
def has_room(arena, edges, cells, items, used, mapped):  # type: ignore[no-untyped-def]
    """Whether the arrays have room for so much more; if not, that is noted, and the step is to be tried again."""
    counts = arena.counts
    enough = (
        counts[EDGES] + edges <= len(arena.start)
        and counts[CELLS] + cells <= len(arena.table)
        and counts[ITEMS] + items <= len(arena.low)
        and counts[USED] + used <= len(arena.usage)
        and counts[MAPPED] + mapped <= len(arena.choice)
    )
    if not enough:
        counts[FULL] = 1
    return enough


@compiled
def remember(arena, node, first, second, entries):  # type: ignore[no-untyped-def]
    """Notes that a node is removed; returns where its choices are to be written."""
    row = arena.counts[REMOVED]
    arena.counts[REMOVED] += 1
    begin = arena.counts[MAPPED]
    arena.counts[MAPPED] += entries
    arena.removed[row, 0] = node
    arena.removed[row, 1] = first
    arena.removed[row, 2] = second
    arena.removed[row, 3] = begin
    arena.choice[begin : begin + entries] = 0
    return begin


@compiled
def settle_items(arena, node):  # type: ignore[no-untyped-def]
    """Usages count from their least; what does not depend on the choice is used whatever is chosen."""
    arena.stale[node] = False
    own, size = arena.offset[node], arena.size[node]
    item, previous = arena.first_item[node], -1
    while item >= 0:
        following = arena.next_item[item]
        least, most = np.inf, 0.0
        begin = arena.usage_start[item]
        for s in range(size):
            if arena.cost[own + s] < np.inf:
                least = min(least, arena.usage[begin + s])
                most = max(most, arena.usage[begin + s])
        if least != 0.0:
            arena.base[arena.low[item]] += least
            arena.base[arena.high[item]] -= least
            for s in range(size):
                arena.usage[begin + s] -= least
        if least == most:
            if previous >= 0:
                arena.next_item[previous] = following
            else:
                arena.first_item[node] = following
        else:
            previous = item
        item = following


@compiled
def tidy_node(arena, node, upper):  # type: ignore[no-untyped-def]
    """Moves the least cost into the offset; fixes, merges or eliminates a node where that is exact."""
    own, size = arena.offset[node], arena.size[node]
    least, allowed, last = np.inf, 0, 0
    for s in range(size):
        if arena.cost[own + s] < np.inf:
            least = min(least, arena.cost[own + s])
            allowed += 1
            last = s
    if allowed == 0:
        arena.counts[FAILED] = 1
        return
    arena.numbers[OFFSET] += least
    slack = upper - arena.numbers[OFFSET]
    lost = False
    for s in range(size):
        if arena.cost[own + s] < np.inf:
            arena.cost[own + s] -= least
            if arena.cost[own + s] >= slack:
                arena.cost[own + s] = np.inf
                lost = True
    if lost:
        strategies_lost(arena, node)
        return
    if arena.stale[node]:
        settle_items(arena, node)
    if allowed == 1:
        fix(arena, node, last)
    elif arena.first_item[node] < 0 and arena.degree[node] <= 2:
        eliminate(arena, node)


@compiled
def fix(arena, node, choice):  # type: ignore[no-untyped-def]
    """Takes out a node of one strategy: its row of each edge is a cost of the neighbour."""
    if not has_room(arena, 0, 0, 0, 0, 1):
        push_node(arena, node)
        return
    arena.choice[remember(arena, node, -1, -1, 1)] = choice
    while arena.head[node] >= 0:
        half = arena.head[node]
        other = arena.end[half ^ 1]
        begin, row, column = strides(arena, half)
        drop_edge(arena, half >> 1)
        lost = False
        for t in range(arena.size[other]):
            before = arena.cost[arena.offset[other] + t]
            arena.cost[arena.offset[other] + t] = before + arena.table[begin + choice * row + t * column]
            lost |= before < np.inf and arena.cost[arena.offset[other] + t] == np.inf
        push_node(arena, other)
        if lost:
            strategies_lost(arena, other)
    arena.gone[node] = True


@compiled
def eliminate(arena, node):  # type: ignore[no-untyped-def]
    """Takes out a node of degree two or less that uses no memory: its best strategy follows from its neighbours'."""
    own, size = arena.offset[node], arena.size[node]
    if arena.degree[node] == 0:
        if has_room(arena, 0, 0, 0, 0, 1):
            arena.choice[remember(arena, node, -1, -1, 1)] = np.argmin(arena.cost[own : own + size])
            arena.gone[node] = True
        else:
            push_node(arena, node)
        return
    first = arena.head[node]
    second = arena.after[first]
    left = arena.end[first ^ 1]
    right = arena.end[second ^ 1] if second >= 0 else -1
    width = arena.size[right] if second >= 0 else 1
    entries = arena.size[left] * width
    if not has_room(arena, 1, entries, 0, 0, entries):
        push_node(arena, node)
        return
    chosen = remember(arena, node, left, right, entries)
    begin, row, column = strides(arena, first)
    other_begin, other_row, other_column = strides(arena, second) if second >= 0 else (0, 0, 0)
    drop_edge(arena, first >> 1)
    into = -1
    if second >= 0:
        drop_edge(arena, second >> 1)
        into = find_edge(arena, left, right)
        if into < 0:
            into = 2 * new_edge(arena, left, right)
    arena.gone[node] = True
    arena.numbers[WORK] += entries * size
    to, to_row, to_column = strides(arena, into) if second >= 0 else (0, 0, 0)
    for a in range(arena.size[left]):
        for b in range(width):
            least, best = np.inf, 0
            for s in range(size):
                value = arena.cost[own + s] + arena.table[begin + s * row + a * column]
                if second >= 0:
                    value += arena.table[other_begin + s * other_row + b * other_column]
                if value < least:
                    least, best = value, s
            arena.choice[chosen + a * width + b] = best
            if second >= 0:
                arena.table[to + a * to_row + b * to_column] += least
            else:
                arena.cost[arena.offset[left] + a] += least
    if second >= 0:
        push_edge(arena, into >> 1)
        push_node(arena, right)
    else:
        strategies_lost(arena, left)
    push_node(arena, left)


@compiled
def begin(arena, item_nodes):  # type: ignore[no-untyped-def]
    """Links the edges and items of a fresh arena, parallel edges added up, and queues everything."""
    for edge in range(arena.counts[EDGES]):
        one, other = arena.end[2 * edge], arena.end[2 * edge + 1]
        into = find_edge(arena, one, other)
        if into < 0:
            link(arena, 2 * edge)
            link(arena, 2 * edge + 1)
            push_edge(arena, edge)
            continue
        arena.dropped[edge] = True
        source, row, column = strides(arena, 2 * edge)
        to, to_row, to_column = strides(arena, into)
        for s in range(arena.size[one]):
            for t in range(arena.size[other]):
                arena.table[to + s * to_row + t * to_column] += arena.table[source + s * row + t * column]
    for item in range(len(item_nodes)):
        node = item_nodes[item]
        arena.next_item[item] = arena.first_item[node]
        arena.first_item[node] = item
    for node in range(len(arena.size)):
        push_node(arena, node)
