"""The rules of presolve, applied to a core until none of them applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.solver.core import Core
from autoshard.solver.flat.arena import (
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
)
from autoshard.solver.flat.dominance import process_queues
from autoshard.solver.flat.rules import link_arena
from autoshard.solver.solver_budget import Budget

_PASSES = 6
"""Passes over all nodes for dominated strategies."""

_MOST_WORK = 5e9
"""Table entries read after which the search for dominated strategies ends."""

_WORTH = 0.02
"""Share of the strategies that a pass must drop to be worth another one."""


def apply_rules(core: Core, effort: int, upper: float, budget: Budget) -> Core:
    """Apply every exact step to the nodes and edges of a core; see `presolve`."""
    arena, work = _build_arena(core), min(_MOST_WORK, budget.work)
    # Only cheap rules first: dominance is quadratic in the strategies, so it should get a small core.
    arena = _run_with_room(arena, lambda room: process_queues(room, upper, 0, False, work))
    alive = np.isfinite(arena.cost).sum()
    for attempt in range(_PASSES if effort else 0):
        if arena.counts[FAILED] or arena.numbers[WORK] > work or budget.is_over:
            break
        dropped = [0]
        # Pairs are searched from the second pass on, so the first one does not predict the next.
        pairs = effort > 1 and attempt > 0

        def search(room: Arena, dropped: list[int] = dropped, pairs: bool = pairs) -> None:
            dropped[0] += process_queues(room, upper, core.nodes, pairs, work)

        arena = _run_with_room(arena, search)
        if (pairs or effort == 1) and dropped[0] < _WORTH * alive:
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
        counts=np.zeros(11, dtype=np.int64),
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


def _run_with_room(arena: Arena, step: Callable[[Arena], object]) -> Arena:
    """Run a step, and rerun it with longer arrays while one is too short."""
    while True:
        arena.counts[FULL] = 0
        step(arena)
        full = int(arena.counts[FULL])
        if not full:
            return arena
        if full & 1:
            # Rotate the ring buffer of queued edges to start at 0, since it may wrap around the old end.
            arena.edges["waiting"] = np.roll(arena.edges["waiting"], -int(arena.counts[FIRST_EDGE]))
            arena.counts[FIRST_EDGE] = 0
        short = [(1, "edges"), (1, "halves"), (2, "table"), (4, "usage"), (8, "choice")]
        # Doubled, so that the copies together cost no more than the final arrays.
        longer = {
            name: _lengthen(getattr(arena, name), 2 * len(getattr(arena, name))) for bit, name in short if full & bit
        }
        arena = arena._replace(**longer)


def _compact(arena: Arena, core: Core) -> Core:
    """Return the remaining nodes without gaps, with a stage that expands their choices."""
    count, removed = int(arena.counts[EDGES]), int(arena.counts[REMOVED])
    edges = np.flatnonzero(~arena.edges["dropped"][:count])
    items, item_nodes = [], []
    following, gone = arena.items["following"].tolist(), arena.nodes["gone"]
    for node in np.flatnonzero(~gone).tolist():
        item = int(arena.nodes["first_item"][node])
        while item >= 0:
            items.append(item)
            item_nodes.append(node)
            item = following[item]
    rows = np.array(items, dtype=np.int64)
    remaining = replace(
        core,
        cost=arena.cost,
        ends=arena.halves["end"][: 2 * count].reshape(-1, 2)[edges],
        start=arena.edges["start"][edges],
        table=arena.table,
        item_node=np.array(item_nodes, dtype=np.int64),
        low=arena.items["low"][rows],
        high=arena.items["high"][rows],
        usage_start=arena.items["start"][rows],
        usage=arena.usage,
        base=core.base + np.cumsum(arena.base)[:-1],
        constant=float(arena.numbers[OFFSET]),
        feasible=core.feasible and not arena.counts[FAILED],
    )
    alive = np.isfinite(arena.cost) & ~gone[core.owner]
    return remaining.restrict(alive, arena.removed[:removed].copy(), arena.choice[: int(arena.counts[MAPPED])].copy())
