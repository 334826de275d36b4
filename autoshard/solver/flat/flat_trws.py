"""Sequential tree-reweighted message passing on flat arrays, at prices on memory."""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.numba_jit import jit


@jit
def price_strategies(view, prices, priced):  # type: ignore[no-untyped-def]
    """Writes per strategy what its memory costs at a price per byte and moment."""
    total = np.zeros(len(prices) + 1)
    for moment in range(len(prices)):
        total[moment + 1] = total[moment] + prices[moment]
    for node in range(len(view.nodes) - 1):
        own, size = view.nodes[node].offset, view.nodes[node].size
        for s in range(size):
            priced[own + s] = 0.0
        for place in range(view.nodes[node].items, view.nodes[node + 1].items):
            item = view.items[place]
            span = total[item.high] - total[item.low]
            if span > 0.0:
                for s in range(size):
                    priced[own + s] += span * view.usage[item.start + s]


@jit
def loads_of(view, places, loads):  # type: ignore[no-untyped-def]
    """Writes the bytes that a choice uses at each moment, without what is used whatever is chosen."""
    change = np.zeros(len(loads) + 1)
    for node in range(len(view.nodes) - 1):
        for place in range(view.nodes[node].items, view.nodes[node + 1].items):
            item = view.items[place]
            held = view.usage[item.start + places[node]]
            change[item.low] += held
            change[item.high] -= held
    total = 0.0
    for moment in range(len(loads)):
        total += change[moment]
        loads[moment] = total


@jit
def pass_messages(view, unary, messages, backward, widest, beliefs):  # type: ignore[no-untyped-def]
    """One pass in the order of the nodes, or back.

    Args:
        view: the core.
        unary: per strategy its cost, prices included.
        messages: what each half-edge's node was told along its edge, from its `told` on; changed.
        backward: whether to go from the last node to the first.
        widest: strategies of a node at most.
        beliefs: per strategy unary + messages; changed. After both passes its minima bound the cost.

    Returns:
        The bound, valid after a pass back.
    """
    count, total = len(view.nodes) - 1, 0.0
    told, least = np.empty(widest), np.empty(widest)
    for step in range(count):
        node = count - 1 - step if backward else step
        own, size = view.nodes[node].offset, view.nodes[node].size
        first, last = view.nodes[node].around, view.nodes[node + 1].around
        for s in range(size):
            told[s] = unary[own + s]
        ahead = 0
        for place in range(first, last):
            begin = view.around[place].told
            ahead += view.around[place].other > node
            for s in range(size):
                told[s] += messages[begin + s]
        behind = last - first - ahead
        share = 1.0 / max(ahead, behind, 1)
        smallest = np.inf
        for s in range(size):
            beliefs[own + s] = told[s]
            smallest = min(smallest, told[s])
        total += (1.0 - behind * share) * smallest
        for place in range(first, last):
            half = view.around[place]
            if (half.other < node) != backward:
                continue
            width, into = view.nodes[half.other].size, view.around[half.back].told
            for t in range(width):
                least[t] = np.inf
            for s in range(size):
                value = share * told[s] - messages[half.told + s]
                row = half.table + s * width
                for t in range(width):
                    least[t] = min(least[t], value + view.table[row + t])
            for t in range(width):
                messages[into + t] = least[t]
    return total


@jit
def round_in_order(view, unary, messages, widest, places):  # type: ignore[no-untyped-def]
    """A choice: each node, in order, the best for its earlier neighbours' choices and the later ones' messages."""
    costs = np.empty(widest)
    for node in range(len(view.nodes) - 1):
        own, size = view.nodes[node].offset, view.nodes[node].size
        for s in range(size):
            costs[s] = unary[own + s]
        for place in range(view.nodes[node].around, view.nodes[node + 1].around):
            half = view.around[place]
            if half.other > node:
                for s in range(size):
                    costs[s] += messages[half.told + s]
            else:
                # The other end's row of the table: contiguous where the table is seen from there.
                row = view.around[half.back].table + places[half.other] * size
                for s in range(size):
                    costs[s] += view.table[row + s]
        best = 0
        for s in range(1, size):
            if costs[s] < costs[best]:
                best = s
        places[node] = best
