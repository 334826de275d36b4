"""Good assignments for problems too wide for one exact pass: axis by axis, then large exact neighbourhoods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations

import numpy as np

from autoshard.solver.eliminate import WidthError, eliminate, run_order
from autoshard.solver.elimination_order import conditioned_order
from autoshard.solver.network import Network
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.reduce import fold
from autoshard.solver.solver_budget import UNLIMITED, StepBudget

_ORDERS = 6
"""Axis orders tried as starts: all of them up to three mesh axes."""

_AXIS_CAP = 10_000_000
"""Entries of a table when one axis is solved."""

_NEIGHBOURHOOD_CAP = 200_000
"""Entries of a table when a neighbourhood is solved."""

_AXIS_WORK, _ROUND_WORK = 5, 20
"""Units of work per table entry of the network that an axis and a neighbourhood are counted as."""

_IMPROVEMENT = 1e-12
"""Relative improvement below which an assignment counts as no better: the rounding of sums."""


@dataclass(frozen=True, slots=True)
class ScoredAssignment:
    """An assignment (node -> strategy of the problem) and its cost; empty and `inf` where none is known."""

    choices: dict[int, int]
    cost: float

    def improves(self, other: ScoredAssignment) -> bool:
        """Whether this one is better by more than rounding."""
        if not np.isfinite(other.cost):
            return bool(np.isfinite(self.cost))
        return self.cost < other.cost - _IMPROVEMENT * abs(other.cost)


NO_ASSIGNMENT = ScoredAssignment({}, float("inf"))


def cheaper_of(first: ScoredAssignment, second: ScoredAssignment) -> ScoredAssignment:
    """The cheaper of two, the first one if they are equal up to rounding."""
    return second if second.improves(first) else first


def alternate(
    network: Network,
    components: Sequence[IntArray],
    *,
    start: ScoredAssignment = NO_ASSIGNMENT,
    stretch: StepBudget = UNLIMITED,
) -> ScoredAssignment:
    """Solves one mesh axis after another exactly, the labels of the other axes held, until no axis improves.

    From every axis order a start is made: the first axis is solved as if the others could be chosen freely at every
    node and edge, the second one given the first, and so on. Restricting a node to the labels held always keeps
    its current strategy, so the cost never rises.

    Args:
        network: the problem as a network, not reduced.
        components: per node labels [strategies of the problem, mesh axes].
        start: a known assignment.
        stretch: after whose end no further exact solve starts.
    """
    labels = [network.tables.intern(array) for array in components]
    axes = labels[0].shape[1] if labels else 0
    best = axis_by_axis(network, components, start, stretch=stretch) if start.choices else start
    for sequence in islice(permutations(range(axes)), _ORDERS):
        if stretch.is_over:
            break
        stretch.spend(_AXIS_WORK * axes * network.cells)
        found = _initial_assignment(network, labels, sequence)
        if np.isfinite(found.cost):
            best = cheaper_of(best, _descend(network, labels, found, sequence, stretch))
    return best


def axis_by_axis(
    network: Network, components: Sequence[IntArray], start: ScoredAssignment, *, stretch: StepBudget = UNLIMITED
) -> ScoredAssignment:
    """One mesh axis after another from a known assignment only, until no axis improves it; see `alternate`."""
    labels = [network.tables.intern(array) for array in components]
    axes = labels[0].shape[1] if labels else 0
    return _descend(network, labels, start, tuple(range(axes)), stretch)


def _initial_assignment(network: Network, labels: list[IntArray], sequence: tuple[int, ...]) -> ScoredAssignment:
    """A start: axes solved in sequence, each under the labels chosen before, the later ones assumed free."""
    remaining = network
    for axis in sequence:
        projected = _project_axis(remaining, labels, axis)
        try:
            exact = eliminate(projected, cap=_AXIS_CAP)
        except WidthError:
            return NO_ASSIGNMENT
        if not exact.choices:
            return NO_ASSIGNMENT
        rows = {
            node: np.flatnonzero(labels[node][remaining.labels[node], axis] == exact.choices[node])
            for node in remaining.vectors
        }
        remaining = remaining.restrict(rows)
    choices = {node: int(left[remaining.vectors[node].argmin()]) for node, left in remaining.labels.items()}
    return ScoredAssignment(remaining.expand(choices), network.value(choices))


def _project_axis(network: Network, labels: list[IntArray], axis: int) -> Network:
    """The network whose strategies are the labels of one axis, each at the least cost that it allows."""
    tables = network.tables
    result = Network(tables, offset=network.offset)
    groups: dict[int, tuple[IntArray, IntArray]] = {}
    for node, left in network.labels.items():
        own = tables.once(f"axis {axis}", (labels[node], left), lambda n=node, le=left: labels[n][le, axis])  # type: ignore[misc]
        order, starts = tables.once("groups", (own,), lambda own=own: _groups(own))  # type: ignore[misc]
        groups[node] = (order, starts)
        result.labels[node] = tables.once("names", (own,), lambda own=own: tables.intern(np.unique(own)))  # type: ignore[misc]
        result.edges[node] = {}
        result.vectors[node] = tables.once(
            "project",
            (network.vectors[node], order),
            lambda n=node, o=order, s=starts: tables.intern(np.minimum.reduceat(network.vectors[n][o], s)),  # type: ignore[misc]
        )
    for node, neighbours in network.edges.items():
        for other, table in neighbours.items():
            if node < other:
                result.add_edge(node, other, _project_table(network, table, groups[node], groups[other]))
    return result


def _groups(labels: IntArray) -> tuple[IntArray, IntArray]:
    """Positions sorted by label, and where each label starts."""
    order = np.argsort(labels, kind="stable")
    return order, np.flatnonzero(np.diff(labels[order], prepend=labels[order[0]] - 1))


def _project_table(
    network: Network, table: Array, rows: tuple[IntArray, IntArray], columns: tuple[IntArray, IntArray]
) -> Array:
    def compute() -> Array:
        least = np.minimum.reduceat(table[rows[0]], rows[1], axis=0)
        return network.tables.intern(np.minimum.reduceat(least[:, columns[0]], columns[1], axis=1))

    return network.tables.once("project table", (table, rows[0], columns[0]), compute)


def _descend(
    network: Network, labels: list[IntArray], start: ScoredAssignment, sequence: tuple[int, ...], stretch: StepBudget
) -> ScoredAssignment:
    """Axis after axis in turn, until a whole round brings nothing."""
    best = start
    unimproved = 0
    for axis in _cycle(sequence):
        if unimproved >= len(sequence) or stretch.is_over:
            return best
        found = _solve_axis(network, labels, best, axis, stretch)
        unimproved = 0 if found.improves(best) else unimproved + 1
        best = cheaper_of(best, found)
    return best


def _cycle(sequence: tuple[int, ...]) -> Iterator[int]:
    while sequence:
        yield from sequence


def _solve_axis(
    network: Network, labels: list[IntArray], current: ScoredAssignment, axis: int, stretch: StepBudget
) -> ScoredAssignment:
    """The optimum over one axis, every node keeping its labels on the others."""
    tables = network.tables
    rows = {}
    for node, left in network.labels.items():
        own = tables.once("labels", (labels[node], left), lambda n=node, le=left: tables.intern(labels[n][le]))  # type: ignore[misc]
        held = int(left.searchsorted(current.choices[node]))
        rows[node] = _agreeing_strategies(own, held, axis)
    restricted = network.restrict(rows)
    stretch.spend(_AXIS_WORK * network.cells)
    try:
        exact = eliminate(restricted, cap=_AXIS_CAP)
    except WidthError:
        return improve(restricted, current, rounds=1, stretch=stretch)
    return ScoredAssignment(exact.choices, exact.cost)


def _agreeing_strategies(labels: IntArray, position: int, axis: int) -> IntArray:
    """Positions of the strategies that agree with one of them on every axis but `axis`."""
    same = labels == labels[position]
    same[:, axis] = True
    return np.flatnonzero(same.all(1))


def improve(
    network: Network,
    start: ScoredAssignment,
    *,
    rounds: int = 40,
    patience: int = 4,
    cap: float = _NEIGHBOURHOOD_CAP,
    stretch: StepBudget = UNLIMITED,
) -> ScoredAssignment:
    """Changes most nodes at once: some are held so that the rest is narrow enough to be solved exactly.

    Each round holds other nodes: those that were held before are held more reluctantly. A single node, a pair, a
    chain or a tree that could be improved is, as soon as it lies among the nodes that are free.

    Args:
        network: left as it is.
        start: a finite assignment of the network (removed nodes included).
        rounds: neighbourhoods at most.
        patience: neighbourhoods without improvement after which the search ends.
        cap: entries of a table.
        stretch: after whose end no further round starts.
    """
    # No more than folding: the start may use a dominated strategy.
    core = fold(network.copy())
    sizes = {node: len(vector) for node, vector in core.vectors.items()}
    reluctance: Counter[int] = Counter()
    best, failures = start, 0
    for _ in range(rounds):
        if failures >= patience or stretch.is_over:
            break
        order = conditioned_order(sizes, core.edges, cap, reluctance)
        reluctance.update(order.conditioned)
        free = core.copy()
        for node in order.conditioned:
            _fix_node(free, node, best.choices[node])
        choices, cost = run_order(free, order)
        stretch.spend(_ROUND_WORK * core.cells)
        found = ScoredAssignment(free.expand(choices), cost + free.offset) if np.isfinite(cost) else NO_ASSIGNMENT
        failures = 0 if found.improves(best) else failures + 1
        best = cheaper_of(best, found)
        if not order.conditioned:
            break
    return best


def soften(network: Network) -> Network:
    """A copy where a forbidden pair of strategies costs more than all that is allowed together, but not infinity."""
    tables = network.tables
    finite = [table[np.isfinite(table)] for around in network.edges.values() for table in around.values()]
    finite += [vector[np.isfinite(vector)] for vector in network.vectors.values()]
    penalty = 1.0 + 2.0 * sum(float(np.abs(values).max(initial=0.0)) for values in finite)
    soft = network.copy()
    for node, around in network.edges.items():
        for other, table in around.items():
            if node < other and np.isinf(table).any():
                allowed = tables.intern(np.where(np.isinf(table), penalty, table))
                soft.edges[node][other] = allowed
                soft.edges[other][node] = soft.tables.transpose(allowed)
    return soft


def _fix_node(network: Network, node: int, choice: int) -> None:
    """Fixes a node and folds it into its neighbours."""
    place = int(network.labels[node].searchsorted(choice))
    network.keep(node, np.array([place]))
    network.offset += float(network.vectors[node][0])
    for other, table in network.edges[node].items():
        network.add_costs(other, table[0])
    network.remove(node)
