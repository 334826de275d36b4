"""Large-neighbourhood search under a hard memory limit: induced subtrees solved exactly at prices on memory."""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.jit import compiled

_TRIES = 6
"""Prices under which one subtree is solved."""


@compiled
def entry(view, half, s, t):  # type: ignore[no-untyped-def]
    """The table entry for strategy s of a half-edge's node and t of the other."""
    edge = half >> 1
    columns = view.size[view.ends[edge, 1]]
    if half & 1:
        return view.table[view.start[edge] + t * columns + s]
    return view.table[view.start[edge] + s * columns + t]


@compiled
def condition(view, places, given):  # type: ignore[no-untyped-def]
    """Writes per strategy its cost beside the choices of all neighbours."""
    given[:] = view.cost
    for half in range(2 * len(view.ends)):
        node, other = view.ends[half >> 1, half & 1], view.ends[half >> 1, 1 - (half & 1)]
        own = view.offset[node]
        for s in range(view.size[node]):
            given[own + s] += entry(view, half, s, places[other])


@compiled
def grow(view, random, seed, hub, target, members, link, count, stamp, border):  # type: ignore[no-untyped-def]
    """A random set of nodes whose edges among them form a forest, the parent of each before it.

    Args:
        view: the core.
        random: a numpy generator.
        seed: the node to start from, where there is no hub.
        hub: a node that the others may be linked to besides, -1 for none: trees start at its neighbours.
        target: nodes wanted.
        members: written: the nodes, in order.
        link: written: per member the half-edge at it that leads to its parent; -1 for a root.
        count: per node how many of its neighbours are members; 0 before and after.
        stamp: per node, whether it is a member; False before.
        border: room for candidates: half-edges at them that lead to a member, or -1 - node for roots.

    Returns:
        The number of members.
    """
    size, waiting = 0, 0
    capacity = len(border)
    if hub < 0:
        border[0] = -1 - seed
        waiting = 1
    else:
        stamp[hub] = True
        first, degree = view.first_half[hub], view.first_half[hub + 1] - view.first_half[hub]
        turn = random.integers(0, degree)
        for step in range(min(degree, capacity // 2)):
            half = view.halves[first + (turn + step) % degree]
            border[waiting] = -1 - view.ends[half >> 1, 1 - (half & 1)]
            waiting += 1
    while size < target and waiting:
        pick = random.integers(0, waiting)
        towards = border[pick]
        waiting -= 1
        border[pick] = border[waiting]
        candidate = -1 - towards if towards < 0 else view.ends[towards >> 1, towards & 1]
        if stamp[candidate] or count[candidate] != (0 if towards < 0 else 1):
            continue
        members[size], link[size] = candidate, -1 if towards < 0 else towards
        stamp[candidate] = True
        size += 1
        for place in range(view.first_half[candidate], view.first_half[candidate + 1]):
            half = view.halves[place]
            other = view.ends[half >> 1, 1 - (half & 1)]
            count[other] += 1
            if not stamp[other] and count[other] == 1 and waiting < capacity:
                border[waiting] = half ^ 1
                waiting += 1
    for member in range(size):
        for place in range(view.first_half[members[member]], view.first_half[members[member] + 1]):
            half = view.halves[place]
            count[view.ends[half >> 1, 1 - (half & 1)]] = 0
    return size


@compiled
def solve_forest(view, members, link, size, sums, start, best, picked, position):  # type: ignore[no-untyped-def]
    """The cheapest choices on a forest, and their cost.

    Args:
        view: the core.
        members, link, size: the forest, as `grow` made it.
        sums: costs of the members' strategies, from `start`[member] on; changed.
        start: see there.
        best: room for the best strategy of each member by its parent's.
        picked: written: the choice of each member.
        position: per node its place among the members.
    """
    used, total = 0, 0.0
    for member in range(size - 1, -1, -1):
        half = link[member]
        mine, own = start[member], view.size[members[member]]
        if half < 0:
            picked[member] = np.argmin(sums[mine : mine + own])
            total += sums[mine + picked[member]]
            continue
        edge = half >> 1
        parent = position[view.ends[edge, 1 - (half & 1)]]
        wide, columns = view.size[members[parent]], view.size[view.ends[edge, 1]]
        row, column = (1, columns) if half & 1 else (columns, 1)
        begin, theirs = view.start[edge], start[parent]
        for t in range(wide):
            least, argument = np.inf, 0
            for s in range(own):
                value = sums[mine + s] + view.table[begin + s * row + t * column]
                if value < least:
                    least, argument = value, s
            sums[theirs + t] += least
            best[used + t] = argument
        picked[member] = used
        used += wide
    for member in range(size):
        half = link[member]
        if half >= 0:
            parent = position[view.ends[half >> 1, 1 - (half & 1)]]
            picked[member] = best[picked[member] + picked[parent]]
    return total


@compiled
def change_loads(view, members, size, places, picked, change):  # type: ignore[no-untyped-def]
    """Adds to a difference array what the new choices use more; returns the moments [first, last) concerned."""
    first, last = len(change), 0
    for member in range(size):
        node = members[member]
        if picked[member] == places[node]:
            continue
        for item in range(view.first_item[node], view.first_item[node + 1]):
            begin = view.usage_start[item]
            more = view.usage[begin + picked[member]] - view.usage[begin + places[node]]
            if more != 0.0:
                change[view.low[item]] += more
                change[view.high[item]] -= more
                first, last = min(first, view.low[item]), max(last, view.high[item])
    return first, last


@compiled
def search(  # type: ignore[no-untyped-def]
    view, places, loads, priced, penalty, given, steps, largest, random, state, temperature
):
    """Solves random forests, half of them together with a hub, all else held; takes what is better.

    Better is cheaper within the limit or, while the limit is passed, cheaper with `penalty` for every byte above it.

    Args:
        view: the core, with finite tables.
        places: the choice; changed.
        loads: bytes at each moment, without what is used whatever is chosen; changed.
        priced: per strategy the price of its memory.
        penalty: per moment the cost of a byte above the limit.
        given: per strategy its cost beside the neighbours' choices (`condition`); changed.
        steps: forests to solve.
        largest: nodes of a forest at most.
        random: a numpy generator.
        state: multiple of the prices to start from, and work done so far; changed.
        temperature: by how much a change may be dearer, times a random number.

    Returns:
        The bytes above the limit that are left, summed over moments.
    """
    nodes, moments = len(view.size), len(loads)
    members, link = np.empty(largest + 1, dtype=np.int64), np.empty(largest, dtype=np.int64)
    to_hub = np.empty(largest, dtype=np.int64)
    count, stamp = np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.bool_)
    border = np.empty(max(256, 32 * largest), dtype=np.int64)
    widest = view.size.max()
    plain, sums = np.empty(largest * widest), np.empty(largest * widest)
    best = np.empty(largest * widest, dtype=np.int32)
    start = np.empty(largest, dtype=np.int64)
    picked, trial = np.empty(largest + 1, dtype=np.int64), np.empty(largest + 1, dtype=np.int64)
    hub_costs = np.empty(widest)
    position = np.empty(nodes, dtype=np.int64)
    change = np.zeros(moments + 1)
    over = 0.0
    for moment in range(moments):
        over += max(loads[moment] - view.room[moment], 0.0)
    for _ in range(steps):
        target = min(int(np.exp(random.random() * np.log(largest))) + 1, largest)
        hub = -1
        if len(view.halves) and random.random() < 0.5:
            half = random.integers(0, len(view.halves))
            hub = view.ends[half >> 1, half & 1]
        size = grow(view, random, random.integers(0, nodes), hub, target, members, link, count, stamp, border)
        total, before = 0, 0.0
        for member in range(size):
            node = members[member]
            position[node] = member
            start[member] = total
            to_hub[member] = -1
            own = view.offset[node]
            plain[total : total + view.size[node]] = given[own : own + view.size[node]]
            total += view.size[node]
        for member in range(size):
            half = link[member]
            if half < 0:
                continue
            parent = members[position[view.ends[half >> 1, 1 - (half & 1)]]]
            node, theirs = members[member], start[position[parent]]
            for s in range(view.size[node]):
                plain[start[member] + s] -= entry(view, half, s, places[parent])
            for t in range(view.size[parent]):
                plain[theirs + t] -= entry(view, half, places[node], t)
            before += entry(view, half, places[node], places[parent])
        if hub >= 0:
            own, wide = view.offset[hub], view.size[hub]
            hub_costs[:wide] = given[own : own + wide]
            for place in range(view.first_half[hub], view.first_half[hub + 1]):
                half = view.halves[place] ^ 1
                node = view.ends[half >> 1, half & 1]
                if stamp[node]:
                    member = position[node]
                    to_hub[member] = half
                    before += entry(view, half, places[node], places[hub])
                    for s in range(view.size[node]):
                        plain[start[member] + s] -= entry(view, half, s, places[hub])
                    for t in range(wide):
                        hub_costs[t] -= entry(view, half, places[node], t)
            before += hub_costs[places[hub]]
            members[size] = hub
            stamp[hub] = False
        for member in range(size):
            before += plain[start[member] + places[members[member]]]
            stamp[members[member]] = False
        all_of_them = size + (hub >= 0)
        scale, low, high = state[0], 0.0, np.inf
        if random.random() < 0.5:
            scale *= np.exp(random.normal() * 0.7)
        for _attempt in range(_TRIES):
            least = np.inf
            for choice in range(view.size[hub] if hub >= 0 else 1):
                value = 0.0
                if hub >= 0:
                    value = hub_costs[choice] + scale * priced[view.offset[hub] + choice]
                    if value >= least:
                        continue
                for member in range(size):
                    own, mine, half = view.offset[members[member]], start[member], to_hub[member]
                    for s in range(view.size[members[member]]):
                        sums[mine + s] = plain[mine + s] + scale * priced[own + s]
                    if half >= 0:
                        for s in range(view.size[members[member]]):
                            sums[mine + s] += entry(view, half, s, choice)
                value += solve_forest(view, members, link, size, sums, start, best, trial, position)
                state[1] += 8 * total
                if value < least:
                    least = value
                    picked[:size] = trial[:size]
                    picked[size] = choice
            after, moved = 0.0, False
            if hub >= 0:
                after = hub_costs[picked[size]]
                moved = picked[size] != places[hub]
            for member in range(size):
                after += plain[start[member] + picked[member]]
                moved |= picked[member] != places[members[member]]
                if link[member] >= 0:
                    half = link[member]
                    parent = position[view.ends[half >> 1, 1 - (half & 1)]]
                    after += entry(view, half, picked[member], picked[parent])
                if to_hub[member] >= 0:
                    after += entry(view, to_hub[member], picked[member], picked[size])
            if not moved:
                # At these prices all is well as it is; a change, if any, comes from lower ones.
                high = scale
            else:
                allowed = temperature * random.random()
                fits, taken = True, False
                if over > 0.0 or after - before <= allowed:
                    first, last = change_loads(view, members, all_of_them, places, picked, change)
                    running, fined, excess = 0.0, 0.0, 0.0
                    state[1] += max(last - first, 0)
                    for moment in range(first, last):
                        running += change[moment]
                        old = max(loads[moment] - view.room[moment], 0.0)
                        new = max(loads[moment] + running - view.room[moment], 0.0)
                        excess += new - old
                        fined += (new - old) * penalty[moment]
                    if over > 0.0:
                        taken = after - before + fined < 0.0
                        fits = fined <= 0.0
                    else:
                        fits = excess <= 0.0
                        taken = fits
                    if taken:
                        running = 0.0
                        for moment in range(first, last):
                            running += change[moment]
                            loads[moment] += running
                        over = max(over + excess, 0.0)
                    if first < last:
                        change[first : last + 1] = 0.0
                if taken:
                    for member in range(all_of_them):
                        node = members[member]
                        if picked[member] != places[node]:
                            move(view, node, picked[member], places, given)
                    state[0] = min(max(state[0] * 0.98 + scale * 0.02, 0.05), 4.0)
                    break
                if fits:
                    high = scale
                else:
                    low = scale
            scale = low * 2.0 + 1e-3 if high == np.inf else (low + high) / 2
            if high - low < 0.1 * high:
                break
    over = 0.0
    for moment in range(moments):
        over += max(loads[moment] - view.room[moment], 0.0)
    return over


@compiled
def move(view, node, choice, places, given):  # type: ignore[no-untyped-def]
    """Changes the choice of one node, and what its neighbours' strategies cost beside it."""
    for place in range(view.first_half[node], view.first_half[node + 1]):
        half = view.halves[place]
        other = view.ends[half >> 1, 1 - (half & 1)]
        own = view.offset[other]
        for t in range(view.size[other]):
            given[own + t] += entry(view, half, choice, t) - entry(view, half, places[node], t)
    places[node] = choice
