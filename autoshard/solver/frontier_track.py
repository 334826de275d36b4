"""Frontier tracking: elimination with a frontier in every cell, pruned by known points.

The elimination order is that of TensorOpt, Figure 3 and Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import numpy as np

from autoshard.solver.buckets import Bucket, Scope, buckets, spread
from autoshard.solver.elimination_order import EliminationGraph, EliminationOrder, Score, greedy_order
from autoshard.solver.frontier_corners import Costs, KnownPoints, OpenCorners, PricedProblem, PruningBounds
from autoshard.solver.frontier_table import UNIT, FrontierTable, Joiner, unroll
from autoshard.solver.problem import Array, IntArray

# Prices on either side of the rate between the two ends, each double the one before.
_OCTAVES = 8
# Rounds of prices at the rates between adjacent points.
_ROUNDS = 3
# Prices of one round.
_MOST_PRICES = 16
# Amounts of memory between adjacent points at which prices are compared.
_BETWEEN = 4
# Least unit for differences of times, as a share of the slowest point's time.
_SMALL = 1e-9

_COARSE = ((1, 0.2), (2, 0.3))
"""First passes: points of a cell for every corner, and the width of the band at the hull, in epsilons."""

# Minimum epsilon of the first passes.
_FINE = 0.01

_FIRST = np.zeros(1, dtype=np.int64)


class Tracker:
    """One problem, ready for elimination.

    The optima at prices of memory are the ends of the frontier and its convex hull. They bound the results of a partial
    assignment, so tables of frontiers contain only points that may still lead between the known points. First passes
    search close to the hull and keep few points in a cell. In models with many layers they find enough points for the
    hull to prove them; elsewhere they reduce the work of the last pass, which keeps all points.

    Args:
        sizes: strategies of every node.
        costs: of nodes and edges, in scopes of the order.
        order: in which the nodes are eliminated.
        epsilon: relative amount by which a point may be slower than the exact frontier.
        limit: most points of a cell for every gap between known points; None for no limit.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        costs: Sequence[Costs],
        order: Sequence[int],
        epsilon: float,
        limit: int | None,
    ) -> None:
        self.sizes = sizes
        self.costs = costs
        self.order = order
        self.epsilon = epsilon
        self.limit = limit
        constants = [cost for cost in costs if not cost.scope]
        self.constant = Costs(
            (),
            np.array(sum(float(cost.time) for cost in constants)),
            np.array(sum(float(cost.memory) for cost in constants)),
        )
        self.tree = buckets(order, costs, attrgetter("scope"))

    def run(self) -> tuple[KnownPoints, float]:
        """Return assignments [points, places in the order], and a bound of how much slower than the exact frontier they
        are."""
        # The two ends: only time, and only memory.
        weights = np.array([[1.0, 0.0], [0.0, 1.0]])
        priced = PricedProblem(self.sizes, self.constant, self.tree, weights)
        if not np.isfinite(priced.best).all():
            return KnownPoints(np.zeros(0), np.zeros(0), np.zeros((0, len(self.order)), dtype=np.int64)), 0.0
        points = self._evaluate(priced.optima())
        points, priced = self._hull(points, weights)
        gap = points.largest_gap(priced.weights, priced.best)
        for per_corner, band in self._passes():
            if gap <= self.epsilon:
                break
            new_points, proved = self._pass(points, priced, per_corner, band)
            points = points.merge(new_points)
            gap = min(points.largest_gap(priced.weights, priced.best), proved)
        return points, gap

    def _passes(self) -> list[tuple[int | None, float]]:
        """Return, per pass, the points of a cell for every corner and the width of the band at the hull."""
        coarse = [(per_corner, share * max(self.epsilon, _FINE)) for per_corner, share in _COARSE]
        return [pair for pair in coarse if self.limit is None or pair[0] <= self.limit] + [(self.limit, 0.0)]

    def _evaluate(self, strategies: Mapping[int, IntArray]) -> KnownPoints:
        """Return some assignments as points."""
        assignments = np.stack([strategies[node] for node in self.order], 1) if self.order else np.zeros((1, 0), int)
        time = np.full(len(assignments), float(self.constant.time))
        memory = np.full(len(assignments), float(self.constant.memory))
        for bucket in self.tree:
            for cost in bucket.terms:
                at = tuple(strategies[node] for node in cost.scope)
                time += cost.time[at]
                memory += cost.memory[at]
        return KnownPoints.of(memory, time, assignments)

    def _upper_bounds(self) -> tuple[float, float]:
        """Return memory and time that no assignment exceeds."""
        all_costs = [cost for bucket in self.tree for cost in bucket.terms]
        memory = sum(float(cost.memory.max()) for cost in all_costs) + float(self.constant.memory)
        finite = (cost.time[np.isfinite(cost.time)] for cost in all_costs)
        time = sum(float(times.max(initial=0.0)) for times in finite) + float(self.constant.time)
        return 1.0 + memory, 1.0 + time

    def _hull(self, points: KnownPoints, weights: Array) -> tuple[KnownPoints, PricedProblem]:
        """Return the convex hull of the frontier, without small changes of slope, and the prices that bound it."""
        tried, optima = np.zeros((0, 2)), np.zeros(0)
        saved, slower = points.memory[-1] - points.memory[0], points.time[0] - points.time[-1]
        # The overall exchange rate of seconds for bytes is the best first guess; the hull may be far steeper at its
        # ends.
        rates = slower / saved * 2.0 ** np.arange(-_OCTAVES, _OCTAVES + 1) if len(points) > 1 else np.zeros(0)
        for _ in range(1 + _ROUNDS):
            fresh = np.array([rate for rate in rates if not np.isclose(rate, tried[:, 1], rtol=1e-9, atol=0.0).any()])
            if not len(fresh):
                break
            fresh = np.stack([np.ones(len(fresh)), fresh], 1)
            tried = np.concatenate([tried, fresh])
            priced = PricedProblem(self.sizes, self.constant, self.tree, fresh)
            optima = np.append(optima, priced.best)
            points = points.merge(self._evaluate(priced.optima()))
            slower = points.time[:-1] - points.time[1:]
            # The next prices are the rates between adjacent points that are far apart in time.
            share = slower / np.maximum(np.abs(points.time[1:]), _SMALL * np.abs(points.time).max())
            wide = np.argsort(-share, kind="stable")[:_MOST_PRICES]
            wide = wide[share[wide] > self.epsilon / 4]
            rates = (slower / np.diff(points.memory))[np.sort(wide)]
        return points, PricedProblem(
            self.sizes, self.constant, self.tree, self._decisive_prices(points, weights, tried, optima)
        )

    def _decisive_prices(self, points: KnownPoints, ends: Array, tried: Array, optima: Array) -> Array:
        """Return the prices at the ends, and those that give the highest bound of the time at some memory."""
        if not len(tried):
            return ends
        # More prices make every bound slower to compare: keep only those that give the highest bound somewhere.
        share = np.linspace(0.0, 1.0, _BETWEEN, endpoint=False)
        memory = np.append(points.memory[:-1, None] + np.diff(points.memory)[:, None] * share, points.memory[-1])
        return np.concatenate([ends, tried[np.unique((optima - memory[:, None] * tried[:, 1]).argmax(1))]])

    def _pass(
        self, points: KnownPoints, priced: PricedProblem, per_corner: int | None, band: float
    ) -> tuple[KnownPoints, float]:
        """Return new assignments between known ones, and a bound of how much slower than the exact frontier all are."""
        least = float(priced.best[0])
        # Only the last pass keeps all points, and thus proves a bound. Half of epsilon is for corners, the rest for
        # thinning.
        followed = per_corner is None and not band
        epsilon = self.epsilon / 2 if followed else 0.0
        spare = (1 + self.epsilon) / (1 + epsilon) - 1 if followed else 0.0
        if band and least > 0:
            points = points.with_targets(priced.weights, priced.best, band)
        corners = OpenCorners.between(points, priced.weights, priced.best, epsilon, self._upper_bounds())
        joiner = Joiner(spare * max(0.0, least), len(self.order), per_corner)
        table = self._eliminate_all(joiner, priced, self._pruning_bounds(priced, corners))
        assignments = np.zeros((len(table.memory), 1 + max(self.order, default=0)), dtype=np.int64)
        unroll(table, assignments)
        # Corners ignore gains of less than epsilon; thinning loses at most `spent` seconds, relative to the least time.
        # The two factors multiply.
        proved = (1 + epsilon) * (1 + (joiner.spent / least if joiner.spent else 0.0)) - 1
        new_points = KnownPoints.of(table.memory, table.time, assignments[:, list(self.order)])
        return new_points, proved if followed else float("inf")

    def _pruning_bounds(self, priced: PricedProblem, corners: OpenCorners) -> list[PruningBounds]:
        bounds = []
        for conditional, outside in priced.conditional_optima():
            prices = conditional.shape[-1]
            conditional = conditional.reshape(-1, prices)
            pairs = np.zeros(len(conditional), dtype=bool)
            pairs[corners.pairs_below(conditional)[0]] = True
            bounds.append(PruningBounds(corners, outside.reshape(-1, prices), pairs))
        return bounds[::-1]

    def _eliminate_all(self, joiner: Joiner, priced: PricedProblem, prunings: Sequence[PruningBounds]) -> FrontierTable:
        """Return a table of one cell, the frontier after all nodes are eliminated."""
        tables: list[FrontierTable] = []
        combined = FrontierTable.of(self.constant.time, self.constant.memory)
        decided_costs = self.constant.at(priced.weights)
        for bucket, minimum, pruning in zip(self.tree, priced.minima, prunings, strict=True):
            table = self._eliminate_bucket(joiner, bucket, tables, pruning)
            tables.append(table)
            # A component ends.
            if not bucket.rest:
                decided_costs = decided_costs + minimum
                component_pruning = PruningBounds(
                    pruning.corners, (priced.best - decided_costs)[None], np.ones(1, dtype=bool)
                )
                combined = joiner.join(combined, table, _FIRST, _FIRST, pruning=component_pruning)
        return combined

    def _eliminate_bucket(
        self, joiner: Joiner, bucket: Bucket[Costs], tables: Sequence[FrontierTable], pruning: PruningBounds
    ) -> FrontierTable:
        """Return the frontiers of the sum of a bucket, minimised over its node.

        With two neighbours this is the paper's node elimination (Eq. 4); summing costs of one scope is edge elimination
        (Eq. 5); with one neighbour it is a step of the linear dynamic programming (Algorithm 3). With more neighbours,
        a table over all of them corresponds to the node of concatenated strategies of branch elimination (Eq. 6).
        """
        scope = self._union_scope([cost.scope for cost in bucket.terms], bucket)
        shape = [self.sizes[node] for node in scope]
        time, memory = np.zeros(shape), np.zeros(shape)
        for cost in bucket.terms:
            time += spread(cost.time, cost.scope, scope)
            memory += spread(cost.memory, cost.scope, scope)
        together = FrontierTable.of(time, memory)
        # The largest table is joined last, together with the elimination.
        parts = [(tables[child], self.tree[child].rest) for child in bucket.children]
        parts.sort(key=lambda part: (len(part[0].memory), part[1]))
        last, inner = parts.pop() if parts else (UNIT, ())
        for table, child_scope in parts:
            joint = self._union_scope([scope, child_scope], bucket)
            together = joiner.join(together, table, self._cells(scope, joint), self._cells(child_scope, joint))
            scope = joint
        left, right = self._cells(scope, bucket.scope), self._cells(inner, bucket.scope)
        return joiner.join(together, last, left, right, self.sizes[bucket.node], bucket.node, pruning)

    def _union_scope(self, scopes: Sequence[Scope], bucket: Bucket[Costs]) -> Scope:
        """Return the nodes of a bucket that are in some scopes, and its own node."""
        present = {bucket.node}.union(*scopes)
        return tuple(node for node in bucket.scope if node in present)

    def _cells(self, scope: Scope, joint: Scope) -> IntArray:
        """Return, for every cell over `joint`, the cell of a table over `scope`."""
        shape = [self.sizes[node] for node in scope]
        cells = spread(np.arange(math.prod(shape), dtype=np.int64).reshape(shape), scope, joint)
        return np.broadcast_to(cells, [self.sizes[node] for node in joint]).ravel()


def frontier_order(
    sizes: Mapping[int, int], neighbours: Mapping[int, Iterable[int]], linear: bool, cells: int
) -> EliminationOrder:
    """Return a greedy order of the nodes, by smallest table or by least addition to other tables.

    Of the two orders, it is the one that fixes fewer nodes or, if equal, takes less work.

    Args:
        sizes: strategies of every node.
        neighbours: the graph, without loops.
        linear: True for FT-LDP: of equal tables, the one nearest to an end of the graph. Branches are merged into the
            main line first; the line is then eliminated from that end, a node with one neighbour at a time. False for
            FT-Elimination: the two ends of every component are last, so that inner nodes of a line are eliminated with
            two neighbours each.
        cells: of the largest table allowed, without the eliminated node.

    Source: TensorOpt 3.2, Algorithm 2.
    """
    place: dict[int, int] = {}
    last: set[int] = set()
    for node in neighbours:
        if node not in place:
            reached = _distances(neighbours, _farthest(neighbours, node))
            place.update(reached)
            last |= set() if linear else {next(iter(reached)), next(reversed(reached))}

    def order(fill: bool) -> EliminationOrder:
        def score(graph: EliminationGraph, node: int) -> Score:
            table = graph.table(node)
            if graph.fits(node, table):
                first = graph.missing(node) if fill else table
            else:
                # After all others, the largest last, so that hubs are fixed as late as possible.
                first, table = math.inf, math.prod(sizes[member] for member in (node, *graph.neighbours[node]))
            # Positions in the graph break ties, so that equal layers are eliminated from one end to the other.
            return node in last, first, table, place[node]

        # The hub is fixed, such as the attention mask that every layer reads.
        graph = EliminationGraph(sizes, neighbours, cells, reduced=True)
        return greedy_order(graph, score, lambda graph, node: (len(graph.neighbours[node]), -node))

    # Compute both: neither is always better, and an order costs far less than the frontier.
    return min(order(False), order(True), key=lambda order: (len(order.conditioned), order.entries))


def _farthest(neighbours: Mapping[int, Iterable[int]], node: int) -> int:
    """Return an end of the graph: the node farthest from the node farthest from this one."""
    # Exact on trees, and good enough elsewhere: it only breaks ties.
    for _ in range(2):
        node = next(reversed(_distances(neighbours, node)))
    return node


def _distances(neighbours: Mapping[int, Iterable[int]], start: int) -> dict[int, int]:
    """Return the steps from a node to all reachable nodes, the nearest first."""
    distance = {start: 0}
    layer = [start]
    while layer:
        layer = sorted({neighbour for node in layer for neighbour in neighbours[node]} - distance.keys())
        distance.update(dict.fromkeys(layer, 1 + next(reversed(distance.values()))))
    return distance
