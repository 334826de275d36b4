"""Exact presolve: from a problem of tens of thousands of nodes to a core of hundreds or thousands.

The memory constraints are reduced first: redundant moments and items go, and strategies that exceed the limit alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.solver.chains import starts
from autoshard.solver.flat.core import (
    ARENA_EDGE,
    ARENA_HALF,
    ARENA_ITEM,
    ARENA_NODE,
    CELLS,
    EDGES,
    FAILED,
    FIRST_EDGE,
    FULL,
    MAPPED,
    OFFSET,
    REMOVED,
    USED,
    WORK,
    Arena,
    Core,
    PresolveStage,
)
from autoshard.solver.flat.dominance import process_queues
from autoshard.solver.flat.rules import link_arena
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.solver_budget import UNLIMITED, Budget

Mask = npt.NDArray[np.bool_]


def thin_memory(core: Core) -> Core:
    """Return the core without moments that cannot bind or that another one implies, and without items of no moment."""
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
    # Between two moments at which items begin or end, the one with the largest base stands for all.
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
    """Return the moments that no neighbouring moment implies: one that has all of its items and at least its base."""
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
        # Two neighbours may imply each other: one of them must stay.
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


_PASSES = 6
"""Passes over all nodes for dominated strategies."""

_MOST_WORK = 5e9
"""Table entries read after which the search for dominated strategies ends."""

_WORTH = 0.02
"""Share of the strategies that a pass must drop to be worth another one."""


def presolve(core: Core, *, upper: float = float("inf"), budget: Budget = UNLIMITED) -> Core:
    """Return an equivalent smaller core.

    Unsupported strategies are dropped, edges normalised (dropped where they are zero), nodes of one strategy and those
    that a neighbour determines merged into their neighbours with their memory, nodes that use no memory eliminated up
    to degree two, dominated strategies and pairs dropped, and redundant moments removed.

    Args:
        core: left as it is.
        upper: cost of a known assignment; assignments of that cost may be lost. Costs of `core` must then be at least
            zero, as they are after a `presolve`.
        budget: the search for dominated strategies ends with it.

    Source: Goldstein's criterion for dead ends, R. F. Goldstein, "Efficient rotamer elimination applied to protein
    side-chains and related spin glasses", 1994; on pairs, I. Lasters and J. Desmet, 1993.
    """
    core = forbid_oversized(thin_memory(core))
    while core.feasible:
        core = thin_memory(_apply_rules(core, upper, budget))
        fitting = forbid_oversized(core)
        if fitting is core:
            break
        core = fitting
    return core


def _apply_rules(core: Core, upper: float, budget: Budget) -> Core:
    """Apply every exact step to the nodes and edges of a core."""
    arena, work = _build_arena(core), min(_MOST_WORK, budget.work)
    # Cheap rules alone first: dominance, quadratic in the strategies, should see a small core.
    arena = _run_with_room(arena, lambda room: process_queues(room, upper, 0, False, work))
    alive = np.isfinite(arena.cost).sum()
    for attempt in range(_PASSES):
        if arena.counts[FAILED] or arena.numbers[WORK] > work or budget.is_over:
            break
        dropped = [0]

        def search(room: Arena, dropped: list[int] = dropped, pairs: bool = attempt > 0) -> None:
            dropped[0] += process_queues(room, upper, core.nodes, pairs, work)

        arena = _run_with_room(arena, search)
        # Pairs are searched from the second pass on, so the first one alone says nothing about the next.
        if attempt and dropped[0] < _WORTH * alive:
            break
    budget.spend(arena.numbers[WORK])
    return _compact(arena, core)


def _build_arena(core: Core) -> Arena:
    # Room to grow, so that most presolves need no longer arrays.
    count, cells = len(core.ends), 2 * core.cells + 4096
    arena = Arena(
        nodes=np.zeros(core.nodes, dtype=ARENA_NODE),
        halves=np.zeros(2 * (2 * count + 16), dtype=ARENA_HALF),
        edges=np.zeros(2 * count + 16, dtype=ARENA_EDGE),
        items=np.zeros(len(core.low), dtype=ARENA_ITEM),
        cost=core.cost.copy(),
        table=_lengthen(core.table, cells),
        usage=_lengthen(core.usage, 2 * len(core.usage) + 4096),
        base=np.zeros(len(core.base) + 1),
        removed=np.zeros((core.nodes, 4), dtype=np.int64),
        choice=np.zeros(4 * len(core.cost) + 4096, dtype=np.int64),
        numbers=np.array([core.constant, 0.0]),
        counts=np.zeros(12, dtype=np.int64),
    )
    nodes, edges, items = arena.nodes, arena.edges, arena.items
    nodes["size"], nodes["offset"] = core.size, core.offset[:-1]
    nodes["head"] = nodes["first_item"] = -1
    nodes["stale"] = True
    arena.halves["end"][: 2 * count] = core.ends.ravel()
    edges["start"][:count] = core.start[:-1]
    items["low"], items["high"], items["start"] = core.low, core.high, core.usage_start
    arena.counts[EDGES], arena.counts[CELLS], arena.counts[USED] = count, core.cells, len(core.usage)
    link_arena(arena, np.ascontiguousarray(core.item_node))
    return arena


def _lengthen(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    result = np.zeros(max(length, len(array)), dtype=array.dtype)
    result[: len(array)] = array
    return result


_GROWING = {"table": CELLS, "usage": USED, "choice": MAPPED}


def _run_with_room(arena: Arena, step: Callable[[Arena], object]) -> Arena:
    """Run a step, again with longer arrays as long as one is too short."""
    while True:
        arena.counts[FULL] = 0
        step(arena)
        if not arena.counts[FULL]:
            return arena
        # Doubled, so that the copies together cost no more than the final arrays.
        grown = {name: _lengthen(getattr(arena, name), 2 * len(getattr(arena, name))) for name in _GROWING}
        edges = len(arena.edges)
        if arena.counts[EDGES] * 2 > edges:
            # The ring of waiting edges begins at 0 again: it would not be one where it wrapped round.
            arena.edges["waiting"] = np.roll(arena.edges["waiting"], -int(arena.counts[FIRST_EDGE]))
            arena.counts[FIRST_EDGE] = 0
            grown["edges"] = _lengthen(arena.edges, 2 * edges)
            grown["halves"] = _lengthen(arena.halves, 4 * edges)
        arena = arena._replace(**grown)


def _compact(arena: Arena, core: Core) -> Core:
    """Return the remaining nodes without gaps, with a stage that expands their choices."""
    gone = arena.nodes["gone"]
    kept = np.flatnonzero(~gone)
    alive = np.isfinite(arena.cost)
    owner = np.repeat(np.arange(core.nodes), core.size)
    remaining = alive & ~gone[owner]
    labels = np.flatnonzero(remaining) - np.repeat(core.offset[:-1], core.size)[remaining]
    size = np.bincount(owner[remaining], minlength=core.nodes)[kept]
    number = np.full(core.nodes, -1)
    number[kept] = np.arange(len(kept))
    count = int(arena.counts[EDGES])
    edges = np.flatnonzero(~arena.edges["dropped"][:count])
    ends = arena.halves["end"][: 2 * count].reshape(-1, 2)[edges]
    offset = starts(size)
    removed = int(arena.counts[REMOVED])
    stage = PresolveStage(
        core.nodes,
        kept,
        offset,
        labels,
        core.size,
        arena.removed[:removed].copy(),
        arena.choice[: int(arena.counts[MAPPED])].copy(),
    )
    new_ends = number[ends]
    places = [labels[offset[node] : offset[node + 1]] for node in range(len(kept))]
    tables, first_cell = [], arena.edges["start"].tolist()
    for edge, (source, target), (row, column) in zip(edges.tolist(), ends.tolist(), new_ends.tolist(), strict=True):
        cells = core.size[source] * core.size[target]
        first = first_cell[edge]
        table = arena.table[first : first + cells].reshape(core.size[source], core.size[target])
        tables.append(table[places[row][:, None], places[column]].ravel())
    item_node, items = [], []
    following, used = arena.items["following"].tolist(), arena.items["start"].tolist()
    for node, first in zip(kept.tolist(), arena.nodes["first_item"][kept].tolist(), strict=True):
        item = first
        while item >= 0:
            item_node.append(int(number[node]))
            items.append(item)
            item = following[item]
    usages = [arena.usage[used[item] + places[node]] for node, item in zip(item_node, items, strict=True)]
    nodes = np.array(item_node, dtype=np.int64)
    rows = np.array(items, dtype=np.int64)
    return Core(
        size=size,
        offset=offset,
        cost=arena.cost[remaining],
        ends=new_ends.reshape(-1, 2),
        start=starts(np.array([table.size for table in tables], dtype=np.int64)),
        table=np.concatenate(tables) if tables else np.zeros(0),
        item_node=nodes,
        low=arena.items["low"][rows],
        high=arena.items["high"][rows],
        usage_start=starts(size[nodes])[:-1],
        usage=np.concatenate(usages) if usages else np.zeros(0),
        base=core.base + np.cumsum(arena.base)[:-1],
        limit=core.limit,
        moment=core.moment,
        constant=float(arena.numbers[OFFSET]),
        stages=(*core.stages, stage),
        feasible=core.feasible and not arena.counts[FAILED],
    )
