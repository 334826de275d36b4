"""Lower bounds by sequential tree-reweighted message passing (TRW-S), and proofs of optimality by them.

The bound is for the problem and for each strategy. A proof drops the strategies that no better assignment uses, and
solves the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.eliminate import DEFAULT_CAP, WidthError, eliminate
from autoshard.solver.local_search import ScoredAssignment, cheaper_of, improve
from autoshard.solver.network import Network, reduce
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.solver_budget import UNLIMITED, StepBudget

_ROUNDING = 1e-11
"""Relative slack subtracted from every bound, for the rounding of sums of many floats."""

_BYTES = 500_000_000
"""Most bytes of padded edge tables; larger networks get the trivial bound."""

_WORK = 4
"""Units of work of an iteration per table entry: a pass each way, with reads and writes."""

_PATIENCE = 8
"""Iterations over which progress is judged; a guess that works."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of a network.

    Attributes:
        value: no assignment of the network costs less.
        floors: node -> per remaining strategy, a lower bound of all assignments that use it.
        choices: the best assignment rounded meanwhile (node -> strategy of the problem), including the nodes that were
            reduced away; empty if none was finite.
        cost: its cost in the network.
        iterations: number of forward and backward passes.
    """

    value: float
    floors: dict[int, Array]
    choices: dict[int, int]
    cost: float
    iterations: int


def trivial_bound(network: Network) -> Bound:
    """Return the sum of the minima of nodes and edges: a bound of any network, at no cost."""
    slack = {node: vector.copy() for node, vector in network.vectors.items()}
    value = network.offset
    for node, neighbours in network.edges.items():
        for neighbour, table in neighbours.items():
            if node < neighbour:
                value += float(table.min())
                # The row minima above the least one are due if the node takes that row. One end of the edge may claim
                # them.
                slack[node] = slack[node] + (table.min(1) - table.min())
    total = value + sum(float(vector.min()) for vector in slack.values())
    floors = {node: total + vector - vector.min() for node, vector in slack.items()}
    return Bound(_subtract_rounding(total), floors, {}, float("inf"), 0)


def lower_bound(
    core: Network, *, upper: float = float("inf"), iterations: int = 200, budget: StepBudget = UNLIMITED
) -> Bound:
    """Return a lower bound of a reduced network.

    The nodes are ordered, and the graph is covered by chains that ascend in that order. Messages solve each chain
    exactly, and the costs of a node are shared evenly by its chains. The bound is the sum of the chains' optima, which
    a pass forward and a pass backward never lower. Nodes that do not depend on each other within a pass are handled
    together.

    Args:
        core: a feasible network after `reduce` (every strategy supported by every neighbour).
        upper: cost of a known assignment: the search ends when the bound reaches it.
        iterations: forward and backward passes, at most.
        budget: no further iteration starts after its end.

    Source: V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006.
    """
    linked = [node for node in core.vectors if core.edges[node]]
    widest = max((len(core.vectors[node]) for node in linked), default=0)
    distinct = {id(t) for node in linked for neighbour, t in core.edges[node].items() if node < neighbour}
    # Tables are padded to the widest node, so that one numpy call handles a level; a few very wide nodes could exhaust
    # memory.
    if not linked or len(distinct) * widest * widest * 8 > _BYTES:
        return trivial_bound(core)
    chains = _Chains(core, linked, widest)
    best, floors = -np.inf, np.zeros((0, 0))
    rounded, rounded_cost = chains.no_choice, np.inf
    history: list[float] = []
    cells = core.cells
    for iteration in range(1, iterations + 1):
        chains.forward()
        chains.backward()
        value = chains.value()
        if value > best:
            # Floors hold for the messages of one pass: they are kept together with the bound that these gave.
            best, floors = value, chains.floors(value)
        # Rounding costs about a pass, and changes little from one pass to the next.
        if iteration % 5 == 1:
            choice, cost = chains.round_assignment()
            if cost < rounded_cost:
                rounded, rounded_cost = choice, cost
        history.append(best)
        budget.spend(_WORK * cells)
        # Messages see only linked nodes: what the offset and isolated nodes add is the same for every assignment of
        # these.
        target = upper - core.offset - chains.isolated
        if best >= min(target, rounded_cost) - 1e-9 * abs(target if np.isfinite(target) else best):
            break
        if _is_stalled(history, min(target, rounded_cost)) or budget.is_over:
            break
    return chains.bound(best, floors, rounded, rounded_cost, len(history))


def _is_stalled(history: list[float], target: float) -> bool:
    """Return True if the last iterations closed less than a hundredth of the distance to a known assignment."""
    if len(history) <= _PATIENCE or not np.isfinite(target):
        return False
    gained = history[-1] - history[-1 - _PATIENCE]
    return gained < 0.01 * (target - history[-1 - _PATIENCE])


def _subtract_rounding(value: float) -> float:
    return value - _ROUNDING * abs(value)


class _Chains:
    """The network as padded arrays; rows are nodes in an order of levels without edges inside a level.

    One array holds all messages: row e is the message of edge e to its later node, row m + e that to its earlier node.
    They are never normalised, so that at any time costs = reparametrised nodes + reparametrised edges exactly.
    """

    def __init__(self, core: Network, linked: list[int], widest: int) -> None:
        self.core = core
        self.nodes, levels = _sort_into_levels(core, linked)
        self.row = {node: row for row, node in enumerate(self.nodes)}
        self.sizes = [len(core.vectors[node]) for node in self.nodes]
        # Padded strategies are forbidden: they never are a minimum of a node.
        self.unary = np.full((len(self.nodes), widest), np.inf)
        for row, node in enumerate(self.nodes):
            self.unary[row, : self.sizes[row]] = core.vectors[node]
        self.isolated = sum(float(v.min()) for node, v in core.vectors.items() if node not in self.row)
        self._collect_edges(widest)
        into = np.bincount(self.later, minlength=len(self.nodes))
        out = np.bincount(self.earlier, minlength=len(self.nodes))
        self.share = 1.0 / np.maximum(np.maximum(into, out), 1)
        self.ends_after = 1.0 - out * self.share
        self.ends_before = 1.0 - into * self.share
        self.messages = np.zeros((2 * len(self.earlier), widest))
        self.belief = self.unary.copy()
        self.forward_minimum = np.zeros(len(self.nodes))
        self.no_choice = np.zeros(len(self.nodes), dtype=np.int64)
        self._plan_levels(levels)

    def _collect_edges(self, widest: int) -> None:
        ends: list[tuple[int, int, int]] = []
        stack: list[Array] = []
        index: dict[int, int] = {}
        for node in self.nodes:
            for neighbour, table in self.core.edges[node].items():
                if self.row[node] < self.row[neighbour]:
                    if id(table) not in index:
                        index[id(table)] = len(stack)
                        stack.append(table)
                    ends.append((self.row[node], self.row[neighbour], index[id(table)]))
        self.earlier, self.later, self.table = np.array(ends, dtype=np.int64).reshape(-1, 3).T.copy()
        # Padded pairs cost nothing; the infinite costs of padded nodes keep them out of every minimum.
        self.stack = np.zeros((len(stack), widest, widest))
        for place, table in enumerate(stack):
            self.stack[place, : table.shape[0], : table.shape[1]] = table

    def _plan_levels(self, levels: list[slice]) -> None:
        """Compute per level its rows, the messages into it grouped by row, and the edges that leave it either way."""
        count = len(self.earlier)
        receivers = np.concatenate([self.later, self.earlier])
        order = np.argsort(receivers, kind="stable")
        starts = np.searchsorted(receivers[order], np.arange(len(self.nodes) + 1))
        self.levels = []
        for rows in levels:
            incoming = order[starts[rows.start] : starts[rows.stop]]
            # Sorted by receiver, the messages into a level are consecutive, and one `reduceat` sums them per row.
            groups = starts[rows.start : rows.stop] - starts[rows.start]
            up = self._group_by_width(incoming[incoming >= count] - count)
            down = self._group_by_width(incoming[incoming < count])
            self.levels.append((rows, incoming, groups, up, down))

    def _group_by_width(self, edges: IntArray) -> list[tuple[int, IntArray]]:
        """Group edges by the number of strategies of their wider end, rounded up to a power of two."""
        # Few nodes are wide. The others should not pay for their padding.
        sizes = np.array(self.sizes)
        wider = np.maximum(sizes[self.earlier[edges]], sizes[self.later[edges]])
        width = np.minimum(1 << np.ceil(np.log2(wider)).astype(np.int64), self.unary.shape[1])
        return [(int(value), edges[width == value]) for value in np.unique(width)]

    def forward(self) -> None:
        """Send messages to later nodes; afterwards the chains' optima are the beliefs where chains end."""
        for rows, incoming, groups, up, _ in self.levels:
            self._gather(rows, incoming, groups)
            for width, edges in up:
                self._send(edges, width, 1)
        self.forward_minimum = self.belief.min(1)

    def backward(self) -> None:
        """Send messages to earlier nodes; afterwards the chains' optima are the beliefs where chains begin."""
        for rows, incoming, groups, _, down in reversed(self.levels):
            self._gather(rows, incoming, groups)
            for width, edges in down:
                self._send(edges, width, 2)

    def _gather(self, rows: slice, incoming: IntArray, groups: IntArray) -> None:
        self.belief[rows] = self.unary[rows] + np.add.reduceat(self.messages[incoming], groups, axis=0)

    def _send(self, edges: IntArray, width: int, axis: int) -> None:
        """Send messages along edges from the ends of table axis `axis` - 1 (1: the earlier, 2: the later nodes)."""
        back = len(self.earlier) + edges
        sender, received, target = (self.earlier[edges], back, edges) if axis == 1 else (self.later[edges], edges, back)
        # A sender leaves out the message that came along the same edge, lest it be counted twice.
        share = self.share[sender][:, None] * self.belief[sender, :width] - self.messages[received, :width]
        spread = share[:, :, None] if axis == 1 else share[:, None, :]
        self.messages[target, :width] = (spread + self.stack[self.table[edges], :width, :width]).min(axis)

    def value(self) -> float:
        """Return the sum of the chains' optima after a backward pass."""
        return float(self.ends_before @ self.belief.min(1))

    def floors(self, value: float) -> Array:
        """Return per row and strategy the bound of all assignments in which the row takes that strategy."""
        # Valid after a forward and a backward pass. Of the chains that do not contain the row, those that end before it
        # have their optimum in the forward minima, those that begin after it in the backward minima, and those that an
        # edge carries past it in the backward minimum of the edge's later node.
        minimum = self.belief.min(1)
        optima_before = np.cumsum(self.ends_after * self.forward_minimum) - self.ends_after * self.forward_minimum
        optima_after = self.ends_before * minimum
        optima_after = np.cumsum(optima_after[::-1])[::-1] - optima_after
        # An edge crosses the rows between its ends: a difference array, summed up below.
        crossing = np.zeros(len(self.nodes) + 1)
        carried = self.share[self.later] * minimum[self.later]
        np.add.at(crossing, self.earlier + 1, carried)
        np.subtract.at(crossing, self.later, carried)
        floors: Array = self.belief + (optima_before + optima_after + np.cumsum(crossing)[:-1])[:, None]
        # The bound of all assignments holds for those with the strategy too.
        return np.maximum(floors, value)

    def round_assignment(self) -> tuple[IntArray, float]:
        """Choose for each node, in order, the best for its earlier neighbours and later messages; return the cost."""
        count = len(self.earlier)
        choice = self.no_choice.copy()
        total = 0.0
        for rows, incoming, groups, _, _ in self.levels:
            costs = self.messages[incoming]
            from_earlier = np.flatnonzero(incoming < count)
            # Messages from earlier nodes give way to the cost of the edge beside the choice made there.
            edges = incoming[from_earlier]
            pairs = self.stack[self.table[edges], choice[self.earlier[edges]]]
            costs[from_earlier] = pairs
            choice[rows] = (self.unary[rows] + np.add.reduceat(costs, groups, axis=0)).argmin(1)
            if len(from_earlier):
                owner = self.later[edges]
                total += float(pairs[np.arange(len(edges)), choice[owner]].sum())
        total += float(self.unary[np.arange(len(choice)), choice].sum())
        return choice, total

    def bound(self, best: float, floors: Array, choice: IntArray, cost: float, iterations: int) -> Bound:
        """Return the result in the network's terms, with isolated nodes and the offset."""
        constant = self.core.offset + self.isolated
        total = best + constant
        by_node = {node: floors[row, : self.sizes[row]] + constant for row, node in enumerate(self.nodes)}
        choices = {node: int(self.core.labels[node][choice[row]]) for row, node in enumerate(self.nodes)}
        for node, vector in self.core.vectors.items():
            # An isolated node adds the difference of its costs to the bound.
            if node not in self.row:
                by_node[node] = total + vector - vector.min()
                choices[node] = int(self.core.labels[node][vector.argmin()])
        expanded = self.core.expand(choices) if np.isfinite(cost) else {}
        return Bound(_subtract_rounding(total), by_node, expanded, cost + constant, iterations)


def _sort_into_levels(core: Network, linked: list[int]) -> tuple[list[int], list[slice]]:
    """Sort nodes into levels: the level of a node is one more than the highest of its neighbours before it."""
    level: dict[int, int] = {}
    # In ascending order of nodes, an edge always leads to a later level, so that nodes of one level never depend on
    # each other.
    for node in sorted(linked):
        level[node] = 1 + max((level[neighbour] for neighbour in core.edges[node] if neighbour in level), default=-1)
    nodes = sorted(linked, key=lambda node: (level[node], node))
    slices = []
    start = 0
    for stop in range(1, len(nodes) + 1):
        if stop == len(nodes) or level[nodes[stop]] != level[nodes[start]]:
            slices.append(slice(start, stop))
            start = stop
    return nodes, slices


TOLERANCE = 1e-9
"""Relative difference in cost below which two assignments count as equally good."""


@dataclass(frozen=True, slots=True)
class CertifyResult:
    """An assignment with a bound, and the network of strategies that a better one may use.

    Attributes:
        best: the best assignment known.
        bound: no assignment costs less; equal to the cost where the optimum is proved.
        rest: strategies that may still be in a better assignment; None where the optimum is proved.
    """

    best: ScoredAssignment
    bound: float
    rest: Network | None


def certify(
    network: Network,
    start: ScoredAssignment,
    *,
    cap: float = DEFAULT_CAP,
    budget: StepBudget = UNLIMITED,
    rounds: int = 12,
) -> CertifyResult:
    """Improve an assignment and its bound in turn, until they meet or nothing moves.

    A strategy is dropped if its floor, the bound of all assignments that use it, reaches the cost of the best
    assignment. That reduces the network, which tightens the next bound. A network that is narrow enough is solved
    exactly.

    Args:
        network: left as it is.
        start: a known assignment, `NO_ASSIGNMENT` if none is known.
        cap: entries of a table for the exact solve.
        budget: no further round starts after its end.
        rounds: bounds computed, at most.
    """
    best, proved = start, -np.inf
    rest = network.copy()
    for _ in range(rounds):
        rest = reduce(rest)
        # Strategies were dropped only where no better assignment uses them: nothing left means that the best one is
        # optimal.
        if not rest.feasible:
            return CertifyResult(best, best.cost, None)
        try:
            exact = eliminate(rest, cap=cap)
            best = cheaper_of(best, ScoredAssignment(exact.choices, exact.cost))
            return CertifyResult(best, best.cost, None)
        except WidthError:
            # Too wide: bound it.
            pass
        bound = lower_bound(rest, upper=best.cost, budget=budget)
        proved = max(proved, min(bound.value, best.cost))
        improved = best
        # An assignment far above the best one is not worth the time; a tenth is a guess that works.
        if bound.choices and bound.cost <= best.cost + abs(best.cost) * 0.1:
            candidate = ScoredAssignment(bound.choices, bound.cost)
            # In the whole network: the rounded assignment may be improved by strategies that were dropped from the
            # rest.
            improved = cheaper_of(best, improve(network, candidate, budget=budget))
        progress = improved.improves(best)
        best = improved
        if proved >= _target(best):
            return CertifyResult(best, best.cost, None)
        target = _target(best)
        fixed = rest.restrict({node: np.flatnonzero(floor < target) for node, floor in bound.floors.items()})
        old, new = (sum(map(len, part.vectors.values())) for part in (rest, fixed))
        # One strategy in fifty must go for another round; a guess that works.
        if budget.is_over or budget.is_close(best.cost, proved) or not (progress or new < 0.98 * old):
            return CertifyResult(best, proved, fixed)
        rest = fixed
    return CertifyResult(best, proved, rest)


def _target(best: ScoredAssignment) -> float:
    """Return the bound that proves the assignment."""
    return best.cost - TOLERANCE * abs(best.cost) if np.isfinite(best.cost) else float("inf")
