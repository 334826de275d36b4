"""Sequential tree-reweighted message passing on flat arrays, at prices on memory."""

from __future__ import annotations

import numpy as np

from autoshard.solver.flat.jit import compiled


@compiled
def price_strategies(view, prices, priced):  # type: ignore[no-untyped-def]
    """Writes per strategy what its memory costs at a price per byte and moment."""
    total = np.zeros(len(prices) + 1)
    for moment in range(len(prices)):
        total[moment + 1] = total[moment] + prices[moment]
    for node in range(len(view.size)):
        own = view.offset[node]
        priced[own : own + view.size[node]] = 0.0
        for item in range(view.first_item[node], view.first_item[node + 1]):
            span = total[view.high[item]] - total[view.low[item]]
            if span > 0.0:
                begin = view.usage_start[item]
                for s in range(view.size[node]):
                    priced[own + s] += span * view.usage[begin + s]


@compiled
def loads_of(view, places, loads):  # type: ignore[no-untyped-def]
    """Writes the bytes that a choice uses at each moment, without what is used whatever is chosen."""
    change = np.zeros(len(loads) + 1)
    for node in range(len(view.size)):
        for item in range(view.first_item[node], view.first_item[node + 1]):
            held = view.usage[view.usage_start[item] + places[node]]
            change[view.low[item]] += held
            change[view.high[item]] -= held
    total = 0.0
    for moment in range(len(loads)):
        total += change[moment]
        loads[moment] = total


@compiled
def send(view, half, share, belief, received, out):  # type: ignore[no-untyped-def]
    """The message along an edge from the node of a half-edge: cheapest share of its belief + table."""
    edge = half >> 1
    node, other = view.ends[edge, half & 1], view.ends[edge, 1 - (half & 1)]
    width, columns = view.size[other], view.size[view.ends[edge, 1]]
    out[:width] = np.inf
    begin = view.start[edge]
    if half & 1:
        for t in range(width):
            least = np.inf
            row = begin + t * columns
            for s in range(view.size[node]):
                least = min(least, share * belief[s] - received[s] + view.table[row + s])
            out[t] = least
    else:
        for s in range(view.size[node]):
            value = share * belief[s] - received[s]
            row = begin + s * columns
            for t in range(width):
                out[t] = min(out[t], value + view.table[row + t])


@compiled
def sweep(view, unary, messages, inbox, ahead, backward, beliefs):  # type: ignore[no-untyped-def]
    """One pass in the order of the nodes, or back.

    Args:
        view: the core.
        unary: per strategy its cost, prices included.
        messages: what each half-edge's node was told along its edge, from `inbox`[half-edge] on; changed.
        inbox: see there.
        ahead: per node how many neighbours come after it.
        backward: whether to go from the last node to the first.
        beliefs: per strategy unary + messages; changed. After both passes its minima bound the cost.

    Returns:
        The bound, valid after a pass back.
    """
    count = len(view.size)
    total = 0.0
    for step in range(count):
        node = count - 1 - step if backward else step
        own, size = view.offset[node], view.size[node]
        belief = beliefs[own : own + size]
        belief[:] = unary[own : own + size]
        for place in range(view.first_half[node], view.first_half[node + 1]):
            told = inbox[view.halves[place]]
            for s in range(size):
                belief[s] += messages[told + s]
        degree = view.first_half[node + 1] - view.first_half[node]
        behind = degree - ahead[node]
        share = 1.0 / max(ahead[node], behind, 1)
        total += (1.0 - behind * share) * belief.min()
        for place in range(view.first_half[node], view.first_half[node + 1]):
            half = view.halves[place]
            other = view.ends[half >> 1, 1 - (half & 1)]
            if (other < node) == backward:
                received = messages[inbox[half] : inbox[half] + size]
                send(view, half, share, belief, received, messages[inbox[half ^ 1] :])
    return total


@compiled
def round_in_order(view, unary, messages, inbox, places):  # type: ignore[no-untyped-def]
    """A choice: each node, in order, the best for its earlier neighbours' choices and the later ones' messages."""
    for node in range(len(view.size)):
        own, size = view.offset[node], view.size[node]
        costs = unary[own : own + size].copy()
        for place in range(view.first_half[node], view.first_half[node + 1]):
            half = view.halves[place]
            edge = half >> 1
            other = view.ends[edge, 1 - (half & 1)]
            if other > node:
                for s in range(size):
                    costs[s] += messages[inbox[half] + s]
            else:
                columns = view.size[view.ends[edge, 1]]
                for s in range(size):
                    if half & 1:
                        costs[s] += view.table[view.start[edge] + places[other] * columns + s]
                    else:
                        costs[s] += view.table[view.start[edge] + s * columns + places[other]]
        places[node] = np.argmin(costs)
