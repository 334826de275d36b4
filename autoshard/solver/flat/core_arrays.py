"""A core as numba's loops want it: few arrays, of records, with every node's edges and memory items side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.flat.core import Core, starts

CORE_NODE = np.dtype([(name, np.int64) for name in ("size", "offset", "around", "items")], align=True)
CORE_HALF = np.dtype([(name, np.int64) for name in ("other", "table", "told", "back")], align=True)
CORE_ITEM = np.dtype([(name, np.int64) for name in ("low", "high", "start")], align=True)


class CoreArrays(NamedTuple):
    """The arrays of a `Core`, and what follows from them.

    Attributes:
        nodes: per node its number of strategies, and where its strategies start in `cost`, its half-edges in `around`,
            its items in `items`; one record more than there are nodes.
        around: half-edges, sorted by node: the node at the other end, where the table starts in `table`, where messages
            to the node along this edge start, and which half-edge is the same edge seen from the other end.
        items: memory items, sorted by node: the moments [low, high), and where the usages start in `usage`.
        cost: as in `Core`.
        table: every edge's table twice, row-major, the rows being the strategies of the half-edge's own node.
        usage: as in `Core`.
        room: per moment the limit less what is used whatever is chosen.
    """

    nodes: Any
    around: Any
    items: Any
    cost: Any
    table: Any
    usage: Any
    room: Any

    @classmethod
    def of(cls, core: Core) -> CoreArrays:
        """The view of a core that `presolve` made."""
        assert (np.diff(core.item_node) >= 0).all()
        owner = core.ends.ravel()
        order = np.argsort(owner, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        opposite = owner.reshape(-1, 2)[:, ::-1].ravel()
        nodes = np.zeros(core.nodes + 1, dtype=CORE_NODE)
        nodes["size"][:-1] = core.size
        nodes["offset"] = core.offset
        nodes["around"] = starts(np.bincount(owner, minlength=core.nodes))
        nodes["items"] = starts(np.bincount(core.item_node, minlength=core.nodes))
        around = np.zeros(len(owner), dtype=CORE_HALF)
        around["other"] = opposite[order]
        around["table"] = starts(core.size[owner[order]] * core.size[opposite[order]])[:-1]
        around["told"] = starts(core.size[owner[order]])[:-1]
        around["back"] = place[order ^ 1]
        items = np.zeros(len(core.low), dtype=CORE_ITEM)
        items["low"], items["high"], items["start"] = core.low, core.high, core.usage_start
        table = np.empty(2 * core.cells)
        begins = around["table"][place].reshape(-1, 2).tolist()
        shapes = core.size[core.ends].tolist()
        for edge, ((rows, columns), (one, other)) in enumerate(zip(shapes, begins, strict=True)):
            cells = core.table[core.start[edge] : core.start[edge + 1]]
            table[one : one + len(cells)] = cells
            table[other : other + len(cells)] = cells.reshape(rows, columns).T.ravel()
        return cls(nodes, around, items, core.cost, table, core.usage, core.slack - core.base)
