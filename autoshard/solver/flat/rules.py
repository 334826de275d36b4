"""The steps of exact presolve on an edge or a node; every step keeps at least one optimum."""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.arena import (
    CELLS,
    EDGES,
    FAILED,
    FULL,
    MAPPED,
    OFFSET,
    REMOVED,
    USED,
    WORK,
    drop_edge,
    edge_of,
    find_edge,
    link,
    new_edge,
    other_end,
    push_edge,
    push_node,
    strides,
)
from autoshard.solver.jit import jit, jit_inner

_NEGLIGIBLE = 1e-14
"""Difference, relative to the subtracted value, below which it counts as zero."""

_GROWTH = 20_000
"""Most table entries that merging a node may add."""

# Values of one type: numba compiles a loop again for every literal argument.
_NONE, _ZERO, _ONE = np.int64(-1), np.int64(0), np.int64(1)


@jit_inner
def queue_after_loss(arena, node):  # type: ignore[no-untyped-def]
    """Queue the edges and the node itself after it lost strategies."""
    half = arena.nodes[node].head
    while half >= 0:
        push_edge(arena, edge_of(half))
        half = arena.halves[half].after
    arena.nodes[node].stale = True
    push_node(arena, node)


@jit_inner
def tidy_side(arena, half):  # type: ignore[no-untyped-def]
    """Move row minima (rows: the strategies of the half-edge's node) into the node; forbid unsupported strategies."""
    node, neighbour = arena.halves[half].end, other_end(arena, half)
    begin, row, column = strides(arena, half)
    offset, far_offset = arena.nodes[node].offset, arena.nodes[neighbour].offset
    lost, moved = False, False
    for s in range(arena.nodes[node].size):
        if arena.cost[offset + s] == np.inf:
            continue
        least = np.inf
        place = begin + s * row
        for t in range(arena.nodes[neighbour].size):
            if arena.cost[far_offset + t] < np.inf:
                least = min(least, arena.table[place + t * column])
        # No remaining strategy of the neighbour supports this one.
        if least == np.inf:
            arena.cost[offset + s] = np.inf
            lost = True
        elif least != 0.0:
            moved = True
            arena.cost[offset + s] += least
            scale = abs(least) * _NEGLIGIBLE
            for t in range(arena.nodes[neighbour].size):
                value = arena.table[place + t * column] - least
                arena.table[place + t * column] = 0.0 if abs(value) <= scale else value
    arena.numbers[WORK] += arena.nodes[node].size * arena.nodes[neighbour].size
    if lost:
        queue_after_loss(arena, node)
    elif moved:
        push_node(arena, node)


@jit_inner
def forbid_expensive(arena, edge, upper):  # type: ignore[no-untyped-def]
    """Forbid pairs whose own cost reaches `upper`."""
    source, target = arena.halves[2 * edge].end, arena.halves[2 * edge + 1].end
    begin, row, column = strides(arena, 2 * edge)
    slack = upper - arena.numbers[OFFSET]
    for s in range(arena.nodes[source].size):
        first = arena.cost[arena.nodes[source].offset + s]
        for t in range(arena.nodes[target].size):
            if first + arena.cost[arena.nodes[target].offset + t] + arena.table[begin + s * row + t * column] >= slack:
                arena.table[begin + s * row + t * column] = np.inf


@jit_inner
def tidy_edge(arena, edge, upper):  # type: ignore[no-untyped-def]
    """Normalise an edge; drop it if it is zero; merge an end that the other end determines."""
    if upper < np.inf:
        forbid_expensive(arena, edge, upper)
    tidy_side(arena, 2 * edge)
    tidy_side(arena, 2 * edge + 1)
    source, target = arena.halves[2 * edge].end, arena.halves[2 * edge + 1].end
    begin, row, column = strides(arena, 2 * edge)
    largest = 0.0
    # True while every strategy of one end allows exactly one of the other, which it then determines.
    by_row, by_column = True, True
    for s in range(arena.nodes[source].size):
        if arena.cost[arena.nodes[source].offset + s] == np.inf:
            continue
        allowed = 0
        for t in range(arena.nodes[target].size):
            if arena.cost[arena.nodes[target].offset + t] < np.inf:
                value = arena.table[begin + s * row + t * column]
                largest = max(largest, value)
                allowed += value < np.inf
        by_row &= allowed == 1
    for t in range(arena.nodes[target].size):
        if arena.cost[arena.nodes[target].offset + t] == np.inf:
            continue
        allowed = 0
        for s in range(arena.nodes[source].size):
            if arena.cost[arena.nodes[source].offset + s] < np.inf:
                allowed += arena.table[begin + s * row + t * column] < np.inf
        by_column &= allowed == 1
    if largest == 0.0:
        drop_edge(arena, edge)
        push_node(arena, source)
        push_node(arena, target)
        return
    # If each determines the other, merge the one with fewer edges.
    if by_row and by_column and arena.nodes[source].degree < arena.nodes[target].degree:
        by_row = False
    if not (by_row and merge_nodes(arena, 2 * edge)) and by_column:
        merge_nodes(arena, 2 * edge + 1)


@jit_inner
def merge_nodes(arena, half):  # type: ignore[no-untyped-def]
    """Merge the far node of a half-edge into the near one, which determines it; return False if that costs too much."""
    keep, leave = arena.halves[half].end, other_end(arena, half)
    wide, narrow = arena.nodes[keep].size, arena.nodes[leave].size
    growth, cells = 0, 0
    branch = arena.nodes[leave].head
    while branch >= 0:
        if branch != half ^ 1:
            neighbour = other_end(arena, branch)
            growth += (wide - narrow) * arena.nodes[neighbour].size
            cells += wide * arena.nodes[neighbour].size
        branch = arena.halves[branch].after
    # The merged node's edges get a row per strategy of the node that stays, which may grow the core.
    if growth > _GROWTH:
        return False
    items = 0
    item = arena.nodes[leave].first_item
    while item >= 0:
        items += 1
        item = arena.items[item].following
    if not has_room(arena, arena.nodes[leave].degree, cells, items * wide, wide):
        return False
    chosen = record_removal(arena, leave, keep, _NONE, wide)
    begin, row, column = strides(arena, half)
    offset, far_offset = arena.nodes[keep].offset, arena.nodes[leave].offset
    for s in range(wide):
        if arena.cost[offset + s] == np.inf:
            continue
        for t in range(narrow):
            value = arena.table[begin + s * row + t * column]
            if value < np.inf and arena.cost[far_offset + t] < np.inf:
                arena.choice[chosen + s] = t
                arena.cost[offset + s] += value + arena.cost[far_offset + t]
    drop_edge(arena, edge_of(half))
    while arena.nodes[leave].head >= 0:
        move_edge(arena, arena.nodes[leave].head, keep, chosen)
    move_items(arena, leave, keep, chosen)
    arena.nodes[leave].gone = True
    push_node(arena, keep)
    return True


@jit_inner
def move_edge(arena, half, keep, chosen):  # type: ignore[no-untyped-def]
    """Move an edge of a merged node to the node that determines it, or add it to that node's edge."""
    neighbour = other_end(arena, half)
    begin, row, column = strides(arena, half)
    drop_edge(arena, edge_of(half))
    into = find_edge(arena, keep, neighbour)
    if into < 0:
        into = 2 * new_edge(arena, keep, neighbour)
    to, to_row, to_column = strides(arena, into)
    for s in range(arena.nodes[keep].size):
        if arena.cost[arena.nodes[keep].offset + s] < np.inf:
            source = begin + arena.choice[chosen + s] * row
            for t in range(arena.nodes[neighbour].size):
                arena.table[to + s * to_row + t * to_column] += arena.table[source + t * column]
    arena.numbers[WORK] += arena.nodes[keep].size * arena.nodes[neighbour].size
    push_edge(arena, edge_of(into))


@jit_inner
def move_items(arena, leave, keep, chosen):  # type: ignore[no-untyped-def]
    """Move the memory items of a merged node to the node that determines it, by that node's strategies."""
    item = arena.nodes[leave].first_item
    arena.nodes[leave].first_item = -1
    while item >= 0:
        following = arena.items[item].following
        source, target = arena.items[item].start, arena.counts[USED]
        arena.counts[USED] += arena.nodes[keep].size
        for s in range(arena.nodes[keep].size):
            arena.usage[target + s] = arena.usage[source + arena.choice[chosen + s]]
        arena.items[item].start = target
        arena.items[item].following = arena.nodes[keep].first_item
        arena.nodes[keep].first_item = item
        item = following
    arena.nodes[keep].stale = True


@jit_inner
def has_room(arena, edges, cells, used, mapped):  # type: ignore[no-untyped-def]
    """Return True if the arrays have room for that many more entries; otherwise set `FULL`, and the step is retried."""
    counts = arena.counts
    # One bit per array: compiled loops can't grow arrays. The caller does, and reruns the step, which has not changed
    # anything yet.
    counts[FULL] |= (
        (counts[EDGES] + edges > len(arena.edges))
        + 2 * (counts[CELLS] + cells > len(arena.table))
        + 4 * (counts[USED] + used > len(arena.usage))
        + 8 * (counts[MAPPED] + mapped > len(arena.choice))
    )
    return counts[FULL] == 0


@jit_inner
def record_removal(arena, node, first, second, entries):  # type: ignore[no-untyped-def]
    """Record the removal of a node; return the start of its choices in `choice`."""
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


@jit_inner
def fold_constant_items(arena, node):  # type: ignore[no-untyped-def]
    """Move the least usage of every item into the base, and drop items that do not depend on the choice."""
    arena.nodes[node].stale = False
    offset, size = arena.nodes[node].offset, arena.nodes[node].size
    item, previous = arena.nodes[node].first_item, -1
    while item >= 0:
        following = arena.items[item].following
        least, most = np.inf, 0.0
        begin = arena.items[item].start
        for s in range(size):
            if arena.cost[offset + s] < np.inf:
                least = min(least, arena.usage[begin + s])
                most = max(most, arena.usage[begin + s])
        if least != 0.0:
            arena.base[arena.items[item].low] += least
            arena.base[arena.items[item].high] -= least
            for s in range(size):
                arena.usage[begin + s] -= least
        if least == most:
            if previous >= 0:
                arena.items[previous].following = following
            else:
                arena.nodes[node].first_item = following
        else:
            previous = item
        item = following


@jit_inner
def tidy_node(arena, node, upper):  # type: ignore[no-untyped-def]
    """Move the least cost of a node into the offset; fix or eliminate the node where that is exact."""
    offset, size = arena.nodes[node].offset, arena.nodes[node].size
    least, allowed, last = np.inf, 0, 0
    for s in range(size):
        if arena.cost[offset + s] < np.inf:
            least = min(least, arena.cost[offset + s])
            allowed += 1
            last = s
    if allowed == 0:
        arena.counts[FAILED] = 1
        return
    arena.numbers[OFFSET] += least
    slack = upper - arena.numbers[OFFSET]
    lost = False
    for s in range(size):
        if arena.cost[offset + s] < np.inf:
            arena.cost[offset + s] -= least
            # This strategy's own cost reaches that of the known assignment.
            if arena.cost[offset + s] >= slack:
                arena.cost[offset + s] = np.inf
                lost = True
    if lost:
        queue_after_loss(arena, node)
        return
    if arena.nodes[node].stale:
        fold_constant_items(arena, node)
    if allowed == 1:
        fix_node(arena, node, _ZERO + last)
    # A node with items can't be eliminated: its best strategy depends on the limit, not only on its neighbours.
    elif arena.nodes[node].first_item < 0 and arena.nodes[node].degree <= 2:
        eliminate_node(arena, node)


@jit_inner
def fix_node(arena, node, choice):  # type: ignore[no-untyped-def]
    """Remove a node with one strategy: its row of each edge becomes a cost of the neighbour."""
    if not has_room(arena, _ZERO, _ZERO, _ZERO, _ONE):
        push_node(arena, node)
        return
    arena.choice[record_removal(arena, node, _NONE, _NONE, _ONE)] = choice
    while arena.nodes[node].head >= 0:
        half = arena.nodes[node].head
        neighbour = other_end(arena, half)
        begin, row, column = strides(arena, half)
        drop_edge(arena, edge_of(half))
        lost = False
        for t in range(arena.nodes[neighbour].size):
            before = arena.cost[arena.nodes[neighbour].offset + t]
            arena.cost[arena.nodes[neighbour].offset + t] = before + arena.table[begin + choice * row + t * column]
            lost |= before < np.inf and arena.cost[arena.nodes[neighbour].offset + t] == np.inf
        push_node(arena, neighbour)
        if lost:
            queue_after_loss(arena, neighbour)
    arena.nodes[node].gone = True


@jit_inner
def eliminate_node(arena, node):  # type: ignore[no-untyped-def]
    """Remove a node of degree two or less that uses no memory: its best strategy follows from its neighbours'."""
    offset, size = arena.nodes[node].offset, arena.nodes[node].size
    if arena.nodes[node].degree == 0:
        if has_room(arena, _ZERO, _ZERO, _ZERO, _ONE):
            arena.choice[record_removal(arena, node, _NONE, _NONE, _ONE)] = np.argmin(
                arena.cost[offset : offset + size]
            )
            arena.nodes[node].gone = True
        else:
            push_node(arena, node)
        return
    first = arena.nodes[node].head
    second = arena.halves[first].after
    left = other_end(arena, first)
    right = other_end(arena, second) if second >= 0 else -1
    width = arena.nodes[right].size if second >= 0 else 1
    entries = arena.nodes[left].size * width
    if not has_room(arena, _ONE, entries, _ZERO, entries):
        push_node(arena, node)
        return
    chosen = record_removal(arena, node, left, right, entries)
    begin, row, column = strides(arena, first)
    second_begin, second_row, second_column = strides(arena, second) if second >= 0 else (0, 0, 0)
    drop_edge(arena, edge_of(first))
    into = -1
    if second >= 0:
        drop_edge(arena, edge_of(second))
        # Add the new table to an existing edge of the two neighbours, as for parallel edges.
        into = find_edge(arena, left, right)
        if into < 0:
            into = 2 * new_edge(arena, left, right)
    arena.nodes[node].gone = True
    arena.numbers[WORK] += entries * size
    to, to_row, to_column = strides(arena, into) if second >= 0 else (0, 0, 0)
    # The costs with the second neighbour in contiguous rows, so that the compiler vectorises the inner loop.
    beside, least = np.zeros((size, width)), np.empty(width)
    if second >= 0:
        for s in range(size):
            for b in range(width):
                beside[s, b] = arena.table[second_begin + s * second_row + b * second_column]
    for a in range(arena.nodes[left].size):
        if arena.cost[arena.nodes[left].offset + a] == np.inf:
            continue
        best = arena.choice[chosen + a * width : chosen + (a + 1) * width]
        least[:] = np.inf
        for s in range(size):
            through = arena.cost[offset + s] + arena.table[begin + s * row + a * column]
            if through == np.inf:
                continue
            added = beside[s]
            for b in range(width):
                value = through + added[b]
                better = value < least[b]
                least[b] = value if better else least[b]
                best[b] = s if better else best[b]
        if second >= 0:
            for b in range(width):
                arena.table[to + a * to_row + b * to_column] += least[b]
        else:
            arena.cost[arena.nodes[left].offset + a] += least[0]
    if second >= 0:
        push_edge(arena, edge_of(into))
        push_node(arena, right)
    else:
        queue_after_loss(arena, left)
    push_node(arena, left)


@jit
def link_arena(arena, item_nodes):  # type: ignore[no-untyped-def]
    """Link the edges and items of a fresh arena, add up parallel edges, and queue everything."""
    for edge in range(arena.counts[EDGES]):
        first_node, second_node = arena.halves[2 * edge].end, arena.halves[2 * edge + 1].end
        into = find_edge(arena, first_node, second_node)
        if into < 0:
            link(arena, 2 * edge)
            link(arena, 2 * edge + 1)
            push_edge(arena, edge)
            continue
        # Its table has been added to the first parallel edge.
        arena.edges[edge].dropped = True
        source, row, column = strides(arena, 2 * edge)
        to, to_row, to_column = strides(arena, into)
        for s in range(arena.nodes[first_node].size):
            for t in range(arena.nodes[second_node].size):
                arena.table[to + s * to_row + t * to_column] += arena.table[source + s * row + t * column]
    for item in range(len(item_nodes)):
        node = item_nodes[item]
        arena.items[item].following = arena.nodes[node].first_item
        arena.nodes[node].first_item = item
    for node in range(len(arena.nodes)):
        push_node(arena, node)
