"""The memory-constrained integer program of Rhino, sections 4.2 and 4.4, on the core of a problem.

It has products of the choices of neighbours, and memory constraints that are added when they are violated.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.solver.core import Core
from autoshard.solver.linear import LinearProgram, minimise
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.solver_budget import UNLIMITED, Budget

_MAGNITUDE = 1e5
"""Costs are scaled to differences of about this size: the backend's tolerances are then below any real difference."""

_FEW = 100
"""Most moments for which all rows are added at the start."""

_ROWS = 12
"""Rows of memory added at a time."""

_WORK = 100
"""Units of work of a node of the search tree per table entry."""

_CELLS = 80_000
"""Most entries of edge tables of a core for the integer program."""


@dataclass(frozen=True, slots=True)
class CoreSolution:
    """A choice (None if none was found), a bound, True if the result is final, and the number of search nodes."""

    places: IntArray | None
    bound: float
    proved: bool
    nodes: int = 0


class CoreProgram:
    """The program of a core.

    X_us = 1 where node u takes strategy s; the product X_us X_vt of an edge is a continuous A_st whose rows sum to X_us
    and whose columns sum to X_vt. Rows of memory are added for the moments at which some answer exceeded the limit.

    Args:
        core: a feasible core.
        start: a known choice within the limit.
        moments: moments that have a row from the start.

    Source: Rhino 4.2, in the form of sums, which has the tightest relaxation of an edge.
    """

    def __init__(self, core: Core, start: IntArray | None, moments: IntArray) -> None:
        self.core = core
        self.start = start
        spread = float(np.abs(core.cost).mean()) * core.nodes if core.nodes else 0.0
        finite = core.table[np.isfinite(core.table)]
        spread += float(np.abs(finite).mean()) * len(core.ends) if len(finite) else 0.0
        self.scale = _MAGNITUDE / spread if spread else 1.0
        self.program = LinearProgram()
        self.nodes = self.program.add_variables(self.scale * core.cost, integer=True)
        for node in range(core.nodes):
            names = range(int(core.offset[node]), int(core.offset[node + 1]))
            self.program.add_row(names, np.ones(len(names)), 1.0, 1.0)
        self._pairs: list[tuple[range, IntArray]] = [self._edge(edge) for edge in range(len(core.ends))]
        self._rows: set[int] = set()
        self.add(moments)

    def _edge(self, edge: int) -> tuple[range, IntArray]:
        core = self.core
        source, target = core.ends[edge].tolist()
        table = core.table[core.start[edge] : core.start[edge + 1]].reshape(core.size[source], core.size[target])
        # Forbidden pairs have no product, so no solution contains them.
        places = np.argwhere(np.isfinite(table))
        products = self.program.add_variables(self.scale * table[tuple(places.T)])
        for column, node in enumerate((source, target)):
            for strategy in range(int(core.size[node])):
                members = np.flatnonzero(places[:, column] == strategy) + products.start
                name = int(core.offset[node]) + strategy
                self.program.add_row([*members.tolist(), name], np.append(np.ones(len(members)), -1.0), 0.0, 0.0)
        return products, places

    def add(self, moments: IntArray) -> bool:
        """Add rows of memory; return False if all of them exist already."""
        core = self.core
        fresh = [int(moment) for moment in moments if int(moment) not in self._rows]
        for moment in fresh:
            self._rows.add(moment)
            usages = np.zeros(len(core.cost))
            for item in np.flatnonzero((core.low <= moment) & (moment < core.high)).tolist():
                node, begin = int(core.item_node[item]), int(core.usage_start[item])
                width = int(core.size[node])
                usages[core.offset[node] : core.offset[node] + width] += core.usage[begin : begin + width]
            names = np.flatnonzero(usages)
            # In units of the limit: in bytes, the coefficients would be far outside the backend's tolerances.
            unit = max(abs(core.limit), 1.0)
            room = float(core.limit - core.base[moment]) / unit
            self.program.add_row(names, usages[names] / unit, -np.inf, room)
        return bool(fresh)

    def solve(self, *, time_limit: float, seed: int, nodes: int | None = None) -> CoreSolution:
        """Solve the program with its current rows: the bound is valid; the choice may exceed the limit elsewhere."""
        hint = None if self.start is None else self._values(self.start)
        answer = minimise(self.program, time_limit=time_limit, seed=seed, hint=hint, node_limit=nodes)
        if answer.infeasible:
            return CoreSolution(None, float("inf"), True, answer.nodes)
        bound = answer.bound / self.scale + self.core.constant if np.isfinite(answer.bound) else float("-inf")
        if answer.values is None:
            return CoreSolution(None, bound, False, answer.nodes)
        offset = self.core.offset
        places = [int(answer.values[low:high].argmax()) for low, high in pairwise(offset)]
        return CoreSolution(np.array(places, dtype=np.int64), bound, answer.optimal, answer.nodes)

    def _values(self, places: IntArray) -> Array:
        values = np.zeros(len(self.program.costs))
        values[self.core.offset[:-1] + places] = 1.0
        for (source, target), (products, cells) in zip(self.core.ends.tolist(), self._pairs, strict=True):
            chosen = (cells[:, 0] == places[source]) & (cells[:, 1] == places[target])
            values[products.start + np.flatnonzero(chosen)] = 1.0
        return values


def is_small(core: Core, budget: Budget) -> bool:
    """Return True if the integer program of a core can be solved within a budget."""
    return core.cells <= _CELLS and _root_work(core) <= budget.work


def _root_work(core: Core) -> float:
    """Return the work of the linear program at the root: 7,000 cells took 0.3 s, and 50,000 took 4 to 15."""
    return core.cells**2 / 2


def solve_core(
    core: Core,
    *,
    start: IntArray | None = None,
    moments: IntArray | None = None,
    budget: Budget = UNLIMITED,
    seed: int = 0,
) -> CoreSolution:
    """Solve the program of a core, adding rows of memory until the answer is within the limit.

    Args:
        core: a feasible core, preferably after `thin_memory`, which reduces rows.
        start: a known choice within the limit.
        moments: moments that have a row from the start; all if there are few.
        budget: ends the search.
        seed: of the backend.

    Returns:
        A choice within the limit, or None; the bound holds either way.
    """
    few = len(core.base) <= _FEW
    program = CoreProgram(core, start, np.arange(len(core.base)) if few or moments is None else moments)
    bound = float("-inf")
    while True:
        nodes = int(max(1.0, budget.work // (_WORK * max(core.cells, 1)))) if np.isfinite(budget.work) else None
        answer = program.solve(time_limit=min(budget.seconds, 1e6), seed=seed, nodes=nodes)
        budget.spend(_root_work(core) + _WORK * core.cells * answer.nodes)
        bound = max(bound, answer.bound)
        if answer.places is None:
            return CoreSolution(None, bound, answer.proved)
        violated = _violated_moments(core, answer.places)
        if not len(violated):
            return CoreSolution(answer.places, bound, answer.proved)
        if not program.add(violated) or not answer.proved or budget.is_over:
            # The backend keeps rows within a tolerance; the limit itself is exact.
            return CoreSolution(None, bound, False)


def _violated_moments(core: Core, places: IntArray) -> IntArray:
    """Return the moments at which a choice exceeds the limit most, one of each stretch of time."""
    excess = core.loads(places) - core.slack
    stretches = np.array_split(np.arange(len(excess)), min(_ROWS, len(excess))) if len(excess) else []
    worst = [int(stretch[excess[stretch].argmax()]) for stretch in stretches]
    return np.array([moment for moment in worst if excess[moment] > 0], dtype=np.int64)
