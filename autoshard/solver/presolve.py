"""Exact presolve: from a problem of tens of thousands of nodes to a core of hundreds or thousands.

Memory constraints are reduced first: redundant moments and items are removed, and strategies that exceed the limit
alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.solver.chains import starts
from autoshard.solver.core import Core, Mask
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.solver_budget import UNLIMITED, Budget


def thin_memory(core: Core) -> Core:
    """Return the core without moments that cannot bind or that others imply, and without items of no moment."""
    count = len(core.base)
    if not core.feasible:
        return core
    if not count:
        return replace(
            core,
            item_node=core.item_node[:0],
            low=core.low[:0],
            high=core.high[:0],
            usage_start=core.usage_start[:0],
            usage=core.usage[:0],
        )
    lengths = core.size[core.item_node]
    least = _reduce_usages(np.minimum, core, lengths)
    most = _reduce_usages(np.maximum, core, lengths)
    base = core.base + _spread(core, least, count)
    usage = core.usage - np.repeat(least, lengths)
    feasible = core.feasible and bool((base <= core.slack).all())
    # A moment at which even the largest usages fit can never bind.
    keep = base + _spread(core, most - least, count) > core.slack
    # Of the moments between two ends of items, the one with the largest base implies the others.
    moving = most > least
    changes = np.zeros(count + 1, dtype=bool)
    changes[core.low[moving]] = changes[core.high[moving]] = True
    group = np.cumsum(changes[:-1])
    best = np.full(int(group.max()) + 1, -np.inf)
    np.maximum.at(best, group[keep], base[keep])
    first = np.full(len(best), count)
    chosen = keep & (base == best[group])
    np.minimum.at(first, group[chosen], np.flatnonzero(chosen))
    keep = np.zeros(count, dtype=bool)
    keep[first[first < count]] = True
    keep = _maximal_moments(core, keep, moving, base)
    place = np.concatenate([[0], np.cumsum(keep)])
    low, high = place[core.low], place[core.high]
    rows = np.flatnonzero(moving & (low < high))
    return _with_items(replace(core, moment=core.moment[keep]), rows, low, high, usage, base[keep], feasible)


def forbid_oversized(core: Core) -> Core:
    """Return the core without strategies that exceed the limit alone; the same core if there are none."""
    if not core.feasible or not len(core.low):
        return core
    # The largest base while each item is held: between every second pair of ends.
    ends = np.stack([core.low, core.high], 1).ravel()
    base = np.maximum.reduceat(np.append(core.base, -np.inf), ends)[::2]
    lengths = core.size[core.item_node]
    within = np.arange(len(core.usage)) - np.repeat(core.usage_start, lengths)
    strategy = np.repeat(core.offset[core.item_node], lengths) + within
    large = strategy[core.usage + np.repeat(base, lengths) > core.slack]
    large = large[np.isfinite(core.cost[large])]
    if not len(large):
        return core
    cost = core.cost.copy()
    cost[large] = np.inf
    return replace(core, cost=cost)


def _maximal_moments(core: Core, keep: Mask, moving: Mask, base: Array) -> Mask:
    """Return the moments that no adjacent moment implies by having all of their items and at least their base."""
    while True:
        kept = np.flatnonzero(keep)
        place = np.concatenate([[0], np.cumsum(keep)])
        low, high = place[core.low[moving]], place[core.high[moving]]
        real = low < high
        born = np.bincount(low[real], minlength=len(kept) + 1)
        died = np.bincount(high[real], minlength=len(kept) + 1)
        if len(kept) < 2:
            return keep
        values = base[kept]
        # Moment i is implied by i + 1 if nothing dies between them, by i - 1 if nothing is born.
        by_next = np.append((died[1:-1] == 0) & (values[:-1] <= values[1:]), False)
        by_previous = np.append(False, (born[1:-1] == 0) & (values[1:] <= values[:-1]))
        implied = by_next | by_previous
        # Two adjacent moments may imply each other: one of them must stay.
        implied[1:] &= ~(implied[:-1] & by_previous[1:])
        if not implied.any():
            return keep
        keep = keep.copy()
        keep[kept[implied]] = False


def _with_items(
    core: Core, rows: IntArray, low: IntArray, high: IntArray, usage: Array, base: Array, feasible: bool
) -> Core:
    """Return the core with some of its items; items of one node over the same moments are added up."""
    key = np.lexsort((high[rows], low[rows], core.item_node[rows]))
    rows = rows[key]
    names = np.stack([core.item_node[rows], low[rows], high[rows]], 1)
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (names[1:] != names[:-1]).any(1)
    group = np.cumsum(new) - 1
    names = names[new]
    lengths = core.size[names[:, 0]]
    begins = starts(lengths)
    total = np.zeros(int(begins[-1]))
    wide = core.size[core.item_node[rows]]
    within = np.arange(int(wide.sum())) - np.repeat(starts(wide)[:-1], wide)
    source = np.repeat(core.usage_start[rows], wide) + within
    target = np.repeat(begins[group], wide) + within
    np.add.at(total, target, usage[source])
    return replace(
        core,
        item_node=names[:, 0],
        low=names[:, 1],
        high=names[:, 2],
        usage_start=begins[:-1],
        usage=total,
        base=base,
        feasible=feasible,
    )


def _reduce_usages(pick: np.ufunc, core: Core, lengths: IntArray) -> Array:
    if not len(lengths):
        return np.zeros(0)
    assert (core.usage_start == starts(lengths)[:-1]).all()
    result: Array = pick.reduceat(core.usage, core.usage_start)
    return result


def _spread(core: Core, usages: Array, count: int) -> Array:
    change = np.zeros(count + 1)
    np.add.at(change, core.low, usages)
    np.subtract.at(change, core.high, usages)
    return np.cumsum(change)[:-1]


FOLD, REDUCE, THOROUGH = range(3)
"""Effort of a presolve: `FOLD` loses no allowed choice; `REDUCE` drops dominated strategies; `THOROUGH` drops dominated
pairs, too, which takes many times as long and is worth it for large problems under a limit."""


def presolve(core: Core, *, effort: int = THOROUGH, upper: float = float("inf"), budget: Budget = UNLIMITED) -> Core:
    """Return an equivalent smaller core.

    Unsupported strategies are dropped, edges normalised (dropped where they are zero), nodes of one strategy and those
    that a neighbour determines merged into their neighbours with their memory, nodes that use no memory eliminated up
    to degree two, dominated strategies and pairs dropped, and redundant moments removed.

    Args:
        core: not changed.
        effort: `FOLD`, `REDUCE` or `THOROUGH`.
        upper: cost of a known assignment; assignments of that cost may be lost. Costs of `core` must then be at least
            zero, as they are after a `presolve`.
        budget: the search for dominated strategies ends with it.

    Source: Goldstein's criterion for dead ends, R. F. Goldstein, "Efficient rotamer elimination applied to protein
    side-chains and related spin glasses", 1994; on pairs, I. Lasters and J. Desmet, 1993.
    """
    # numba takes a second to import, and narrow problems do not need it.
    from autoshard.solver.flat.reduction import apply_rules

    core = forbid_oversized(thin_memory(core))
    while core.feasible:
        core = thin_memory(apply_rules(core, effort, upper, budget))
        fitting = forbid_oversized(core)
        if fitting is core:
            break
        core = fitting
    return core
