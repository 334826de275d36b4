"""A core as few arrays of records for numba's loops, with the edges and memory items of every node side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.flat.core import Core, starts

CORE_NODE = np.dtype([(name, np.int64) for name in ("size", "offset", "around", "items")], align=True)
CORE_HALF = np.dtype([(name, np.int64) for name in ("neighbour", "table", "message", "reverse")], align=True)
CORE_ITEM = np.dtype([(name, np.int64) for name in ("low", "high", "start")], align=True)


class CoreArrays(NamedTuple):
    """The arrays of a `Core`, sorted by node.

    Attributes:
        nodes: per node its number of strategies, the start of its strategies in `cost`, of its half-edges in `around`
            and of its items in `items`; one record more than there are nodes.
        around: half-edges, sorted by node: the node at the other end, the start of the table in `table`, the start of
            the message to the node along this edge, and the half-edge of the same edge at the other end.
        items: memory items, sorted by node: the moments [low, high), and the start of the usages in `usage`.
        cost: as in `Core`.
        table: every edge's table twice, row-major, with the strategies of the half-edge's node as rows.
        usage: as in `Core`.
        room: per moment the limit less the memory used under any choice.
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
        """Return the arrays of a core after `presolve`, which sorts items by node."""
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
        around["neighbour"] = opposite[order]
        around["table"] = starts(core.size[owner[order]] * core.size[opposite[order]])[:-1]
        around["message"] = starts(core.size[owner[order]])[:-1]
        # Ends 2e and 2e + 1 belong to one edge.
        around["reverse"] = place[order ^ 1]
        items = np.zeros(len(core.low), dtype=CORE_ITEM)
        items["low"], items["high"], items["start"] = core.low, core.high, core.usage_start
        # Twice the memory, so that loops read rows in sequence from either end.
        table = np.empty(2 * core.cells)
        begins = around["table"][place].reshape(-1, 2).tolist()
        shapes = core.size[core.ends].tolist()
        for edge, ((rows, columns), (forward, backward)) in enumerate(zip(shapes, begins, strict=True)):
            cells = core.table[core.start[edge] : core.start[edge + 1]]
            table[forward : forward + len(cells)] = cells
            table[backward : backward + len(cells)] = cells.reshape(rows, columns).T.ravel()
        return cls(nodes, around, items, core.cost, table, core.usage, core.slack - core.base)
