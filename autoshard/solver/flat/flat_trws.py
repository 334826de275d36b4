"""Sequential tree-reweighted message passing on flat arrays, at prices on memory."""

from __future__ import annotations

import numpy as np

from autoshard.solver.jit import jit


@jit
def price_strategies(view, prices, priced):  # type: ignore[no-untyped-def]
    """Write the cost of the memory of every strategy at a price per byte and moment."""
    # Sums from the first moment on: the price of a life is a difference of two of them.
    total = np.zeros(len(prices) + 1)
    for moment in range(len(prices)):
        total[moment + 1] = total[moment] + prices[moment]
    for node in range(len(view.nodes) - 1):
        offset, size = view.nodes[node].offset, view.nodes[node].size
        for s in range(size):
            priced[offset + s] = 0.0
        for place in range(view.nodes[node].items, view.nodes[node + 1].items):
            item = view.items[place]
            span = total[item.high] - total[item.low]
            if span > 0.0:
                for s in range(size):
                    priced[offset + s] += span * view.usage[item.start + s]


@jit
def loads_of(view, places, loads):  # type: ignore[no-untyped-def]
    """Write the bytes of a choice at each moment, without the memory used under any choice."""
    change = np.zeros(len(loads) + 1)
    for node in range(len(view.nodes) - 1):
        for place in range(view.nodes[node].items, view.nodes[node + 1].items):
            item = view.items[place]
            usage = view.usage[item.start + places[node]]
            change[item.low] += usage
            change[item.high] -= usage
    total = 0.0
    for moment in range(len(loads)):
        total += change[moment]
        loads[moment] = total


@jit
def pass_messages(view, unary, messages, backward, widest, beliefs):  # type: ignore[no-untyped-def]
    """Run one pass in the order of the nodes, or in reverse.

    Args:
        view: the core.
        unary: per strategy its cost, prices included.
        messages: the message to each half-edge's node along its edge, from its `message` on; changed.
        backward: True to go from the last node to the first.
        widest: strategies of a node at most.
        beliefs: per strategy unary + messages; changed. After both passes its minima bound the cost.

    Returns:
        The bound, valid after a backward pass.
    """
    count, total = len(view.nodes) - 1, 0.0
    belief, least = np.empty(widest), np.empty(widest)
    for step in range(count):
        node = count - 1 - step if backward else step
        offset, size = view.nodes[node].offset, view.nodes[node].size
        first, last = view.nodes[node].around, view.nodes[node + 1].around
        for s in range(size):
            belief[s] = unary[offset + s]
        later = 0
        for place in range(first, last):
            begin = view.around[place].message
            later += view.around[place].neighbour > node
            for s in range(size):
                belief[s] += messages[begin + s]
        earlier = last - first - later
        share = 1.0 / max(later, earlier, 1)
        smallest = np.inf
        for s in range(size):
            beliefs[offset + s] = belief[s]
            smallest = min(smallest, belief[s])
        # The share of the node's costs on chains that begin here; summed on the way back, these are the chains' optima.
        total += (1.0 - earlier * share) * smallest
        for place in range(first, last):
            half = view.around[place]
            if (half.neighbour < node) != backward:
                continue
            width, into = view.nodes[half.neighbour].size, view.around[half.reverse].message
            for t in range(width):
                least[t] = np.inf
            for s in range(size):
                # Without the message that came along this edge, which would be counted twice.
                value = share * belief[s] - messages[half.message + s]
                row = half.table + s * width
                for t in range(width):
                    least[t] = min(least[t], value + view.table[row + t])
            for t in range(width):
                messages[into + t] = least[t]
    return total


@jit
def round_in_order(view, unary, messages, widest, places):  # type: ignore[no-untyped-def]
    """Write the best choice of each node in order, by its earlier neighbours' choices and its later ones' messages."""
    costs = np.empty(widest)
    for node in range(len(view.nodes) - 1):
        offset, size = view.nodes[node].offset, view.nodes[node].size
        for s in range(size):
            costs[s] = unary[offset + s]
        for place in range(view.nodes[node].around, view.nodes[node + 1].around):
            half = view.around[place]
            if half.neighbour > node:
                for s in range(size):
                    costs[s] += messages[half.message + s]
            else:
                # The other end's row of the table: contiguous where the table is seen from there.
                row = view.around[half.reverse].table + places[half.neighbour] * size
                for s in range(size):
                    costs[s] += view.table[row + s]
        best = 0
        for s in range(1, size):
            if costs[s] < costs[best]:
                best = s
        places[node] = best
