"""Solve of large problems: presolve, then bounds by prices and messages, alternating with neighbourhood search."""

from __future__ import annotations

from collections import deque

import numpy as np

from autoshard.solver.bound import TOLERANCE
from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.flat.descent import Descent
from autoshard.solver.flat.dual import Dual
from autoshard.solver.ilp import is_small, solve_core
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.presolve import presolve
from autoshard.solver.problem import Array, IntArray, Problem

_PASSES = 30
"""Passes of messages in one round."""

_INTEGER_TIME = 0.7
"""Share of the remaining time that the integer program may take."""

_WARM_UP_ROUNDS = 6
"""Rounds of messages and search before the integer program is tried."""

_MAX_ENDS = 24
"""Most ends of descents that are kept."""

_UNION_PASSES = 60
"""Passes of messages over the union of the best choice and these ends."""

_MESSAGES_ONLY_ROUNDS = 12
"""Rounds of only messages after the first round, where memory is limited: the search needs good prices."""

_UNION_PERIOD = 2
"""Rounds of search between two searches of a union."""

_SHRINK_SHARE = 0.25
"""Share of the strategies that must be ruled out for another presolve."""

_PATIENCE = 3
"""Neighbourhood searches in a row without improvement after which a start is abandoned."""


class LargeSolver:
    """The solve of one problem on flat arrays.

    Args:
        problem: with or without a limit.
        incumbent: records assignments and bounds; its budget ends the search.
        seed: of the random numbers.
        finish: True to search until the time is up, with the integer program where the core is small; False to end
            when the search stalls.
    """

    def __init__(self, problem: Problem, incumbent: Incumbent, *, seed: int = 0, finish: bool = True) -> None:
        self.problem = problem
        self.incumbent = incumbent
        self.budget = incumbent.budget
        self.seed = seed
        self.finish = finish

    def run(self) -> bool:
        """Search; return True if the best assignment is proved, or that there is none."""
        core = presolve(Core.of(self.problem), budget=self.budget.part(0.3))
        self.incumbent.report(f"presolve: {core.nodes} nodes, {len(core.ends)} edges, {len(core.base)} moments left")
        prices = np.zeros(len(core.base))
        while core.feasible:
            if not core.nodes:
                self.offer(core, np.zeros(0, dtype=np.int64), core.constant, "presolve")
                return True
            search = CoreSearch(self, core, prices)
            core, prices = search.run()
            if self.is_closed:
                return True
            if core is search.core:
                return False
        return True

    @property
    def is_closed(self) -> bool:
        """True if the bound has reached the cost."""
        incumbent = self.incumbent
        if not np.isfinite(incumbent.cost):
            return incumbent.lower_bound == np.inf
        return incumbent.lower_bound >= incumbent.cost - TOLERANCE * abs(incumbent.cost)

    def offer(self, core: Core, places: IntArray, cost: float, method: str) -> bool:
        """Record a choice for a core if it is feasible and the best so far; return False otherwise."""
        problem = self.problem

        def assignment() -> tuple[int, ...]:
            return tuple(core.expand(places).tolist())

        if not cost < self.incumbent.cost or not np.isfinite(cost):
            return False
        expanded = assignment()
        if not problem.feasible(expanded):
            # Rounding of float sums at the limit.
            return False
        return self.incumbent.offer(problem.cost(expanded), lambda: expanded, method)


class CoreSearch:
    """The search on one core, until it is solved or can be reduced."""

    def __init__(self, solver: LargeSolver, core: Core, prices: Array) -> None:
        self.solver = solver
        self.incumbent = solver.incumbent
        self.budget = solver.budget
        self.core = core
        self.view = CoreArrays.of(core)
        self.dual = Dual(core, self.view, prices)
        self.random = np.random.default_rng(solver.seed)
        self.descent: Descent | None = None
        self.ends: deque[IntArray] = deque(maxlen=_MAX_ENDS)
        self.idle = 0
        self.tried_integer = False

    def run(self) -> tuple[Core, Array]:
        """Bound and search in turn; return the core and prices to continue with, the same core if the search ended."""
        budget, incumbent, rounds = self.budget, self.incumbent, 0
        stalled = 0
        while not budget.is_over and not self.solver.is_closed:
            before = incumbent.cost, incumbent.lower_bound
            self._raise_bound()
            if budget.is_over:
                break
            rounds += 1
            # Without memory there are no prices to wait for. The first round searches, too, for an early assignment.
            if rounds == 1 or rounds >= _MESSAGES_ONLY_ROUNDS or not len(self.core.base):
                self._search(2 * _PASSES * self.core.cells)
            if rounds >= _MESSAGES_ONLY_ROUNDS and rounds % _UNION_PERIOD == 0:
                self._search_union(2 * _PASSES * self.core.cells)
            incumbent.report("search")
            gained = incumbent.lower_bound - before[1]
            moved = incumbent.cost < before[0] or gained > 1e-3 * abs(incumbent.cost - before[1])
            stalled = 0 if moved else stalled + 1
            if not self.solver.finish and stalled > _WARM_UP_ROUNDS:
                break
            if rounds >= _WARM_UP_ROUNDS and rounds % _WARM_UP_ROUNDS == 0:
                smaller = self._shrink_core()
                if smaller is not None:
                    return smaller
            small = self.solver.finish and is_small(self.core, budget)
            if rounds >= _WARM_UP_ROUNDS and small and not self.tried_integer:
                self.tried_integer = True
                if self._solve_integer_program():
                    incumbent.raise_bound(incumbent.cost)
        return self.core, self.dual.best_prices

    def _raise_bound(self) -> None:
        dual = self.dual
        descent_cost = self.descent.cost if self.descent is not None else float("inf")
        dual.cost = min(dual.cost, descent_cost)
        dual.run(_PASSES, patience=_PASSES, budget=self.budget)
        self.incumbent.raise_bound(dual.bound)
        if dual.best is not None:
            self.solver.offer(self.core, dual.best, self.core.value(dual.best), "prices")

    def _search(self, work: int) -> None:
        """Descend from a new rounding, then from the best choice, each with a share of work."""
        if self.descent is None:
            self.descent = Descent(self.core, self.view, abs(self.dual.bound) + 1.0, self.solver.seed)
        descent, best = self.descent, self.descent.best
        starts = [self.dual.round_choice()]
        if self.dual.best is not None:
            starts.append(self.dual.best)
        for start in starts:
            descent.begin(start, self.dual.best_prices)
            self._run_descent(work, until_stuck=True)
            if descent.is_within_limit:
                self.ends.append(descent.places.copy())
        if descent.best is not None:
            if descent.best is not best:
                self.idle = 0
            descent.begin(descent.best, self.dual.best_prices)
            self._run_descent(2 * work, until_stuck=False)

    def _search_union(self, work: int) -> None:
        """Search the union of the best choice, the ends of descents and recent roundings.

        A node keeps the strategies that one of these choices uses. If all agree, the node is decided, so the presolved
        core is small. It has separate prices, messages and neighbourhoods.
        """
        descent, budget = self.descent, self.budget
        assert descent is not None
        if descent.best is None or not self.ends:
            return
        kept = self.dual.recently_chosen(_PASSES)
        for places in (descent.best, *self.ends):
            kept[self.core.offset[:-1] + places] = True
        core = presolve(self.core.forbid(~kept), budget=budget.part(0.1))
        if not core.feasible or not core.nodes:
            return
        view = CoreArrays.of(core)
        dual = Dual(core, view, self._prices_at(core))
        dual.cost = descent.cost
        dual.run(_UNION_PASSES, patience=_UNION_PASSES, budget=budget)
        part = Descent(core, view, abs(dual.bound) + 1.0, self.solver.seed)
        for start in (core.contract(descent.best, self.core), dual.round_choice(), dual.best):
            if start is not None:
                part.begin(start, dual.best_prices)
                part.search(_PATIENCE, budget, work=work)
        if part.best is not None and part.cost < descent.cost:
            places = core.expand(part.best, self.core)
            descent.begin(places, self.dual.best_prices)
            self.solver.offer(self.core, places, descent.cost, "united")
            self._run_descent(work, until_stuck=True)

    def _prices_at(self, core: Core) -> Array:
        """Return the best prices at the moments of a core that was presolved from this one."""
        prices = np.zeros(len(core.base))
        if len(prices):
            places = np.minimum(np.searchsorted(core.moment, self.core.moment), len(prices) - 1)
            np.add.at(prices, places, self.dual.best_prices)
        return prices

    def _run_descent(self, work: int, *, until_stuck: bool) -> None:
        descent, budget = self.descent, self.budget
        assert descent is not None
        end, failures = descent.work + work, 0
        while descent.work < end and not budget.is_over and not self.solver.is_closed:
            before = descent.work
            heat = 0.0
            # After a while without improvement, every fourth run accepts worse choices, to leave a local optimum. The
            # temperature is drawn on a logarithmic scale, since no single one suits all problems.
            if not until_stuck and self.idle >= _PATIENCE and self.idle % 4 == 3:
                gap = max(descent.cost - self.incumbent.lower_bound, 0.0)
                heat = gap * 10.0 ** -self.random.uniform(1.0, 4.0)
            improved = descent.run(heat)
            budget.spend(descent.work - before)
            if improved:
                self.solver.offer(self.core, descent.best, descent.cost, "neighbourhoods")  # type: ignore[arg-type]
                self.idle, failures = 0, 0
                continue
            failures += 1
            self.idle += not until_stuck
            if until_stuck and failures >= _PATIENCE and descent.is_within_limit:
                return
            if not until_stuck and self.idle % 12 == 0 and descent.best is not None:
                descent.begin(descent.best, self.dual.best_prices)

    def _shrink_core(self) -> tuple[Core, Array] | None:
        """Return a core without strategies that no better assignment uses, and its prices; None if these are few."""
        upper = self.incumbent.cost
        if not np.isfinite(upper):
            return None
        out = self.dual.floors() >= upper - TOLERANCE * abs(upper)
        if out.mean() < _SHRINK_SHARE:
            return None
        core = presolve(self.core.forbid(out), budget=self.budget.part(0.2))
        # No assignment is better: the known one is optimal.
        if not core.feasible:
            self.incumbent.raise_bound(upper)
        self.incumbent.report(f"fixing: {core.nodes} nodes, {core.cells} table entries left")
        return core, self._prices_at(core)

    def _solve_integer_program(self) -> bool:
        """Solve the integer program, and record its assignment and bound; return True if it is final."""
        core, incumbent = self.core, self.incumbent
        start = None if self.descent is None else self.descent.best
        answer = solve_core(
            core,
            start=start,
            # Moments with a price bind in the relaxation, and would be violated first.
            moments=np.flatnonzero(self.dual.best_prices > 0),
            budget=self.budget.part(_INTEGER_TIME),
            seed=self.solver.seed,
        )
        if answer.places is not None:
            self.solver.offer(core, answer.places, core.value(answer.places), "integer program")
        incumbent.raise_bound(min(answer.bound, incumbent.cost))
        incumbent.report("integer program")
        return answer.proved
