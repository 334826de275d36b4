"""Random sets of nodes whose edges among them form a forest, and the cheapest choices on one."""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.numba_jit import jit_inner
from autoshard.solver.flat.random_numbers import pick

MEMBER = np.dtype([(name, np.int64) for name in ("node", "link", "to_hub", "start", "picked", "trial")], align=True)
"""Of a member: its node, the half-edge at it that leads to its parent (-1: a root) and the one that leads to the hub
(-1: none), where its strategies start among the members', its choice in the best solution and in the one on trial."""

MARK = np.dtype([("position", np.int64), ("touched", np.int64), ("inside", np.bool_)], align=True)
"""Of a node: its place among the members, how many of its neighbours are members, and whether it is one."""


@jit_inner
def grow_forest(view, state, root, hub, target, members, marks, border):  # type: ignore[no-untyped-def]
    """A random forest, the parent of each member before it.

    Args:
        view: the core.
        state: of the random numbers.
        root: the node to start from, where there is no hub.
        hub: a node that the others may be linked to besides, -1 for none: trees start at its neighbours.
        target: nodes wanted.
        members: written: `node` and `link`.
        marks: `touched` 0 before and after; `inside` False before, and True for the members and the hub after.
        border: room for candidates: half-edges at them that lead to a member, or -1 - node for roots.

    Returns:
        The number of members.
    """
    size, waiting, capacity = 0, 0, len(border)
    if hub < 0:
        border[0] = -1 - root
        waiting = 1
    else:
        marks[hub].inside = True
        first = view.nodes[hub].around
        degree = view.nodes[hub + 1].around - first
        turn = pick(state, degree)
        for step in range(min(degree, capacity // 2)):
            border[waiting] = -1 - view.around[first + (turn + step) % degree].other
            waiting += 1
    while size < target and waiting:
        chosen = pick(state, waiting)
        towards = border[chosen]
        waiting -= 1
        border[chosen] = border[waiting]
        candidate = -1 - towards
        if towards >= 0:
            candidate = view.around[view.around[towards].back].other
        if marks[candidate].inside or marks[candidate].touched != (0 if towards < 0 else 1):
            continue
        members[size].node = candidate
        members[size].link = -1 if towards < 0 else towards
        marks[candidate].inside = True
        marks[candidate].position = size
        size += 1
        for place in range(view.nodes[candidate].around, view.nodes[candidate + 1].around):
            other = view.around[place].other
            marks[other].touched += 1
            if not marks[other].inside and marks[other].touched == 1 and waiting < capacity:
                border[waiting] = view.around[place].back
                waiting += 1
    for member in range(size):
        node = members[member].node
        for place in range(view.nodes[node].around, view.nodes[node + 1].around):
            marks[view.around[place].other].touched = 0
    return size


@jit_inner
def solve_forest(view, members, size, marks, sums, best, least):  # type: ignore[no-untyped-def]
    """The cheapest choices on a forest, written as `trial`; returns their cost.

    Args:
        view: the core.
        members, size, marks: the forest, as `grow` made it.
        sums: costs of the members' strategies, from their `start` on; changed.
        best: room for the best strategy of each member by its parent's.
        least: room for a cost per strategy of a node.
    """
    used, total = 0, 0.0
    for member in range(size - 1, -1, -1):
        node, link, mine = members[member].node, members[member].link, members[member].start
        own = view.nodes[node].size
        if link < 0:
            lowest = 0
            for s in range(1, own):
                if sums[mine + s] < sums[mine + lowest]:
                    lowest = s
            members[member].trial = lowest
            total += sums[mine + lowest]
            continue
        half = view.around[link]
        wide, theirs = view.nodes[half.other].size, members[marks[half.other].position].start
        for t in range(wide):
            least[t] = np.inf
        for s in range(own):
            value, row = sums[mine + s], half.table + s * wide
            for t in range(wide):
                if value + view.table[row + t] < least[t]:
                    least[t] = value + view.table[row + t]
                    best[used + t] = s
        for t in range(wide):
            sums[theirs + t] += least[t]
        members[member].trial = used
        used += wide
    for member in range(size):
        link = members[member].link
        if link >= 0:
            parent = marks[view.around[link].other].position
            members[member].trial = best[members[member].trial + members[parent].trial]
    return total
