"""A problem as flat arrays, which presolve shrinks and every method of the solver reads.

A `Core` knows the presolves that made it, and maps choices for its nodes to choices for the problem and back.
`CoreArrays` are its records for compiled loops, with the edges and memory items of every node side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.solver.chains import ChainGraph, link_halves, starts
from autoshard.solver.problem import Array, Edge, IntArray, Moments, Problem

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PresolveStage:
    """One presolve: a map from choices for the remaining nodes to choices for all nodes before it.

    Attributes:
        nodes: number of nodes before.
        kept: per remaining node, its former number.
        starts: per remaining node, the start of its row of `labels`.
        labels: per remaining strategy, its former number among those of its node.
        sizes: per former node, its number of strategies.
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


_NO_ROWS, _NO_CHOICES = np.zeros((0, 4), dtype=np.int64), np.zeros(0, dtype=np.int64)


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
        moment: per moment its number in the problem.
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
    def of(cls, problem: Problem, *, memory: bool = True) -> Core:
        """Return the problem in flat arrays; moments are those with maximal sets of live nodes.

        Args:
            problem: the problem.
            memory: False to leave its limit out.
        """
        size = np.array([len(vector) for vector in problem.costs], dtype=np.int64)
        ends = np.array([(edge.source, edge.target) for edge in problem.edges], dtype=np.int64).reshape(-1, 2)
        tables = [edge.costs.ravel() for edge in problem.edges]
        limited = memory and problem.limit is not None and problem.usages is not None
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
            limit=problem.limit if moments and problem.limit is not None else float("inf"),
            moment=np.arange(moments.count if moments else 0),
        )

    @property
    def owner(self) -> IntArray:
        """The node of every strategy."""
        return np.repeat(np.arange(self.nodes), self.size)

    @property
    def vectors(self) -> list[Array]:
        """The costs of every node's strategies, as views."""
        return np.split(self.cost, self.offset[1:-1]) if self.nodes else []

    @property
    def tables(self) -> list[Array]:
        """The table of every edge, as views."""
        shapes, begins = self.size[self.ends].tolist(), self.start.tolist()
        return [
            self.table[begin : begin + rows * columns].reshape(rows, columns)
            for begin, (rows, columns) in zip(begins, shapes, strict=False)
        ]

    def neighbours(self) -> dict[int, set[int]]:
        """Return the nodes that share an edge with each node."""
        result: dict[int, set[int]] = {node: set() for node in range(self.nodes)}
        for source, target in self.ends.tolist():
            result[source].add(target)
            result[target].add(source)
        return result

    def to_problem(self, sequence: IntArray | None = None) -> Problem:
        """Return nodes and edges as a problem without memory: nodes in a given order, edges from the earlier one."""
        sequence = np.arange(self.nodes) if sequence is None else sequence
        rank = np.empty(self.nodes, dtype=np.int64)
        rank[sequence] = np.arange(self.nodes)
        # Equal layers have equal tables, and messages process an object once.
        distinct: dict[tuple[tuple[int, ...], bytes], Array] = {}
        edges = []
        for (source, target), table in zip(rank[self.ends].tolist(), self.tables, strict=True):
            first, second, turned = (source, target, table) if source < target else (target, source, table.T)
            shared = distinct.setdefault((turned.shape, turned.tobytes()), turned)
            edges.append(Edge(first, second, shared))
        vectors = self.vectors
        return Problem(tuple(vectors[node] for node in sequence.tolist()), tuple(edges))

    def expand(self, places: IntArray, origin: Core | None = None) -> IntArray:
        """Map a choice back to the problem, or to the core `origin` that this one was made from."""
        for stage in reversed(self.stages[len(origin.stages) if origin else 0 :]):
            places = stage.expand(places)
        return places

    def contract(self, places: IntArray, origin: Core | None = None) -> IntArray:
        """Map a choice for the problem, or for the core `origin`, to this core."""
        for stage in self.stages[len(origin.stages) if origin else 0 :]:
            places = stage.contract(places)
        return places

    def origins(self) -> tuple[IntArray, IntArray]:
        """Return per strategy its node in the problem, and its number there."""
        nodes = self.owner
        strategies = np.arange(len(nodes)) - self.offset[nodes]
        for stage in reversed(self.stages):
            strategies = stage.labels[stage.starts[nodes] + strategies]
            nodes = stage.kept[nodes]
        return nodes, strategies

    def remaining_nodes(self) -> IntArray:
        """Return per node its number in the problem."""
        return self.origins()[0][self.offset[:-1]]

    def forbid(self, strategies: Mask) -> Core:
        """Return the core with some strategies forbidden."""
        return replace(self, cost=np.where(strategies, np.inf, self.cost))

    def restrict(self, alive: Mask, removed: IntArray = _NO_ROWS, choice: IntArray = _NO_CHOICES) -> Core:
        """Return the core with only some strategies; nodes without any are removed.

        Args:
            alive: per strategy True if it stays.
            removed, choice: how choices of removed nodes follow from others, see `PresolveStage`.
        """
        owner = self.owner
        size = np.bincount(owner[alive], minlength=self.nodes)
        kept, labels = np.flatnonzero(size), np.flatnonzero(alive) - self.offset[owner[alive]]
        number = np.cumsum(size > 0) - 1
        begins = starts(size)
        stage = PresolveStage(self.nodes, kept, starts(size[kept]), labels, self.size, removed, choice)
        rows = [labels[low:high] for low, high in pairwise(begins.tolist())]
        whole = (size == self.size).tolist()
        start = starts(size[self.ends].prod(1))
        # Write each part to its final place: on large problems, most time goes to allocation of memory.
        table = np.empty(int(start[-1]))
        for begin, (source, target), old in zip(start.tolist(), self.ends.tolist(), self.tables, strict=False):
            part = old if whole[source] and whole[target] else old[rows[source][:, None], rows[target]]
            table[begin : begin + part.size].reshape(part.shape)[:] = part
        lengths = self.size[self.item_node]
        within = np.arange(int(lengths.sum())) - np.repeat(starts(lengths)[:-1], lengths)
        used = alive[np.repeat(self.offset[self.item_node], lengths) + within]
        return replace(
            self,
            size=size[kept],
            offset=stage.starts,
            cost=self.cost[alive],
            ends=number[self.ends].reshape(-1, 2),
            start=start,
            table=table,
            item_node=number[self.item_node],
            usage_start=starts(size[self.item_node])[:-1],
            usage=self.usage[(np.repeat(self.usage_start, lengths) + within)[used]],
            stages=(*self.stages, stage),
            feasible=self.feasible and len(kept) + len(removed) == self.nodes,
        )

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
            and of its items in `items`; one extra record at the end.
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
        # Both orders, so that loops read rows sequentially from either end.
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
