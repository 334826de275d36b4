"""Large-neighbourhood search under a hard memory limit.

A neighbourhood is a random set of nodes that induces a forest. It is solved exactly at prices on memory; without a
limit, memory has no price.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.random_numbers import draw, pick
from autoshard.solver.jit import jit, jit_inner

MEMBER = np.dtype([(name, np.int64) for name in ("node", "link", "to_hub", "start", "picked", "trial")], align=True)
"""A member of a forest: its node, its half-edge to its parent (-1: a root) and to the hub (-1: none), the start of its
strategies among the members', its choice in the best and in the current solution."""

MARK = np.dtype([("position", np.int64), ("touched", np.int64), ("inside", np.bool_)], align=True)
"""A node while a forest is grown: its position among the members, its number of neighbours that are members, and True
if it is a member."""


@jit_inner
def grow_forest(view, state, root, hub, target, most, members, marks, border):  # type: ignore[no-untyped-def]
    """Grow a random forest, in which the parent of each member comes before it.

    Args:
        view: the core.
        state: of the random numbers.
        root: the node to start from without a hub.
        hub: a node that is solved together with the forest, -1 for none: trees start at its neighbours.
        target: number of nodes to reach.
        most: table entries that a solve of the forest may read: those of its links, once per strategy of the hub.
        members: written: `node` and `link`.
        marks: `touched` 0 before and after; `inside` False before, and True for the members and the hub after.
        border: buffer for candidates: their half-edges to a member, or -1 - node for roots.

    Returns:
        The number of members.
    """
    size, waiting, capacity, cells = 0, 0, len(border), 0
    if hub < 0:
        border[0] = -1 - root
        waiting = 1
    else:
        marks[hub].inside = True
        most //= view.nodes[hub].size
        first = view.nodes[hub].around
        degree = view.nodes[hub + 1].around - first
        # A hub may have more neighbours than fit in the border: start at a random one, so that none is always left out.
        turn = pick(state, degree)
        for step in range(min(degree, capacity // 2)):
            border[waiting] = -1 - view.around[first + (turn + step) % degree].neighbour
            waiting += 1
    while size < target and waiting:
        chosen = pick(state, waiting)
        towards = border[chosen]
        waiting -= 1
        # The last candidate fills the gap.
        border[chosen] = border[waiting]
        candidate = -1 - towards
        if towards >= 0:
            candidate = view.around[view.around[towards].reverse].neighbour
        # A second link to the members would close a cycle.
        if marks[candidate].inside or marks[candidate].touched != (0 if towards < 0 else 1):
            continue
        if towards >= 0:
            entries = view.nodes[candidate].size * view.nodes[view.around[towards].neighbour].size
            if cells + entries > most:
                continue
            cells += entries
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
        best: buffer for the best strategy of each member by its parent's.
        least: buffer for a cost per strategy of a node.
    """
    used, total = 0, 0.0
    # Parents come first, so in reverse order every member has the sums of all its children.
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
        # For now, the start of its best strategies by the parent's, from which the loop below reads the choice.
        members[member].trial = used
        used += parent_count
    for member in range(size):
        link = members[member].link
        if link >= 0:
            parent = marks[view.around[link].neighbour].position
            members[member].trial = best[members[member].trial + members[parent].trial]
    return total


_TRIES = 6
"""Most multiples of the prices at which one forest is solved."""

_BLOCK = 64
"""Number of moments that are compared with the limit at once if no item of a change begins or ends in them."""


@jit
def conditional_costs(view, places, conditional):  # type: ignore[no-untyped-def]
    """Write the cost of every strategy given the choices of all neighbours."""
    for node in range(len(view.nodes) - 1):
        offset, size = view.nodes[node].offset, view.nodes[node].size
        for s in range(size):
            conditional[offset + s] = view.cost[offset + s]
        for place in range(view.nodes[node].around, view.nodes[node + 1].around):
            half = view.around[place]
            row = view.around[half.reverse].table + places[half.neighbour] * size
            for s in range(size):
                conditional[offset + s] += view.table[row + s]


@jit_inner
def move_node(view, node, choice, places, conditional):  # type: ignore[no-untyped-def]
    """Change the choice of one node, and update the conditional costs of its neighbours."""
    for place in range(view.nodes[node].around, view.nodes[node + 1].around):
        half = view.around[place]
        offset, size = view.nodes[half.neighbour].offset, view.nodes[half.neighbour].size
        new, old = half.table + choice * size, half.table + places[node] * size
        for t in range(size):
            conditional[offset + t] += view.table[new + t] - view.table[old + t]
    places[node] = choice


@jit_inner
def free_costs(view, places, conditional, members, size, marks, hub, plain, hub_costs):  # type: ignore[no-untyped-def]
    """Write the costs of the members' and the hub's strategies without the edges among them.

    Returns:
        The number of the members' strategies, and the current cost of members, hub and their edges.
    """
    total, before = 0, 0.0
    for member in range(size):
        node = members[member].node
        members[member].start, members[member].to_hub = total, -1
        offset = view.nodes[node].offset
        for s in range(view.nodes[node].size):
            plain[total + s] = conditional[offset + s]
        total += view.nodes[node].size
    for member in range(size):
        link = members[member].link
        if link < 0:
            continue
        half, node = view.around[link], members[member].node
        start, parent_start = members[member].start, members[marks[half.neighbour].position].start
        count, parent_count = view.nodes[node].size, view.nodes[half.neighbour].size
        # `conditional` counts the edge to the parent at both ends: subtract it at both, since the forest adds it once.
        parent_row = view.around[half.reverse].table + places[half.neighbour] * count
        for s in range(count):
            plain[start + s] -= view.table[parent_row + s]
        row = half.table + places[node] * parent_count
        for t in range(parent_count):
            plain[parent_start + t] -= view.table[row + t]
        before += view.table[row + places[half.neighbour]]
    if hub >= 0:
        offset, hub_count = view.nodes[hub].offset, view.nodes[hub].size
        for t in range(hub_count):
            hub_costs[t] = conditional[offset + t]
        for place in range(view.nodes[hub].around, view.nodes[hub + 1].around):
            half = view.around[place]
            if not marks[half.neighbour].inside:
                continue
            member, count = marks[half.neighbour].position, view.nodes[half.neighbour].size
            members[member].to_hub = half.reverse
            row = half.table + places[hub] * count
            for s in range(count):
                plain[members[member].start + s] -= view.table[row + s]
            row = view.around[half.reverse].table + places[half.neighbour] * hub_count
            for t in range(hub_count):
                hub_costs[t] -= view.table[row + t]
            before += view.table[row + places[hub]]
        before += hub_costs[places[hub]]
    for member in range(size):
        before += plain[members[member].start + places[members[member].node]]
    return total, before


@jit_inner
def change_loads(view, members, size, places, change, events):  # type: ignore[no-untyped-def]
    """Add the change of memory by the new choices to a difference array, and mark the affected blocks of moments.

    Returns:
        The moments [first, last) that change; an empty range if none does.
    """
    first, last = len(change), 0
    for member in range(size):
        node, choice = members[member].node, members[member].picked
        if choice == places[node]:
            continue
        for place in range(view.nodes[node].items, view.nodes[node + 1].items):
            item = view.items[place]
            more = view.usage[item.start + choice] - view.usage[item.start + places[node]]
            if more != 0.0:
                change[item.low] += more
                change[item.high] -= more
                events[item.low // _BLOCK] = True
                events[item.high // _BLOCK] = True
                first, last = min(first, item.low), max(last, item.high)
    return first, last


@jit_inner
def exceeds_limit(view, loads, fullest, change, events, first, last):  # type: ignore[no-untyped-def]
    """Return True if a change of the loads in [first, last) exceeds the limit at some moment, and the work done."""
    running, work = 0.0, 0
    for block in range(first // _BLOCK, (last - 1) // _BLOCK + 1):
        work += 1
        if events[block]:
            work += _BLOCK
            for moment in range(max(block * _BLOCK, first), min((block + 1) * _BLOCK, last)):
                running += change[moment]
                if running > 0.0 and loads[moment] + running > view.room[moment]:
                    return True, work
        elif running > 0.0 and fullest[block] + running > 0.0:
            return True, work
    return False, work


@jit_inner
def add_loads(view, loads, fullest, change, first, last):  # type: ignore[no-untyped-def]
    """Add a change to the loads; `fullest` is the excess of each block's fullest moment over the limit."""
    running = 0.0
    for moment in range(first, last):
        running += change[moment]
        loads[moment] += running
    for block in range(first // _BLOCK, (last - 1) // _BLOCK + 1):
        fullest[block] = -np.inf
        for moment in range(block * _BLOCK, min((block + 1) * _BLOCK, len(loads))):
            fullest[block] = max(fullest[block], loads[moment] - view.room[moment])


@jit
def search_forests(  # type: ignore[no-untyped-def]
    view, places, loads, priced, penalty, conditional, steps, largest, most, seed, state, temperature
):
    """Solve random forests, half of them together with a hub, with all other nodes fixed; accept better choices.

    Better is cheaper within the limit or, while the limit is exceeded, cheaper with `penalty` for every byte above it.

    Args:
        view: the core, with finite tables.
        places: the choice; changed.
        loads: bytes at each moment, without the memory used under any choice; changed.
        priced: per strategy the price of its memory.
        penalty: per moment the cost of a byte above the limit.
        conditional: per strategy its cost given the neighbours' choices (`conditional_costs`); changed.
        steps: forests to solve.
        largest: most nodes of a forest.
        most: table entries that the solve of a forest may read.
        seed: state of the random numbers; changed.
        state: multiple of the prices to start from, and the work so far; changed.
        temperature: largest increase in cost of an accepted change, times a random number.

    Returns:
        The remaining bytes above the limit, summed over moments.
    """
    nodes, moments = len(view.nodes) - 1, len(loads)
    widest = 1
    for node in range(nodes):
        widest = max(widest, view.nodes[node].size)
    members, marks = np.empty(largest + 1, dtype=MEMBER), np.zeros(nodes, dtype=MARK)
    border = np.empty(max(256, 32 * largest), dtype=np.int64)
    plain, sums = np.empty(largest * widest), np.empty(largest * widest)
    best = np.empty(largest * widest, dtype=np.int32)
    hub_costs, least = np.empty(widest), np.empty(widest)
    change = np.zeros(moments + 1)
    events = np.zeros(moments // _BLOCK + 1, dtype=np.bool_)
    fullest = np.full(moments // _BLOCK + 1, -np.inf)
    over = 0.0
    for moment in range(moments):
        fullest[moment // _BLOCK] = max(fullest[moment // _BLOCK], loads[moment] - view.room[moment])
        over += max(loads[moment] - view.room[moment], 0.0)
    for _ in range(steps):
        # Sizes on a logarithmic scale: small forests are cheap and often fit, large ones change many nodes at once.
        target = min(int(np.exp(draw(seed) * np.log(largest))) + 1, largest)
        hub = -1
        if len(view.around) and draw(seed) < 0.5:
            # Drawn in proportion to its degree: the other end of a random half-edge.
            hub = view.around[pick(seed, len(view.around))].neighbour
        size = grow_forest(view, seed, pick(seed, nodes), hub, target, most, members, marks, border)
        total, before = free_costs(view, places, conditional, members, size, marks, hub, plain, hub_costs)
        for member in range(size):
            marks[members[member].node].inside = False
        moving = size
        if hub >= 0:
            marks[hub].inside = False
            members[size].node = hub
            moving += 1
        allowed = temperature * draw(seed)
        # The recently accepted multiple of the prices; half of the forests try others near it.
        scale, low, high = state[0], 0.0, np.inf
        if draw(seed) < 0.5:
            scale *= np.exp(2.4 * draw(seed) - 1.2)
        unpriced = False
        for _attempt in range(_TRIES):
            lowest = np.inf
            for choice in range(view.nodes[hub].size if hub >= 0 else 1):
                value = 0.0
                if hub >= 0:
                    value = hub_costs[choice] + scale * priced[view.nodes[hub].offset + choice]
                    # After presolve no cost is negative: the forest can only add to those of the hub.
                    if value >= lowest:
                        continue
                for member in range(size):
                    node, start, link = members[member].node, members[member].start, members[member].to_hub
                    offset, count = view.nodes[node].offset, view.nodes[node].size
                    for s in range(count):
                        sums[start + s] = plain[start + s] + scale * priced[offset + s]
                    if link >= 0:
                        row = view.around[view.around[link].reverse].table + choice * count
                        for s in range(count):
                            sums[start + s] += view.table[row + s]
                value += solve_forest(view, members, size, marks, sums, best, least)
                state[1] += 8 * total
                if value < lowest:
                    lowest = value
                    for member in range(size):
                        members[member].picked = members[member].trial
                    members[size].picked = choice
            # The change in real cost, without prices.
            after, moved = 0.0, False
            if hub >= 0:
                after = hub_costs[members[size].picked]
                moved = members[size].picked != places[hub]
            for member in range(size):
                node, picked, link = members[member].node, members[member].picked, members[member].link
                after += plain[members[member].start + picked]
                moved |= picked != places[node]
                if link >= 0:
                    half = view.around[link]
                    parent = members[marks[half.neighbour].position].picked
                    after += view.table[half.table + picked * view.nodes[half.neighbour].size + parent]
                link = members[member].to_hub
                if link >= 0:
                    half = view.around[link]
                    after += view.table[half.table + picked * view.nodes[hub].size + members[size].picked]
            fits, accepted = True, False
            if moved and (over > 0.0 or after - before <= allowed):
                first, last = change_loads(view, members, moving, places, change, events)
                if first >= last:
                    accepted = over == 0.0 or after - before < 0.0
                elif over > 0.0:
                    running, fined, excess = 0.0, 0.0, 0.0
                    state[1] += last - first
                    for moment in range(first, last):
                        running += change[moment]
                        old = max(loads[moment] - view.room[moment], 0.0)
                        new = max(loads[moment] + running - view.room[moment], 0.0)
                        excess += new - old
                        fined += (new - old) * penalty[moment]
                    accepted = after - before + fined < 0.0
                    fits = fined <= 0.0
                    if accepted:
                        over = max(over + excess, 0.0)
                else:
                    exceeds, work = exceeds_limit(view, loads, fullest, change, events, first, last)
                    state[1] += work
                    fits = not exceeds
                    accepted = fits
                if first < last:
                    if accepted:
                        add_loads(view, loads, fullest, change, first, last)
                    for member in range(moving):
                        node = members[member].node
                        if members[member].picked != places[node]:
                            for place in range(view.nodes[node].items, view.nodes[node + 1].items):
                                item = view.items[place]
                                change[item.low] = 0.0
                                change[item.high] = 0.0
                                events[item.low // _BLOCK] = False
                                events[item.high // _BLOCK] = False
            if accepted:
                for member in range(moving):
                    node = members[member].node
                    if members[member].picked != places[node]:
                        move_node(view, node, members[member].picked, places, conditional)
                if not unpriced:
                    # A slow average over accepted forests: the next ones start where the limit was recently met.
                    state[0] = min(max(state[0] * 0.98 + scale * 0.02, 0.05), 4.0)
                break
            if moments == 0:
                # Without memory there are no prices to vary.
                break
            if unpriced:
                if fits:
                    # Even with free memory there is no improvement, so no price helps.
                    break
                unpriced, scale = False, high / 2
                continue
            if fits:
                # It fits at the first price but is no cheaper. The price may be too high: try zero.
                if high == np.inf and low == 0.0 and over == 0.0:
                    unpriced, high, scale = True, scale, 0.0
                    continue
                high = scale
            else:
                low = scale
            # Bisection between a price at which the forest exceeds the limit and one at which it fits.
            scale = low * 2.0 + 1e-3 if high == np.inf else (low + high) / 2
            if high - low < 0.1 * high:
                break
    over = 0.0
    for moment in range(moments):
        over += max(loads[moment] - view.room[moment], 0.0)
    return over
