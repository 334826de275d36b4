"""A problem in flat arrays, and the steps that made it smaller."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.memory_moments import Moments
from autoshard.solver.problem import Array, IntArray, Problem


@dataclass(frozen=True, slots=True, eq=False)
class PresolveStage:
    """One presolve: how a choice for what was left becomes a choice for what there was.

    Attributes:
        nodes: nodes before.
        kept: per node left, which of those before it was.
        starts: per node left, where its row of `labels` starts.
        labels: per strategy left, which of its node's before it was.
        sizes: strategies per node before.
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
        """The choice before the presolve."""
        full = np.zeros(self.nodes, dtype=np.int64)
        full[self.kept] = self.labels[self.starts[: len(self.kept)] + places]
        result = full.tolist()
        sizes, choice = self.sizes.tolist(), self.choice
        for node, first, second, begin in self.removed[::-1].tolist():
            place = begin
            if first >= 0:
                place += result[first] * (sizes[second] if second >= 0 else 1)
            if second >= 0:
                place += result[second]
            result[node] = int(choice[place])
        return np.array(result, dtype=np.int64)

    def contract(self, places: IntArray) -> IntArray:
        """A choice before the presolve as one for what is left: the first strategy where the node's own one is gone."""
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
        offset: where a node's strategies start in `cost` and `usage` columns; one longer than there are nodes.
        cost: costs of all strategies.
        ends: [edges, 2] nodes of rows and columns.
        start: where an edge's table starts in `table`, row-major; one longer than there are edges.
        table: all edge tables.
        item_node, low, high: per memory item its node and the moments [low, high) at which it is held.
        usage_start: where an item's usages start in `usage`, one per strategy of the node.
        usage: bytes.
        base: per moment what is used whatever is chosen.
        limit: bytes at each moment; `inf` for none.
        constant: cost that every assignment has besides.
        moment: per moment its number among the problem's.
        stages: the presolves so far, the first one first.
        feasible: False where some node has no strategy left, or the least usage passes the limit.
        work: table entries looked at by the last presolve.
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
        """The problem as it stands; moments are those with maximal sets of live nodes."""
        size = np.array([len(vector) for vector in problem.costs], dtype=np.int64)
        ends = np.array([(edge.source, edge.target) for edge in problem.edges], dtype=np.int64).reshape(-1, 2)
        tables = [edge.costs.ravel() for edge in problem.edges]
        limited = problem.limit is not None and problem.usages is not None
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
        """A choice for the core's nodes as a choice for the problem's."""
        for stage in reversed(self.stages):
            places = stage.expand(places)
        return places

    def value(self, places: IntArray) -> float:
        """Cost of a choice, the constant included."""
        total = float(self.cost[self.offset[:-1] + places].sum())
        if len(self.ends):
            one, other = self.ends.T
            total += float(self.table[self.start[:-1] + places[one] * self.size[other] + places[other]].sum())
        return total + self.constant

    def loads(self, places: IntArray) -> Array:
        """Bytes in use at each moment."""
        held = self.usage[self.usage_start + places[self.item_node]] if len(self.low) else np.zeros(0)
        change = np.zeros(len(self.base) + 1)
        np.add.at(change, self.low, held)
        np.subtract.at(change, self.high, held)
        return self.base + np.cumsum(change)[:-1]

    @property
    def slack(self) -> float:
        """The limit, with what the rounding of float sums may add."""
        return self.limit + 5e-13 * abs(self.limit)

    @property
    def cells(self) -> int:
        """Entries of all edge tables."""
        return len(self.table)


def starts(lengths: IntArray) -> IntArray:
    """Where rows of these lengths start, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
