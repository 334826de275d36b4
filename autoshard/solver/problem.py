"""The problem that the solver takes, in the terms of the public IOPDDL contest.

Equal layers of a step share the tables of their edges, with different weights: a `Blend` is a weighted sum of tables.
Message passing sums the parts while it reads them; the sum is computed only for other users. `Moments` are the moments
at which the memory limit can bind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autoshard.errors import AutoshardError

Array = npt.NDArray[np.float64]
Part = tuple[float, Array]
"""A positive factor, and a table."""


@dataclass(eq=False)
class Blend:
    """A weighted sum of tables of one shape.

    Attributes:
        parts: at least one.
    """

    parts: tuple[Part, ...]

    @cached_property
    def costs(self) -> Array:
        """The sum."""
        return np.asarray(sum(factor * table for factor, table in self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of rows and columns."""
        return self.parts[0][1].shape


def blend(parts: Iterable[Part]) -> Blend:
    """Return the sum of weighted tables; the factors of a table that occurs several times are added."""
    factors: dict[int, float] = {}
    tables: dict[int, Array] = {}
    for factor, table in parts:
        tables[id(table)] = table
        factors[id(table)] = factors.get(id(table), 0.0) + factor
    # Fewer parts make message passing faster, since it reads the table of each part.
    return Blend(tuple((factors[key], table) for key, table in tables.items()))


IntArray = npt.NDArray[np.int64]

_ROUNDING = 1e-12
"""Relative slack of the limit: sums of bytes are floats, and a sum equal to the limit must fit."""


class SolverError(AutoshardError, ValueError):
    """A problem is malformed, or the requested method can't solve it."""


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Costs of pairs of strategies of two nodes.

    Attributes:
        source: index of the node of the rows.
        target: index of the node of the columns, another node.
        table: costs [strategies of source, strategies of target], whole or as a sum; `np.inf` forbids a pair. Edges
            with equal costs may (and should) share one object: work is done once per object.
    """

    source: int
    target: int
    table: Array | Blend

    @property
    def costs(self) -> Array:
        """The whole table; a sum is computed once."""
        return self.table.costs if isinstance(self.table, Blend) else self.table

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of strategies of source and target."""
        return self.table.shape

    @property
    def parts(self) -> tuple[Part, ...]:
        """The weighted tables whose sum is the costs."""
        return self.table.parts if isinstance(self.table, Blend) else ((1.0, self.table),)

    def at(self, row: int, column: int) -> float:
        """Return the cost of a pair of strategies."""
        if isinstance(self.table, Blend):
            return float(sum(factor * table[row, column] for factor, table in self.table.parts))
        return float(self.table[row, column])


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One choice per node with the least sum of node and edge costs, within a memory limit at every moment.

    Attributes:
        costs: per node the cost of each strategy (float64, any unit); `np.inf` forbids a strategy.
        edges: tables between pairs of nodes; parallel edges add up.
        usages: per node the bytes that each strategy holds while the node is live; None where there is no limit.
        intervals: per node the half-open life [lo, hi) of its usage; empty (lo >= hi) uses nothing.
        limit: most bytes of the sum over live nodes at any moment; None for no limit.
        components: per node labels [strategies, mesh axes]: a strategy is one label per mesh axis. Lets
            `method="alternate"` work on one mesh axis at a time; None where strategies have no such structure.

    Raises:
        SolverError: shapes that do not fit, NaN or minus infinity, or nodes that do not exist.
    """

    costs: tuple[Array, ...]
    edges: tuple[Edge, ...] = ()
    usages: tuple[Array, ...] | None = None
    intervals: tuple[tuple[int, int], ...] | None = None
    limit: float | None = None
    components: tuple[IntArray, ...] | None = None

    def __post_init__(self) -> None:
        # `object.__setattr__`, since the class is frozen. `asarray` keeps float64, so shared vectors stay one object.
        object.__setattr__(self, "costs", tuple(np.asarray(vector, dtype=np.float64) for vector in self.costs))
        object.__setattr__(self, "edges", _convert_tables(self.edges))
        if self.usages is not None:
            object.__setattr__(self, "usages", tuple(np.asarray(usage, dtype=np.float64) for usage in self.usages))
        if self.components is not None:
            object.__setattr__(self, "components", tuple(np.asarray(labels) for labels in self.components))
        _check_costs(self.costs)
        _check_edges(self.edges, [len(vector) for vector in self.costs])
        _check_memory(self)
        _check_components(self)

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.costs)

    def cost(self, assignment: Sequence[int]) -> float:
        """Return the sum of the chosen node and edge costs; `inf` if the assignment uses something forbidden.

        Raises:
            SolverError: the assignment has another length or chooses a strategy that does not exist.
        """
        self._check(assignment)
        total = sum(float(vector[choice]) for vector, choice in zip(self.costs, assignment, strict=True))
        return total + sum(edge.at(assignment[edge.source], assignment[edge.target]) for edge in self.edges)

    def peak(self, assignment: Sequence[int]) -> float:
        """Return the largest sum of usages over live nodes at any moment, in bytes; 0 without usages.

        Raises:
            SolverError: as `cost`.
        """
        self._check(assignment)
        if self.usages is None or self.intervals is None or not self.costs:
            return 0.0
        chosen = np.array([usage[choice] for usage, choice in zip(self.usages, assignment, strict=True)])
        return float(Moments.of(self).loads(chosen).max(initial=0.0))

    def within_limit(self, peak: float) -> bool:
        """Return True if a peak in bytes is within the limit, up to the rounding of float sums."""
        return self.limit is None or peak <= self.limit + _ROUNDING * abs(self.limit)

    def feasible(self, assignment: Sequence[int]) -> bool:
        """Return True if an assignment uses nothing forbidden and is within the limit."""
        return bool(np.isfinite(self.cost(assignment))) and self.within_limit(self.peak(assignment))

    def _check(self, assignment: Sequence[int]) -> None:
        if len(assignment) != self.size:
            raise SolverError(
                f"assignment has {len(assignment)} entries, the problem has {self.size} nodes: give a strategy per node"
            )
        for node, (choice, vector) in enumerate(zip(assignment, self.costs, strict=True)):
            if not 0 <= choice < len(vector):
                raise SolverError(
                    f"assignment[{node}] = {choice}, but node {node} has strategies 0 to {len(vector) - 1}"
                )


def _convert_tables(edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
    """Return edges with float64 tables; a table shared by many edges is converted once and stays shared."""
    # By identity, not by content: comparing tables of many layers would take longer than solving one.
    tables: dict[int, Array] = {}
    result: list[Edge] = []
    for edge in edges:
        if isinstance(edge.table, Blend):
            result.append(edge)
            continue
        table = tables.get(id(edge.table))
        if table is None:
            table = tables[id(edge.table)] = np.asarray(edge.table, dtype=np.float64)
        result.append(edge if table is edge.table else Edge(edge.source, edge.target, table))
    return tuple(result)


def _check_costs(costs: tuple[Array, ...]) -> None:
    # Equal layers share vectors and tables: check each once.
    sound: set[int] = set()
    for node, vector in enumerate(costs):
        if id(vector) in sound:
            continue
        if vector.ndim != 1 or not len(vector):
            raise SolverError(
                f"costs[{node}] has shape {vector.shape}; a node needs a vector with at least one strategy"
            )
        if not _is_cost(vector):
            raise SolverError(f"costs[{node}] holds NaN or -inf; use finite costs, and inf to forbid a strategy")
        sound.add(id(vector))


def _check_edges(edges: tuple[Edge, ...], sizes: list[int]) -> None:
    sound: set[int] = set()
    for index, edge in enumerate(edges):
        for node in (edge.source, edge.target):
            if not 0 <= node < len(sizes):
                raise SolverError(f"edges[{index}] names node {node}, the problem has nodes 0 to {len(sizes) - 1}")
        if edge.source == edge.target:
            raise SolverError(
                f"edges[{index}] joins node {edge.source} with itself; add its diagonal to the costs of the node"
            )
        expected = (sizes[edge.source], sizes[edge.target])
        if edge.shape != expected:
            raise SolverError(
                f"edges[{index}] from node {edge.source} to node {edge.target} has a table of shape "
                f"{edge.shape}, but the nodes have {expected[0]} and {expected[1]} strategies"
            )
        for _, table in edge.parts:
            if id(table) not in sound and not _is_cost(table):
                raise SolverError(f"edges[{index}] holds NaN or -inf; use finite costs, and inf to forbid a pair")
            sound.add(id(table))


def _is_cost(values: Array) -> bool:
    # NumPy's minimum of values with NaN is NaN, and compares False.
    return bool(values.min(initial=np.inf) > -np.inf)


def _check_memory(problem: Problem) -> None:
    if problem.limit is not None and np.isnan(problem.limit):
        raise SolverError("limit is NaN; give bytes, or None for no limit")
    if (problem.usages is None) != (problem.intervals is None):
        raise SolverError("usages and intervals belong together: give both or neither")
    if problem.usages is None or problem.intervals is None:
        if problem.limit is not None:
            raise SolverError(f"limit is {problem.limit}, but there are no usages and intervals that it could bound")
        return
    if len(problem.usages) != problem.size or len(problem.intervals) != problem.size:
        raise SolverError(
            f"{len(problem.usages)} usages and {len(problem.intervals)} intervals for {problem.size} nodes: "
            "give one of each per node"
        )
    sound: set[int] = set()
    for node, (usage, vector) in enumerate(zip(problem.usages, problem.costs, strict=True)):
        if usage.shape != vector.shape:
            raise SolverError(f"usages[{node}] has shape {usage.shape}, the node has {len(vector)} strategies")
        if id(usage) not in sound and (not np.isfinite(usage).all() or (usage < 0).any()):
            raise SolverError(f"usages[{node}] holds a negative or non-finite value; give bytes")
        sound.add(id(usage))


def _check_components(problem: Problem) -> None:
    if problem.components is None:
        return
    if len(problem.components) != problem.size:
        raise SolverError(f"{len(problem.components)} components for {problem.size} nodes: give one per node")
    widths = {labels.shape[1:] for labels in problem.components}
    if len(widths) > 1 or any(len(width) != 1 for width in widths):
        raise SolverError(f"components differ in their number of axes: {sorted(widths)}")
    for node, (labels, vector) in enumerate(zip(problem.components, problem.costs, strict=True)):
        if len(labels) != len(vector):
            raise SolverError(f"components[{node}] labels {len(labels)} strategies, the node has {len(vector)}")


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The moments with maximal sets of live nodes: a limit that holds at these always holds.

    Attributes:
        count: number of moments.
        first: per node the first moment of its life.
        last: per node one past its last moment; equal to `first` for a node that is never live.
    """

    count: int
    first: IntArray
    last: IntArray

    @classmethod
    def of(cls, problem: Problem) -> Moments:
        """Return the moments of a problem that has usages."""
        assert problem.intervals is not None
        lives = np.array(problem.intervals, dtype=np.int64).reshape(-1, 2)
        live = lives[:, 0] < lives[:, 1]
        births, deaths = np.unique(lives[live, 0]), np.unique(lives[live, 1])
        # A set of live nodes is maximal right after a birth that is followed by a death before the next birth.
        following = np.append(births[1:], np.iinfo(np.int64).max)
        maximal = births[np.searchsorted(deaths, births, "right") < np.searchsorted(deaths, following, "right")]
        first = np.where(live, np.searchsorted(maximal, lives[:, 0]), 0)
        last = np.where(live, np.searchsorted(maximal, lives[:, 1]), 0)
        return cls(len(maximal), first, last)

    def loads(self, usages: Array) -> Array:
        """Return the sum of one usage per node over the nodes live at each moment."""
        # A difference array: the work is one step per node and moment, however long the lives are.
        change = np.zeros(self.count + 1)
        np.add.at(change, self.first, usages)
        np.subtract.at(change, self.last, usages)
        return np.cumsum(change)[: self.count]
