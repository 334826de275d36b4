"""A core as numba's loops want it: arrays only, with lists of edges and items by node."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.flat.core import Core, starts


class View(NamedTuple):
    """The arrays of a `Core`, and what follows from them.

    Attributes:
        size, offset, cost, ends, start, table, low, high, usage_start, usage: as in `Core`.
        first_half: per node where its half-edges start in `halves`; one longer than there are nodes.
        halves: half-edges by node: 2e at the rows of edge e, 2e + 1 at its columns.
        first_item: per node where its items start; items are sorted by node; one longer than there are nodes.
        room: per moment the limit less what is used whatever is chosen.
    """

    size: Any
    offset: Any
    cost: Any
    ends: Any
    start: Any
    table: Any
    low: Any
    high: Any
    usage_start: Any
    usage: Any
    first_half: Any
    halves: Any
    first_item: Any
    room: Any

    @classmethod
    def of(cls, core: Core) -> View:
        """The view of a core that `presolve` made."""
        owner = core.ends.ravel()
        assert (np.diff(core.item_node) >= 0).all()
        return cls(
            core.size,
            core.offset[:-1],
            core.cost,
            core.ends,
            core.start[:-1],
            core.table,
            core.low,
            core.high,
            core.usage_start,
            core.usage,
            starts(np.bincount(owner, minlength=core.nodes)),
            np.argsort(owner, kind="stable"),
            starts(np.bincount(core.item_node, minlength=core.nodes)),
            core.slack - core.base,
        )
