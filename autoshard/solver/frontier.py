"""The cost frontier of a problem: every assignment that is worth its memory (TensorOpt, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autoshard.solver.frontier_graph import Factor, Graph, steps
from autoshard.solver.frontier_reduce import useful
from autoshard.solver.frontier_table import Joiner, Table, unroll
from autoshard.solver.problem import Array, IntArray, Problem, SolverError
from autoshard.solver.solve import solve

Method = Literal["ldp", "elimination"]

CELLS = 60_000
"""Cells that a table of frontiers may have before a node's strategy is settled by heuristic."""


@dataclass(frozen=True, slots=True, eq=False)
class CostFrontier:
    """Assignments none of which another one beats in both memory and time.

    Attributes:
        memory: sum of the usages of each [points], ascending.
        time: sum of the costs of each [points], descending.
        assignments: strategy of every node [points, nodes].
        within: every assignment that exists has one here that takes no more memory and at most (1 + within) times its
            time; 0.0: this is the exact frontier. `inf` where nodes were settled by heuristic, and nothing is promised.
        settled: how many nodes were.
    """

    memory: Array
    time: Array
    assignments: IntArray
    within: float
    settled: int

    def __len__(self) -> int:
        return len(self.memory)


def cost_frontier(
    problem: Problem,
    *,
    method: Method = "ldp",
    epsilon: float = 0.0,
    limit: int | None = None,
    edge_usages: Sequence[Array] | None = None,
    cells: int = CELLS,
    threads: int = 1,
) -> CostFrontier:
    """The frontier of time (the sum of all node and edge costs) and memory (the sum of all usages).

    Intervals and the limit of the problem play no part: a moment of the step is a matter of which usages are given.

    Args:
        problem: with usages; costs of infinity forbid.
        method: the order of eliminations: `"ldp"` runs along the graph from one end (FT-LDP), `"elimination"` keeps
            both ends to the last (FT-Elimination). Both find the same frontier; see `frontier_graph.steps`.
        epsilon: share of its time by which a point may be slower than the exact frontier at its memory: points that
            are closer together than that are dropped, which bounds their number.
        limit: points that the frontier of one combination of strategies may have on the way; beyond that it is thinned,
            whatever epsilon promises (`CostFrontier.within` says what came of it). None for no limit.
        edge_usages: of every edge a table like its costs, of the memory that both strategies take together.
        cells: combinations of strategies that one table may hold. Where eliminating a node would need more, its
            strategy is settled: three frontiers are found, with the strategies of the fastest plan, of the leanest,
            and of one between, and joined.
        threads: that share the work.

    Raises:
        SolverError: no usages; an epsilon below zero, a limit below two, an unknown method, or edge usages that do not
            fit.

    Source: TensorOpt 3.2, Algorithms 1 to 3; the thinning is ours.
    """
    usages = _checked(problem, method, epsilon, limit, edge_usages)
    kept = useful(problem, usages, edge_usages)
    ends = [np.ix_(kept[edge.source], kept[edge.target]) for edge in problem.edges]
    edges = (replace(edge, costs=edge.costs[at]) for edge, at in zip(problem.edges, ends, strict=True))
    components = problem.components and tuple(map(_taken, problem.components, kept))
    narrow = Problem(tuple(map(_taken, problem.costs, kept)), tuple(edges), components=components)
    tables = edge_usages and [table[at] for table, at in zip(edge_usages, ends, strict=True)]
    search = _Search(narrow, tuple(map(_taken, usages, kept)), tables, method, epsilon, limit, cells, threads)
    found = search.run()
    for node, strategies in enumerate(kept):
        found.assignments[:, node] = strategies[found.assignments[:, node]]
    return found


def _taken(values: np.ndarray, places: IntArray) -> np.ndarray:
    return values[places]


def _checked(
    problem: Problem, method: str, epsilon: float, limit: int | None, edge_usages: Sequence[Array] | None
) -> Sequence[Array]:
    if method not in ("ldp", "elimination"):
        raise SolverError(f'method={method!r} finds no frontier: choose "ldp" or "elimination"')
    if not epsilon >= 0:
        raise SolverError(f"epsilon={epsilon!r}: it is a share of a point's time, zero or more")
    if limit is not None and limit < 2:
        raise SolverError(f"limit={limit!r}: a frontier has two ends; allow two points or more")
    if problem.usages is None:
        raise SolverError("the problem has no usages: without memory, the frontier is its optimum; use solve")
    shapes = [edge.costs.shape for edge in problem.edges]
    if edge_usages is not None and [table.shape for table in edge_usages] != shapes:
        raise SolverError("edge_usages do not fit the edges: give one table for each, of the shape of its costs")
    return problem.usages


@dataclass(frozen=True, slots=True)
class _Search:
    """One call of `cost_frontier`."""

    problem: Problem
    usages: Sequence[Array]
    edge_usages: Sequence[Array] | None
    method: Method
    epsilon: float
    limit: int | None
    cells: int
    threads: int

    def run(self) -> CostFrontier:
        found = self._tracked(None)
        if found is not None:
            return found
        parts = [part for guide in self._guides() if (part := self._tracked(guide)) is not None]
        if not parts:
            return CostFrontier(np.zeros(0), np.zeros(0), np.zeros((0, self.problem.size), dtype=np.int64), 0.0, 0)
        memory = np.concatenate([part.memory for part in parts])
        time = np.concatenate([part.time for part in parts])
        order = np.lexsort((time, memory))
        first = time[order] < np.minimum.accumulate(np.append(np.inf, time[order]))[:-1]
        kept = order[first]
        assignments = np.concatenate([part.assignments for part in parts])[kept]
        return CostFrontier(memory[kept], time[kept], assignments, float("inf"), max(part.settled for part in parts))

    def _tracked(self, guide: Sequence[int] | None) -> CostFrontier | None:
        """The frontier; nodes that are too entangled take the guide's strategies. None where there are some and no
        guide."""
        # A node of one strategy decides nothing: its costs are its neighbours', or nobody's.
        sizes = {node: len(costs) for node, costs in enumerate(self.problem.costs) if len(costs) > 1}
        order = steps(sizes, self._neighbours(sizes), self.method == "ldp", self.cells)
        if guide is None and not all(step.exact for step in order):
            return None
        floor = self._least_time()
        joiner = Joiner(self.epsilon * floor, len(order), self.limit, self.threads)
        graph = Graph(sizes, self._factors(sizes), joiner)
        for step in order:
            if step.exact:
                graph.eliminate(step.node)
            else:
                assert guide is not None
                graph.settle(step.node, guide[step.node])
        table = graph.rest
        assignments = np.zeros((len(table.memory), self.problem.size), dtype=np.int64)
        unroll(table, assignments)
        for node, strategy in graph.settled.items():
            assignments[:, node] = strategy
        within = joiner.spent / floor if joiner.spent and floor > 0 else 0.0
        if graph.settled or (joiner.spent and floor <= 0):
            within = float("inf")
        return CostFrontier(table.memory, table.time, assignments, within, len(graph.settled))

    def _neighbours(self, sizes: Mapping[int, int]) -> dict[int, set[int]]:
        neighbours: dict[int, set[int]] = {node: set() for node in sizes}
        for edge in self.problem.edges:
            if edge.source in sizes and edge.target in sizes:
                neighbours[edge.source].add(edge.target)
                neighbours[edge.target].add(edge.source)
        return neighbours

    def _factors(self, sizes: Mapping[int, int]) -> Iterator[Factor]:
        """Initialization: one point for every strategy of every node, and for every pair of every edge."""
        for node, (costs, usage) in enumerate(zip(self.problem.costs, self.usages, strict=True)):
            yield Factor((node,) if node in sizes else (), Table.of(costs, usage))
        for number, edge in enumerate(self.problem.edges):
            memory = np.zeros_like(edge.costs) if self.edge_usages is None else self.edge_usages[number]
            scope = tuple(node for node in (edge.source, edge.target) if node in sizes)
            yield Factor(scope, Table.of(edge.costs, memory))

    def _least_time(self) -> float:
        """No assignment is faster: everything at its cheapest."""
        parts = (*self.problem.costs, *(edge.costs for edge in self.problem.edges))
        return sum(float(part.min()) for part in parts if np.isfinite(part.min()))

    def _guides(self) -> Iterator[Sequence[int]]:
        """The fastest assignment known, the leanest, and the best at the rate at which they trade memory for time."""
        fastest, leanest = self._solved(0.0), self._solved(None)
        if not fastest or not leanest:
            return
        yield from (fastest, leanest)
        saved = self._memory(fastest) - self._memory(leanest)
        if saved > 0:
            yield self._solved((self.problem.cost(leanest) - self.problem.cost(fastest)) / saved)

    def _solved(self, price: float | None) -> Sequence[int]:
        """The best assignment found at a price of memory; at None, memory alone counts."""
        times = 1.0 if price is not None else 0.0
        price = 1.0 if price is None else price
        costs = tuple(
            np.where(np.isfinite(cost), times * np.where(np.isfinite(cost), cost, 0.0) + price * usage, np.inf)
            for cost, usage in zip(self.problem.costs, self.usages, strict=True)
        )
        edges = []
        for number, edge in enumerate(self.problem.edges):
            finite = np.isfinite(edge.costs)
            table = np.where(finite, times * np.where(finite, edge.costs, 0.0), np.inf)
            if self.edge_usages is not None:
                table = table + price * self.edge_usages[number]
            edges.append(replace(edge, costs=table))
        priced = Problem(costs, tuple(edges), components=self.problem.components)
        return solve(priced).assignment

    def _memory(self, assignment: Sequence[int]) -> float:
        total = sum(float(usage[choice]) for usage, choice in zip(self.usages, assignment, strict=True))
        for number, edge in enumerate(self.problem.edges if self.edge_usages is not None else ()):
            assert self.edge_usages is not None
            total += float(self.edge_usages[number][assignment[edge.source], assignment[edge.target]])
        return total
