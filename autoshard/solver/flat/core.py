"""A problem in flat arrays, and the presolves that made it smaller."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.memory_moments import Moments
from autoshard.solver.problem import Array, IntArray, Problem


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
        work: table entries read by the last presolve.
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
    work: int = 0

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


def starts(lengths: IntArray) -> IntArray:
    """Return the starts of rows of these lengths, and the end of the last one."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
