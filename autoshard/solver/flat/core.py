"""Large problems as flat arrays for numba's loops: before, during and after exact presolve.

`Arena` is the working memory of presolve: nodes are removed from it and edges are added to it. `Core` is the problem
that is left, with the presolves that made it. `CoreArrays` are its records, with the edges and memory items of every
node side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.chains import ChainGraph, link_halves, starts
from autoshard.solver.jit import jit_inner
from autoshard.solver.problem import Array, IntArray, Moments, Problem


@dataclass(frozen=True, slots=True, eq=False)
class PresolveStage:
    """One presolve: a map from choices for the remaining nodes to choices for all nodes before it.

    Attributes:
        nodes: number of nodes before.
        kept: per remaining node, its number before.
        starts: per remaining node, the start of its row of `labels`.
        labels: per remaining strategy, its number before among those of its node.
        sizes: per node before, its number of strategies.
        removed: rows (node, neighbour, neighbour, start in `choice`) in order of removal; -1 for no neighbour.
        choice: best strategies of removed nodes by those of the neighbours.
    """

    nodes: int
    kept: IntArray
    starts: IntArray
    labels: IntArray
    sizes: IntArray
    removed: IntArray
    choice: IntArray

    def expand(self, places: IntArray) -> IntArray:
        """Return the choice for the nodes before the presolve."""
        full = np.zeros(self.nodes, dtype=np.int64)
        full[self.kept] = self.labels[self.starts[: len(self.kept)] + places]
        # Single entries of lists are read several times faster than those of arrays.
        result = full.tolist()
        sizes, choice = self.sizes.tolist(), self.choice
        # In reverse: a node's neighbours at its removal were removed later, or remain.
        for node, first, second, begin in self.removed[::-1].tolist():
            place = begin
            if first >= 0:
                place += result[first] * (sizes[second] if second >= 0 else 1)
            if second >= 0:
                place += result[second]
            result[node] = int(choice[place])
        return np.array(result, dtype=np.int64)

    def contract(self, places: IntArray) -> IntArray:
        """Return a choice for the remaining nodes; the first strategy where the chosen one was dropped."""
        lengths = np.diff(self.starts[: len(self.kept) + 1])
        owner = np.repeat(np.arange(len(self.kept)), lengths)
        same = self.labels == places[self.kept][owner]
        result = np.zeros(len(self.kept), dtype=np.int64)
        result[owner[same]] = (np.arange(len(owner)) - self.starts[owner])[same]
        return result


@dataclass(slots=True, eq=False)
class Core:
    """One choice per node, costs on nodes and edges, memory items over moments; everything in flat arrays.

    Attributes:
        size: strategies per node.
        offset: start of each node's strategies in `cost` and `usage` columns; one entry more than there are nodes.
        cost: costs of all strategies.
        ends: [edges, 2] nodes of rows and columns.
        start: start of each edge's table in `table`, row-major; one entry more than there are edges.
        table: all edge tables.
        item_node, low, high: per memory item its node and the moments [low, high) of its life.
        usage_start: start of an item's usages in `usage`, one per strategy of the node.
        usage: bytes.
        base: per moment the memory used under any choice.
        limit: bytes at each moment; `inf` for none.
        constant: cost added to every assignment.
        moment: per moment its number among those of the problem.
        stages: the presolves so far, in order.
        feasible: False where some node has no strategy left, or the least usage exceeds the limit.
    """

    size: IntArray
    offset: IntArray
    cost: Array
    ends: IntArray
    start: IntArray
    table: Array
    item_node: IntArray
    low: IntArray
    high: IntArray
    usage_start: IntArray
    usage: Array
    base: Array
    limit: float
    moment: IntArray
    constant: float = 0.0
    stages: tuple[PresolveStage, ...] = field(default=())
    feasible: bool = True

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.size)

    @classmethod
    def of(cls, problem: Problem) -> Core:
        """Return the problem in flat arrays; moments are those with maximal sets of live nodes."""
        size = np.array([len(vector) for vector in problem.costs], dtype=np.int64)
        ends = np.array([(edge.source, edge.target) for edge in problem.edges], dtype=np.int64).reshape(-1, 2)
        tables = [edge.costs.ravel() for edge in problem.edges]
        limited = problem.limit is not None and problem.usages is not None
        # Without a limit there are no moments, and memory costs nothing in any loop.
        moments = Moments.of(problem) if limited else None
        live = np.flatnonzero(moments.first < moments.last) if moments else np.zeros(0, dtype=np.int64)
        usages = [problem.usages[node] for node in live] if problem.usages is not None else []
        return cls(
            size=size,
            offset=starts(size),
            cost=np.concatenate(problem.costs) if len(size) else np.zeros(0),
            ends=ends,
            start=starts(np.array([table.size for table in tables], dtype=np.int64)),
            table=np.concatenate(tables) if tables else np.zeros(0),
            item_node=live,
            low=moments.first[live] if moments else live,
            high=moments.last[live] if moments else live,
            usage_start=starts(size[live])[:-1],
            usage=np.concatenate(usages) if usages else np.zeros(0),
            base=np.zeros(moments.count if moments else 0),
            limit=moments.limit if moments else float("inf"),
            moment=np.arange(moments.count if moments else 0),
        )

    def expand(self, places: IntArray) -> IntArray:
        """Return the choice for the problem's nodes that a choice for the core's stands for."""
        for stage in reversed(self.stages):
            places = stage.expand(places)
        return places

    def value(self, places: IntArray) -> float:
        """Return the cost of a choice, the constant included."""
        total = float(self.cost[self.offset[:-1] + places].sum())
        if len(self.ends):
            source, target = self.ends.T
            total += float(self.table[self.start[:-1] + places[source] * self.size[target] + places[target]].sum())
        return total + self.constant

    def loads(self, places: IntArray) -> Array:
        """Return the bytes in use at each moment."""
        usages = self.usage[self.usage_start + places[self.item_node]] if len(self.low) else np.zeros(0)
        change = np.zeros(len(self.base) + 1)
        np.add.at(change, self.low, usages)
        np.subtract.at(change, self.high, usages)
        return self.base + np.cumsum(change)[:-1]

    @property
    def slack(self) -> float:
        """The limit plus the rounding of float sums."""
        return self.limit + 5e-13 * abs(self.limit)

    @property
    def cells(self) -> int:
        """Entries of all edge tables."""
        return len(self.table)


CORE_ITEM = np.dtype([(name, np.int64) for name in ("low", "high", "start")], align=True)


class CoreArrays(NamedTuple):
    """The arrays of a `Core`, sorted by node.

    Attributes:
        nodes: per node its number of strategies, the start of its strategies in `cost`, of its half-edges in `around`
            and of its items in `items`; one record more than there are nodes.
        around: half-edges, sorted by node, as in `ChainGraph`.
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
        nodes, around, places = link_halves(core.size, core.ends)
        nodes["items"] = starts(np.bincount(core.item_node, minlength=core.nodes))
        owner = np.repeat(np.arange(core.nodes), np.diff(nodes["around"]))
        around["table"] = starts(core.size[owner] * core.size[around["neighbour"]])[:-1]
        items = np.zeros(len(core.low), dtype=CORE_ITEM)
        items["low"], items["high"], items["start"] = core.low, core.high, core.usage_start
        # Twice the memory, so that loops read rows in sequence from either end.
        table = np.empty(2 * core.cells)
        begins = around["table"][places].tolist()
        shapes = core.size[core.ends].tolist()
        for edge, ((rows, columns), (forward, backward)) in enumerate(zip(shapes, begins, strict=True)):
            cells = core.table[core.start[edge] : core.start[edge + 1]]
            table[forward : forward + len(cells)] = cells
            table[backward : backward + len(cells)] = cells.reshape(rows, columns).T.ravel()
        return cls(nodes, around, items, core.cost, table, core.usage, core.slack - core.base)

    @property
    def graph(self) -> ChainGraph:
        """The nodes and edges."""
        return ChainGraph(self.nodes, self.around, self.table)


OFFSET, WORK = 0, 1
"""Places in `Arena.numbers`: the cost decided so far; the work so far, in table entries read."""

EDGES, CELLS, ITEMS, USED, REMOVED, MAPPED, FAILED, FULL = range(8)
"""Places in `Arena.counts`: the used length of each array; 1 once a node has lost its last strategy; 1 once an array
was too short."""

FIRST_EDGE, WAITING_EDGES, FIRST_NODE, WAITING_NODES = range(8, 12)
"""Places in `Arena.counts`: the starts of the rings of waiting edges and nodes, and the numbers that wait."""

ARENA_NODE = np.dtype(
    [
        *((name, np.int64) for name in ("size", "offset", "head", "degree", "first_item", "waiting")),
        *((name, np.bool_) for name in ("gone", "stale", "queued")),
    ],
    align=True,
)
ARENA_HALF = np.dtype([(name, np.int64) for name in ("end", "after", "before")], align=True)
ARENA_EDGE = np.dtype(
    [("start", np.int64), ("waiting", np.int64), ("dropped", np.bool_), ("queued", np.bool_)], align=True
)
ARENA_ITEM = np.dtype([(name, np.int64) for name in ("low", "high", "start", "following")], align=True)
"""Records rather than an array per field: numba compiles more code for every array that a loop is given."""


class Arena(NamedTuple):
    """A graph, in arrays that numba's loops change in place. A strategy is gone when its cost is infinite.

    Half-edge 2e stands at the node of the rows of edge e, 2e + 1 at that of the columns.

    Attributes:
        nodes: per node its number of strategies, the start of its costs in `cost`, its first half-edge (-1: none), its
            degree, its first memory item (-1: none), `gone` if it was removed, and `stale` if its items may have become
            constant.
        halves: per half-edge its node, and the half-edges after and before it in the list of that node.
        edges: per edge the start of its table in `table`, row-major over all strategies of its ends, and `dropped` if
            it was removed.
        items: per memory item the moments [low, high), the start of its usages in `usage`, and the next item of its
            node.
        cost: costs of the strategies of all nodes.
        table: all tables.
        usage: all items' usages, one per strategy of the node.
        base: changes of the memory that is used under any choice (a difference array over moments).
        removed: rows (node, neighbour or -1, neighbour or -1, start in `choice`) in order of removal.
        choice: best strategies of removed nodes, by the strategies of those neighbours.
        numbers, counts: see the constants above.

    The fields `waiting` of all nodes form a ring buffer of queued nodes; `queued` is True for its members. Likewise for
    edges.
    """

    nodes: Any
    halves: Any
    edges: Any
    items: Any
    cost: Any
    table: Any
    usage: Any
    base: Any
    removed: Any
    choice: Any
    numbers: Any
    counts: Any


@jit_inner
def push_edge(arena, edge):  # type: ignore[no-untyped-def]
    """Queue an edge, unless it is queued or dropped."""
    if not arena.edges[edge].queued and not arena.edges[edge].dropped:
        arena.edges[edge].queued = True
        # An edge waits at most once, so a ring as long as the array of edges is never full.
        place = (arena.counts[FIRST_EDGE] + arena.counts[WAITING_EDGES]) % len(arena.edges)
        arena.edges[place].waiting = edge
        arena.counts[WAITING_EDGES] += 1


@jit_inner
def push_node(arena, node):  # type: ignore[no-untyped-def]
    """Queue a node, unless it is queued or removed."""
    if not arena.nodes[node].queued and not arena.nodes[node].gone:
        arena.nodes[node].queued = True
        place = (arena.counts[FIRST_NODE] + arena.counts[WAITING_NODES]) % len(arena.nodes)
        arena.nodes[place].waiting = node
        arena.counts[WAITING_NODES] += 1


@jit_inner
def pop_edge(arena):  # type: ignore[no-untyped-def]
    """Return the next queued edge, -1 if there is none."""
    if arena.counts[WAITING_EDGES] == 0:
        return -1
    edge = arena.edges[arena.counts[FIRST_EDGE]].waiting
    arena.counts[FIRST_EDGE] = (arena.counts[FIRST_EDGE] + 1) % len(arena.edges)
    arena.counts[WAITING_EDGES] -= 1
    arena.edges[edge].queued = False
    return edge


@jit_inner
def pop_node(arena):  # type: ignore[no-untyped-def]
    """Return the next queued node, -1 if there is none."""
    if arena.counts[WAITING_NODES] == 0:
        return -1
    node = arena.nodes[arena.counts[FIRST_NODE]].waiting
    arena.counts[FIRST_NODE] = (arena.counts[FIRST_NODE] + 1) % len(arena.nodes)
    arena.counts[WAITING_NODES] -= 1
    arena.nodes[node].queued = False
    return node


@jit_inner
def link(arena, half):  # type: ignore[no-untyped-def]
    """Insert a half-edge at the head of the list of its node."""
    node = arena.halves[half].end
    following = arena.nodes[node].head
    arena.halves[half].after = following
    arena.halves[half].before = -1
    if following >= 0:
        arena.halves[following].before = half
    arena.nodes[node].head = half
    arena.nodes[node].degree += 1


@jit_inner
def unlink(arena, half):  # type: ignore[no-untyped-def]
    """Remove a half-edge from the list of its node."""
    node = arena.halves[half].end
    previous, following = arena.halves[half].before, arena.halves[half].after
    if previous >= 0:
        arena.halves[previous].after = following
    else:
        arena.nodes[node].head = following
    if following >= 0:
        arena.halves[following].before = previous
    arena.nodes[node].degree -= 1


@jit_inner
def drop_edge(arena, edge):  # type: ignore[no-untyped-def]
    """Remove an edge; its table stays where it is."""
    unlink(arena, 2 * edge)
    unlink(arena, 2 * edge + 1)
    arena.edges[edge].dropped = True


@jit_inner
def find_edge(arena, source, target):  # type: ignore[no-untyped-def]
    """Return the half-edge at `source` of the edge between two nodes, -1 if there is none."""
    # A hub may have thousands of edges: the list of the end with fewer is searched.
    near, far = (source, target) if arena.nodes[source].degree <= arena.nodes[target].degree else (target, source)
    half = arena.nodes[near].head
    while half >= 0:
        arena.numbers[WORK] += 1
        if arena.halves[half ^ 1].end == far:
            # The two half-edges of an edge differ in their last bit.
            return half if near == source else half ^ 1
        half = arena.halves[half].after
    return -1


@jit_inner
def new_edge(arena, source, target):  # type: ignore[no-untyped-def]
    """Add an edge with a table of zeros, `source` at its rows, and return it; the caller has checked the room."""
    edge = arena.counts[EDGES]
    arena.counts[EDGES] += 1
    arena.halves[2 * edge].end = source
    arena.halves[2 * edge + 1].end = target
    arena.edges[edge].start = arena.counts[CELLS]
    cells = arena.nodes[source].size * arena.nodes[target].size
    arena.table[arena.counts[CELLS] : arena.counts[CELLS] + cells] = 0.0
    arena.counts[CELLS] += cells
    arena.edges[edge].dropped = False
    arena.edges[edge].queued = False
    link(arena, 2 * edge)
    link(arena, 2 * edge + 1)
    return edge


@jit_inner
def strides(arena, half):  # type: ignore[no-untyped-def]
    """Return the start of a half-edge's table, and the strides over the strategies of its node and of the other one."""
    edge = half >> 1
    columns = arena.nodes[arena.halves[2 * edge + 1].end].size
    # From the columns' end, the table is read transposed.
    if half & 1:
        return arena.edges[edge].start, 1, columns
    return arena.edges[edge].start, columns, 1
