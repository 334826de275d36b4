"""The Pareto frontier of a problem's memory and time (the cost frontier of TensorOpt, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from autoshard.solver.elimination_order import EliminationOrder
from autoshard.solver.frontier_corners import Costs, KnownPoints
from autoshard.solver.frontier_track import Tracker, frontier_order
from autoshard.solver.problem import Array, Edge, IntArray, Problem, SolverError
from autoshard.solver.solve import solve

Method = Literal["ldp", "elimination"]

CELLS = 60_000
"""Most cells of a table of frontiers; a node with a larger one gets a fixed strategy by heuristic."""

# Passes over the nodes: a dropped strategy may make strategies of the neighbours useless.
_ROUNDS = 4

_LARGEST = 300_000
"""Most entries of a comparison of all pairs of a node's strategies on one edge; larger nodes are not reduced."""


@dataclass(frozen=True, slots=True, eq=False)
class CostFrontier:
    """The Pareto-optimal assignments in memory and time.

    Attributes:
        memory: sum of the usages of each [points], ascending.
        time: sum of the costs of each [points], descending.
        assignments: strategy of every node [points, nodes].
        gap: a proved bound: for every assignment, one here takes no more memory and at most (1 + gap) times its time.
            0.0 for the exact frontier, `inf` (no guarantee) where nodes were fixed heuristically.
        fixed_nodes: number of nodes that were fixed heuristically.
    """

    memory: Array
    time: Array
    assignments: IntArray
    gap: float
    fixed_nodes: int

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
) -> CostFrontier:
    """Return the frontier of time (the sum of all node and edge costs) and memory (the sum of all usages).

    Intervals and the limit of the problem are ignored: the caller chooses the moment of the step by the usages.

    Args:
        problem: with usages; infinite costs forbid.
        method: the order of eliminations: `"ldp"` runs along the graph from one end (FT-LDP), `"elimination"` keeps
            both ends to the last (FT-Elimination). Both find the same frontier; see `frontier_order`.
        epsilon: relative amount by which a point may be slower than the exact frontier at its memory. The search
            ignores points that are closer than that to known ones.
        limit: partial assignments that one combination of strategies may have for every gap between known points,
            whatever epsilon promises (`CostFrontier.gap` is the result). None for no limit.
        edge_usages: per edge a table like its costs, of the memory for both strategies together.
        cells: combinations of strategies that one table may hold. If eliminating a node needs more, its strategy is
            fixed: the frontiers with the strategies of the fastest plan, the leanest plan and one between are merged.

    Raises:
        SolverError: no usages; an epsilon below zero, a limit below one, an unknown method, or edge usages that do not
            fit.

    Source: TensorOpt 3.2, Algorithms 1 to 3; without bounding and thinning.
    """
    usages = _check_arguments(problem, method, epsilon, limit, edge_usages)
    search = _CostFrontierSearch(problem, usages, edge_usages, method, epsilon, limit, cells)
    kept = undominated_strategies(problem, usages, edge_usages)
    order = search.order(kept)
    eliminated, fixed = [node for node, _ in order.steps], order.conditioned
    if not fixed:
        points, within = search.track(kept, eliminated)
        return CostFrontier(points.memory, points.time, points.assignments, within, 0)
    # Merge the frontiers of several choices of the fixed nodes.
    frontier = None
    # Three choices of the fixed nodes, the two ends and a middle (a heuristic, as TensorOpt fixes nodes that it cannot
    # eliminate).
    for guide in search.guides():
        narrow = list(kept)
        for node in fixed:
            narrow[node] = np.array([guide[node]])
        part, _ = search.track(narrow, eliminated)
        frontier = part if frontier is None else frontier.merge(part)
    if frontier is None:
        return CostFrontier(np.zeros(0), np.zeros(0), np.zeros((0, problem.size), dtype=np.int64), 0.0, 0)
    return CostFrontier(frontier.memory, frontier.time, frontier.assignments, float("inf"), len(fixed))


def _check_arguments(
    problem: Problem, method: str, epsilon: float, limit: int | None, edge_usages: Sequence[Array] | None
) -> Sequence[Array]:
    if method not in ("ldp", "elimination"):
        raise SolverError(f'method={method!r} finds no frontier: choose "ldp" or "elimination"')
    if not epsilon >= 0:
        raise SolverError(f"epsilon={epsilon!r}: it is a share of a point's time, zero or more")
    if limit is not None and limit < 1:
        raise SolverError(f"limit={limit!r}: allow one partial assignment or more, or None for as many as it takes")
    if problem.usages is None:
        raise SolverError("the problem has no usages: without memory, the frontier is its optimum; use solve")
    shapes = [edge.costs.shape for edge in problem.edges]
    if edge_usages is not None and [table.shape for table in edge_usages] != shapes:
        raise SolverError("edge_usages do not fit the edges: give one table for each, of the shape of its costs")
    return problem.usages


@dataclass(frozen=True, slots=True)
class _CostFrontierSearch:
    """One call of `cost_frontier`."""

    problem: Problem
    usages: Sequence[Array]
    edge_usages: Sequence[Array] | None
    method: Method
    epsilon: float
    limit: int | None
    cells: int

    def order(self, kept: Sequence[IntArray]) -> EliminationOrder:
        """Return the elimination order of the nodes with more than one of these strategies."""
        neighbours: dict[int, set[int]] = {node: set() for node, strategies in enumerate(kept) if len(strategies) > 1}
        for edge in self.problem.edges:
            if edge.source in neighbours and edge.target in neighbours:
                neighbours[edge.source].add(edge.target)
                neighbours[edge.target].add(edge.source)
        sizes = {node: len(kept[node]) for node in neighbours}
        return frontier_order(sizes, neighbours, self.method == "ldp", self.cells)

    def track(self, kept: Sequence[IntArray], order: Sequence[int]) -> tuple[KnownPoints, float]:
        """Return the best assignments of these strategies, and how far from exact they are.

        Args:
            kept: strategies of every node.
            order: in which the nodes with more than one are eliminated.
        """
        place = {node: number for number, node in enumerate(order)}
        sizes = {node: len(kept[node]) for node in order}
        tracker = Tracker(sizes, list(self._costs(kept, place)), order, self.epsilon, self.limit)
        points, within = tracker.run()
        assignments = np.empty((len(points), self.problem.size), dtype=np.int64)
        for node, strategies in enumerate(kept):
            chosen = points.assignments[:, place[node]] if node in place else 0
            assignments[:, node] = strategies[chosen]
        return KnownPoints(points.memory, points.time, assignments), within

    def _costs(self, kept: Sequence[IntArray], place: Mapping[int, int]) -> Iterator[Costs]:
        """Yield the costs of every strategy of every node, and of every pair of every edge (initialization)."""
        for node, strategies in enumerate(kept):
            time, memory = self.problem.costs[node][strategies], self.usages[node][strategies]
            # A node with one strategy is a constant.
            yield Costs((node,), time, memory) if node in place else Costs((), time[0], memory[0])
        for number, edge in enumerate(self.problem.edges):
            at = np.ix_(kept[edge.source], kept[edge.target])
            time = edge.costs[at]
            memory = np.zeros_like(time) if self.edge_usages is None else self.edge_usages[number][at]
            ends = [node for node in (edge.source, edge.target) if node in place]
            # Scopes list nodes from the last eliminated to the first.
            if len(ends) == 2 and place[edge.source] < place[edge.target]:
                ends, time, memory = ends[::-1], time.T, memory.T
            shape = [len(kept[node]) for node in ends]
            yield Costs(tuple(ends), time.reshape(shape), memory.reshape(shape))

    def guides(self) -> Iterator[Sequence[int]]:
        """Yield the fastest known assignment, the leanest, and the best at their exchange rate of memory and time."""
        fastest, leanest = self._solve_at_price(0.0), self._solve_at_price(None)
        if not fastest or not leanest:
            return
        yield from (fastest, leanest)
        saved = self._memory(fastest) - self._memory(leanest)
        if saved > 0:
            yield self._solve_at_price((self.problem.cost(leanest) - self.problem.cost(fastest)) / saved)

    def _solve_at_price(self, price: float | None) -> Sequence[int]:
        """Return the best assignment found at a price of memory; with None, only memory counts."""
        times = 1.0 if price is not None else 0.0
        price = 1.0 if price is None else price
        costs = tuple(
            # An infinite cost times zero would be NaN.
            np.where(np.isfinite(cost), times * np.where(np.isfinite(cost), cost, 0.0) + price * usage, np.inf)
            for cost, usage in zip(self.problem.costs, self.usages, strict=True)
        )
        edges = []
        for number, edge in enumerate(self.problem.edges):
            finite = np.isfinite(edge.costs)
            table = np.where(finite, times * np.where(finite, edge.costs, 0.0), np.inf)
            if self.edge_usages is not None:
                table = table + price * self.edge_usages[number]
            edges.append(Edge(edge.source, edge.target, table))
        priced = Problem(costs, tuple(edges), components=self.problem.components)
        return solve(priced).assignment

    def _memory(self, assignment: Sequence[int]) -> float:
        total = sum(float(usage[choice]) for usage, choice in zip(self.usages, assignment, strict=True))
        for number, edge in enumerate(self.problem.edges if self.edge_usages is not None else ()):
            assert self.edge_usages is not None
            total += float(self.edge_usages[number][assignment[edge.source], assignment[edge.target]])
        return total


def undominated_strategies(
    problem: Problem, usages: Sequence[Array], edge_usages: Sequence[Array] | None
) -> list[IntArray]:
    """Return the strategies of every node that no other one dominates in time and memory.

    One dominates another if it is at least as good in both for all choices of the neighbours. The first of equal ones
    stays, and every node keeps at least one, even if all are forbidden.
    """
    kept = [np.flatnonzero(np.isfinite(costs)) for costs in problem.costs]
    kept = [strategies if len(strategies) else np.zeros(1, dtype=np.int64) for strategies in kept]
    around: list[list[tuple[int, Array, Array | None]]] = [[] for _ in problem.costs]
    for number, edge in enumerate(problem.edges):
        edge_usage = None if edge_usages is None else edge_usages[number]
        around[edge.source].append((edge.target, edge.costs, edge_usage))
        around[edge.target].append((edge.source, edge.costs.T, None if edge_usage is None else edge_usage.T))
    for _ in range(_ROUNDS):
        before = sum(map(len, kept))
        for node, edges in enumerate(around):
            kept[node] = _undominated_of_node(kept, node, problem.costs[node], usages[node], edges)
        if sum(map(len, kept)) == before:
            break
    return kept


def _undominated_of_node(
    kept: Sequence[IntArray],
    node: int,
    costs: Array,
    usage: Array,
    edges: Sequence[tuple[int, Array, Array | None]],
) -> IntArray:
    strategies = kept[node]
    if len(strategies) < 2 or any(len(strategies) ** 2 * len(kept[neighbour]) > _LARGEST for neighbour, _, _ in edges):
        return strategies
    # [s, t]: the most that choosing t instead of s can add.
    slower = costs[strategies][None, :] - costs[strategies][:, None]
    larger = usage[strategies][None, :] - usage[strategies][:, None]
    for neighbour, table, edge_usage in edges:
        at = np.ix_(strategies, kept[neighbour])
        allowed = np.isfinite(table[at])
        # NaN where both are forbidden everywhere, which compares False.
        with np.errstate(invalid="ignore"):
            slower = slower + _largest_increase(table[at], allowed)
        larger = larger + (_largest_increase(edge_usage[at], allowed) if edge_usage is not None else 0.0)
    return strategies[_find_undominated(slower, larger)]


def _largest_increase(table: Array, allowed: npt.NDArray[np.bool_]) -> Array:
    """Return [s, t]: the most that choosing row t instead of row s can add, over the columns in which s is allowed."""
    # inf - inf, in columns that do not count: where s is forbidden, t is no worse, even if it is forbidden, too.
    with np.errstate(invalid="ignore"):
        more = table[None, :, :] - table[:, None, :]
    return np.asarray(np.where(allowed[:, None, :], more, -np.inf).max(2))


def _find_undominated(*increases: Array) -> IntArray:
    """Return the positions of the undominated strategies, ascending; the first of equal ones stays.

    Args:
        increases: [s, t] per criterion, the most that choosing t instead of s can add; t dominates s if that is at most
            zero for all of them.
    """
    better = np.logical_and.reduce([increase <= 0 for increase in increases])
    np.fill_diagonal(better, False)
    keep = np.ones(len(better), dtype=bool)
    # Only a remaining strategy may drop another: rounding must not drop a whole cycle.
    for strategy in reversed(range(len(better))):
        keep[strategy] = not (better[strategy] & keep).any()
    return np.flatnonzero(keep)
