"""Random sets of nodes whose edges among them form a forest, and the cheapest choices on one."""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.random_numbers import pick
from autoshard.solver.jit import jit_inner

MEMBER = np.dtype([(name, np.int64) for name in ("node", "link", "to_hub", "start", "picked", "trial")], align=True)
"""A member of a forest: its node, the half-edge at it that leads to its parent (-1: a root) and the one that leads to
the hub (-1: none), the start of its strategies among the members', its choice in the best and in the current
solution."""

MARK = np.dtype([("position", np.int64), ("touched", np.int64), ("inside", np.bool_)], align=True)
"""A node during the growth of a forest: its place among the members, its number of neighbours that are members, and
True if it is a member."""


@jit_inner
def grow_forest(view, state, root, hub, target, members, marks, border):  # type: ignore[no-untyped-def]
    """Grow a random forest, in which the parent of each member comes before it.

    Args:
        view: the core.
        state: of the random numbers.
        root: the node to start from, where there is no hub.
        hub: a node that members may be joined with besides, -1 for none: trees start at its neighbours.
        target: number of nodes to reach.
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
        # A hub may have more neighbours than the border has room for. A random first one leaves none out every time.
        turn = pick(state, degree)
        for step in range(min(degree, capacity // 2)):
            border[waiting] = -1 - view.around[first + (turn + step) % degree].neighbour
            waiting += 1
    while size < target and waiting:
        chosen = pick(state, waiting)
        towards = border[chosen]
        waiting -= 1
        # The last candidate fills the gap: removal from the middle in one step.
        border[chosen] = border[waiting]
        candidate = -1 - towards
        if towards >= 0:
            candidate = view.around[view.around[towards].reverse].neighbour
        # A second link to the members would close a cycle, and the set would be no forest.
        if marks[candidate].inside or marks[candidate].touched != (0 if towards < 0 else 1):
            continue
        members[size].node = candidate
        members[size].link = -1 if towards < 0 else towards
        marks[candidate].inside = True
        marks[candidate].position = size
        size += 1
        for place in range(view.nodes[candidate].around, view.nodes[candidate + 1].around):
            neighbour = view.around[place].neighbour
            marks[neighbour].touched += 1
            if not marks[neighbour].inside and marks[neighbour].touched == 1 and waiting < capacity:
                border[waiting] = view.around[place].reverse
                waiting += 1
    for member in range(size):
        node = members[member].node
        for place in range(view.nodes[node].around, view.nodes[node + 1].around):
            marks[view.around[place].neighbour].touched = 0
    return size


@jit_inner
def solve_forest(view, members, size, marks, sums, best, least):  # type: ignore[no-untyped-def]
    """Write the cheapest choices on a forest as `trial`, and return their cost.

    Args:
        view: the core.
        members, size, marks: the forest, from `grow_forest`.
        sums: costs of the members' strategies, from their `start` on; changed.
        best: room for the best strategy of each member by its parent's.
        least: room for a cost per strategy of a node.
    """
    used, total = 0, 0.0
    # Parents come first, so that backwards every member has the sums of all its children.
    for member in range(size - 1, -1, -1):
        node, link, start = members[member].node, members[member].link, members[member].start
        count = view.nodes[node].size
        if link < 0:
            lowest = 0
            for s in range(1, count):
                if sums[start + s] < sums[start + lowest]:
                    lowest = s
            members[member].trial = lowest
            total += sums[start + lowest]
            continue
        half = view.around[link]
        parent_count, parent_start = view.nodes[half.neighbour].size, members[marks[half.neighbour].position].start
        for t in range(parent_count):
            least[t] = np.inf
        for s in range(count):
            value, row = sums[start + s], half.table + s * parent_count
            for t in range(parent_count):
                if value + view.table[row + t] < least[t]:
                    least[t] = value + view.table[row + t]
                    best[used + t] = s
        for t in range(parent_count):
            sums[parent_start + t] += least[t]
        # The start of its best strategies by the parent's, until the loop below reads the choice there.
        members[member].trial = used
        used += parent_count
    for member in range(size):
        link = members[member].link
        if link >= 0:
            parent = marks[view.around[link].neighbour].position
            members[member].trial = best[members[member].trial + members[parent].trial]
    return total
