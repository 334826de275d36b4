"""Search for good assignments of problems too wide for one exact pass: axis by axis, then large neighbourhoods."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.eliminate import WidthError, eliminate, run_order
from autoshard.solver.elimination_order import conditioned_order
from autoshard.solver.network import Network, fold
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.solver_budget import UNLIMITED, Budget

_ORDERS = 6
"""Orders of mesh axes tried as starts: all of them up to three axes."""

_AXIS_CAP = 10_000_000
"""Entries of a table when one axis is solved."""

_NEIGHBOURHOOD_CAP = 200_000
"""Entries of a table when a neighbourhood is solved."""

_AXIS_WORK, _ROUND_WORK = 5, 20
"""Units of work of an axis and of a neighbourhood per table entry of the network."""

_IMPROVEMENT = 1e-12
"""Relative improvement below which an assignment is no better: the rounding of sums."""


@dataclass(frozen=True, slots=True)
class ScoredAssignment:
    """An assignment (node -> strategy of the problem) and its cost; empty and `inf` where none is known."""

    choices: dict[int, int]
    cost: float

    def improves(self, other: ScoredAssignment) -> bool:
        """Return True if this assignment is better by more than rounding."""
        if not np.isfinite(other.cost):
            return bool(np.isfinite(self.cost))
        return self.cost < other.cost - _IMPROVEMENT * abs(other.cost)


NO_ASSIGNMENT = ScoredAssignment({}, float("inf"))


def cheaper_of(first: ScoredAssignment, second: ScoredAssignment) -> ScoredAssignment:
    """Return the cheaper assignment, the first one if they are equal up to rounding."""
    return second if second.improves(first) else first


def alternate(
    network: Network,
    components: Sequence[IntArray],
    *,
    start: ScoredAssignment = NO_ASSIGNMENT,
    budget: Budget = UNLIMITED,
) -> ScoredAssignment:
    """Solve one mesh axis after another exactly, with fixed labels on the others, until no axis improves.

    Every order of axes gives a start: the first axis is solved as if the others could be chosen freely at every node
    and edge, the second one given the first, and so on. Under the fixed labels a node always keeps its current
    strategy, so the cost never rises.

    Args:
        network: the problem as a network, not reduced.
        components: per node labels [strategies of the problem, mesh axes].
        start: a known assignment.
        budget: no further exact solve starts after its end.
    """
    labels = [network.tables.intern(array) for array in components]
    axes = labels[0].shape[1] if labels else 0
    best = axis_by_axis(network, components, start, budget=budget) if start.choices else start
    for sequence in itertools.islice(itertools.permutations(range(axes)), _ORDERS):
        if budget.is_over:
            break
        budget.spend(_AXIS_WORK * axes * network.cells)
        candidate = _initial_assignment(network, labels, sequence)
        if np.isfinite(candidate.cost):
            best = cheaper_of(best, _descend(network, labels, candidate, sequence, budget))
    return best


def axis_by_axis(
    network: Network, components: Sequence[IntArray], start: ScoredAssignment, *, budget: Budget = UNLIMITED
) -> ScoredAssignment:
    """Improve a known assignment one mesh axis after another, until no axis improves it; see `alternate`."""
    labels = [network.tables.intern(array) for array in components]
    axes = labels[0].shape[1] if labels else 0
    return _descend(network, labels, start, tuple(range(axes)), budget)


def _initial_assignment(network: Network, labels: list[IntArray], sequence: tuple[int, ...]) -> ScoredAssignment:
    """Solve the axes in sequence, each under the labels chosen before and with the later axes free."""
    remaining = network
    for axis in sequence:
        projected = _project_axis(remaining, labels, axis)
        try:
            exact = eliminate(projected, cap=_AXIS_CAP)
        except WidthError:
            return NO_ASSIGNMENT
        if not exact.choices:
            return NO_ASSIGNMENT
        # Later axes choose among the strategies with the label that this axis has just got.
        rows = {
            node: np.flatnonzero(labels[node][remaining.labels[node], axis] == exact.choices[node])
            for node in remaining.vectors
        }
        remaining = remaining.restrict(rows)
    # Strategies may have equal labels on all axes: the cheapest of them is taken.
    choices = {
        node: int(node_labels[remaining.vectors[node].argmin()]) for node, node_labels in remaining.labels.items()
    }
    return ScoredAssignment(remaining.expand(choices), network.value(choices))


def _project_axis(network: Network, labels: list[IntArray], axis: int) -> Network:
    """Return the network whose strategies are the labels of one axis, each at its least cost."""
    tables = network.tables
    result = Network(tables, offset=network.offset)
    groups: dict[int, tuple[IntArray, IntArray]] = {}
    for node, node_labels in network.labels.items():
        operands = labels[node], node_labels
        names = tables.compute(f"axis {axis}", operands, lambda pair=operands: pair[0][pair[1], axis])  # type: ignore[misc]
        order, starts = tables.compute("groups", (names,), lambda names=names: _groups(names))  # type: ignore[misc]
        groups[node] = (order, starts)
        result.labels[node] = tables.compute("names", (names,), lambda names=names: tables.intern(np.unique(names)))  # type: ignore[misc]
        result.edges[node] = {}
        result.vectors[node] = tables.compute(
            "project",
            (network.vectors[node], order),
            lambda n=node, o=order, s=starts: tables.intern(np.minimum.reduceat(network.vectors[n][o], s)),  # type: ignore[misc]
        )
    for node, neighbours in network.edges.items():
        for neighbour, table in neighbours.items():
            if node < neighbour:
                result.add_edge(node, neighbour, _project_table(network, table, groups[node], groups[neighbour]))
    return result


def _groups(labels: IntArray) -> tuple[IntArray, IntArray]:
    """Return the positions sorted by label, and the start of each label in them."""
    order = np.argsort(labels, kind="stable")
    return order, np.flatnonzero(np.diff(labels[order], prepend=labels[order[0]] - 1))


def _project_table(
    network: Network, table: Array, rows: tuple[IntArray, IntArray], columns: tuple[IntArray, IntArray]
) -> Array:
    def compute() -> Array:
        # Minima of nodes and edges apart from each other: the projection is a relaxation in which the other axes are
        # chosen anew for every node and edge. It guides the first labels only; costs are exact from `_descend` on.
        least = np.minimum.reduceat(table[rows[0]], rows[1], axis=0)
        return network.tables.intern(np.minimum.reduceat(least[:, columns[0]], columns[1], axis=1))

    return network.tables.compute("project table", (table, rows[0], columns[0]), compute)


def _descend(
    network: Network, labels: list[IntArray], start: ScoredAssignment, sequence: tuple[int, ...], budget: Budget
) -> ScoredAssignment:
    """Solve axis after axis in turn, until a whole round improves nothing."""
    best = start
    unimproved = 0
    for axis in itertools.cycle(sequence):
        if unimproved >= len(sequence) or budget.is_over:
            break
        candidate = _solve_axis(network, labels, best, axis, budget)
        unimproved = 0 if candidate.improves(best) else unimproved + 1
        best = cheaper_of(best, candidate)
    return best


def _solve_axis(
    network: Network, labels: list[IntArray], current: ScoredAssignment, axis: int, budget: Budget
) -> ScoredAssignment:
    """Return the optimum over one axis, with every node keeping its labels on the others."""
    tables = network.tables
    rows = {}
    for node, node_labels in network.labels.items():
        labels_left = tables.take_entries(labels[node], node_labels)
        current_place = int(node_labels.searchsorted(current.choices[node]))
        same = labels_left == labels_left[current_place]
        # Agreement on every other axis.
        same[:, axis] = True
        rows[node] = np.flatnonzero(same.all(1))
    restricted = network.restrict(rows)
    budget.spend(_AXIS_WORK * network.cells)
    try:
        exact = eliminate(restricted, cap=_AXIS_CAP)
    except WidthError:
        # Too wide for one exact pass: one neighbourhood in its place.
        return improve(restricted, current, rounds=1, budget=budget)
    return ScoredAssignment(exact.choices, exact.cost)


def improve(
    network: Network,
    start: ScoredAssignment,
    *,
    rounds: int = 40,
    patience: int = 4,
    cap: float = _NEIGHBOURHOOD_CAP,
    budget: Budget = UNLIMITED,
) -> ScoredAssignment:
    """Change most nodes at once: fix some, so that the rest is narrow enough to be solved exactly.

    Each round fixes other nodes: those that were fixed before are fixed more reluctantly. So a node, pair, chain or
    tree that can be improved is, once all of it is free.

    Args:
        network: left as it is.
        start: a finite assignment of the network (removed nodes included).
        rounds: neighbourhoods at most.
        patience: neighbourhoods without improvement after which the search ends.
        cap: entries of a table.
        budget: no further round starts after its end.
    """
    # Only folding: the start may use a dominated strategy, which `reduce` would drop.
    core = fold(network.copy())
    sizes = {node: len(vector) for node, vector in core.vectors.items()}
    reluctance: Counter[int] = Counter()
    best, failures = start, 0
    for _ in range(rounds):
        if failures >= patience or budget.is_over:
            break
        order = conditioned_order(sizes, core.edges, cap, reluctance)
        reluctance.update(order.conditioned)
        free = core.copy()
        for node in order.conditioned:
            # Its one strategy's costs go to its neighbours.
            place = int(free.labels[node].searchsorted(best.choices[node]))
            free.keep(node, np.array([place]))
            free.offset += float(free.vectors[node][0])
            for neighbour, table in free.edges[node].items():
                free.add_costs(neighbour, table[0])
            free.remove(node)
        # What is free is narrow now: its optimum beside the held nodes is exact, and never worse than the start.
        choices, cost = run_order(free, order)
        budget.spend(_ROUND_WORK * core.cells)
        candidate = ScoredAssignment(free.expand(choices), cost + free.offset) if np.isfinite(cost) else NO_ASSIGNMENT
        failures = 0 if candidate.improves(best) else failures + 1
        best = cheaper_of(best, candidate)
        if not order.conditioned:
            # Nothing was fixed: this is the optimum.
            break
    return best


def soften(network: Network) -> Network:
    """Return a copy in which forbidden pairs have a finite cost above that of all allowed choices together."""
    tables = network.tables
    finite = [table[np.isfinite(table)] for around in network.edges.values() for table in around.values()]
    finite += [vector[np.isfinite(vector)] for vector in network.vectors.values()]
    # Twice the sum of all costs: no choice of allowed pairs differs from another by more.
    penalty = 1.0 + 2.0 * sum(float(np.abs(values).max(initial=0.0)) for values in finite)
    soft = network.copy()
    for node, around in network.edges.items():
        for neighbour, table in around.items():
            if node < neighbour and np.isinf(table).any():
                allowed = tables.intern(np.where(np.isinf(table), penalty, table))
                soft.edges[node][neighbour] = allowed
                soft.edges[neighbour][node] = soft.tables.transpose(allowed)
    return soft
