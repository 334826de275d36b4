"""The problem that the solver takes, in the terms of the public IOPDDL contest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from autoshard.errors import AutoshardError
from autoshard.solver.blend import BlendedEdge, Part

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ROUNDING = 1e-12
"""Relative slack of the limit: sums of bytes are floats, and a sum equal to the limit must pass."""


class SolverError(AutoshardError, ValueError):
    """A problem is malformed, or can't be solved by the method asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """What the strategies of two nodes cost together.

    Attributes:
        source: index of the node of the rows.
        target: index of the node of the columns, another node.
        costs: table [strategies of source, strategies of target]; `np.inf` forbids a pair. Edges that cost the
            same may (and should) share one array object: work is done once per object.
    """

    source: int
    target: int
    costs: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Strategies of either end."""
        return self.costs.shape

    @property
    def parts(self) -> tuple[Part, ...]:
        """The table, once."""
        return ((1.0, self.costs),)

    def at(self, row: int, column: int) -> float:
        """What two strategies cost."""
        return float(self.costs[row, column])


AnyEdge = Edge | BlendedEdge


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One choice per node, the cheapest sum of node and edge costs, within a limit on memory at every moment.

    Attributes:
        costs: per node the cost of each strategy (float64, any unit); `np.inf` forbids a strategy.
        edges: tables between pairs of nodes; parallel edges add up.
        usages: per node the bytes that each strategy holds while the node is live; None where there is no limit.
        intervals: per node the half-open life [lo, hi) of its usage; empty (lo >= hi) uses nothing.
        limit: bytes that the sum over live nodes may reach at any moment; None for no limit.
        components: per node labels [strategies, mesh axes]: a strategy is one label per mesh axis. Lets
            `method="alternate"` work on one mesh axis at a time; None where strategies have no such structure.

    Raises:
        SolverError: shapes that do not fit, NaN or minus infinity, or nodes that do not exist.
    """

    costs: tuple[Array, ...]
    edges: tuple[AnyEdge, ...] = ()
    usages: tuple[Array, ...] | None = None
    intervals: tuple[tuple[int, int], ...] | None = None
    limit: float | None = None
    components: tuple[IntArray, ...] | None = None

    def __post_init__(self) -> None:
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
        """Sum of the chosen node and edge costs; `inf` where the assignment uses something forbidden.

        Raises:
            SolverError: the assignment is of another length or chooses a strategy that does not exist.
        """
        self._check(assignment)
        total = sum(float(vector[choice]) for vector, choice in zip(self.costs, assignment, strict=True))
        return total + sum(edge.at(assignment[edge.source], assignment[edge.target]) for edge in self.edges)

    def peak(self, assignment: Sequence[int]) -> float:
        """Largest sum of usages over live nodes at any moment, in bytes; 0 without usages.

        Raises:
            SolverError: as `cost`.
        """
        self._check(assignment)
        if self.usages is None or self.intervals is None or not self.costs:
            return 0.0
        chosen = np.array([usage[choice] for usage, choice in zip(self.usages, assignment, strict=True)])
        lives = np.array(self.intervals, dtype=np.int64).reshape(-1, 2)
        live = lives[:, 0] < lives[:, 1]
        moments, places = np.unique(lives[live], return_inverse=True)
        places = places.reshape(-1, 2)
        change = np.zeros(len(moments))
        np.add.at(change, places[:, 0], chosen[live])
        np.subtract.at(change, places[:, 1], chosen[live])
        return max(0.0, float(np.cumsum(change).max(initial=0.0)))

    def within_limit(self, peak: float) -> bool:
        """Whether a peak in bytes respects the limit, up to the rounding of float sums."""
        return self.limit is None or peak <= self.limit + _ROUNDING * abs(self.limit)

    def feasible(self, assignment: Sequence[int]) -> bool:
        """Whether an assignment uses nothing forbidden and stays within the limit."""
        return bool(np.isfinite(self.cost(assignment))) and self.within_limit(self.peak(assignment))

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Reads a problem in the contest's JSON format, gzipped if the name ends in `.gz`; see `exchange`."""
        from autoshard.solver.exchange import load_problem

        return load_problem(path)

    def save(self, path: str | Path) -> None:
        """Writes the problem in the contest's JSON format, gzipped if the name ends in `.gz`; see `exchange`."""
        from autoshard.solver.exchange import save_problem

        save_problem(self, path)

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


def _convert_tables(edges: tuple[AnyEdge, ...]) -> tuple[AnyEdge, ...]:
    """Edges with float64 tables; a table shared by many edges is converted once and stays shared."""
    tables: dict[int, Array] = {}
    result: list[AnyEdge] = []
    for edge in edges:
        if isinstance(edge, BlendedEdge):
            result.append(edge)
            continue
        table = tables.get(id(edge.costs))
        if table is None:
            table = tables[id(edge.costs)] = np.asarray(edge.costs, dtype=np.float64)
        result.append(edge if table is edge.costs else Edge(edge.source, edge.target, table))
    return tuple(result)


def _check_costs(costs: tuple[Array, ...]) -> None:
    sound: set[int] = set()  # equal layers share their vectors and tables: each is looked at once
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


def _check_edges(edges: tuple[AnyEdge, ...], sizes: list[int]) -> None:
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
    return bool(values.min(initial=np.inf) > -np.inf)  # the least of what holds NaN is NaN


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
