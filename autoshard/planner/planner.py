"""The search for the plan of one joint graph: solve, and fit into the memory there is."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property

import numpy as np

from autoshard.patterns.ops.unknown import batch_advice
from autoshard.planner.budget_search import BudgetSearch
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.multi_axis import MultiAxisSolver
from autoshard.planner.overlap_search import OverlapSearch
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints, OverlapDiscount
from autoshard.planner.solve_request import SolveRequest
from autoshard.plans.sharding_plan import ShardingPlan


class Planner(PlanningContext):
    """Plans one joint graph on one mesh; the arguments are those of `PlanningContext`."""

    def plan(self, unlimited: CandidatePlan | None = None) -> ShardingPlan:
        """Solve and account, for this graph alone: `planner.recompute.planned` also changes it as settings say.

        Args:
            unlimited: what was found without the memory limit, if that was looked for before.

        Raises:
            BudgetError: no plan that was found fits the memory limit; the message names the smallest that does.
            KeyboardInterrupt: somebody interrupted the search before any plan was found that could be handed back.
        """
        for name, count in self.rules.unknown.items():
            warnings.warn(
                f"no sharding rule for {name} ({count} calls): it is replicated on every device. "
                + batch_advice(name, self.rules.batch_rules[name]),
                stacklevel=2,
            )
        try:
            found = self._search(unlimited)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            found = self.best
            self.warn_of_interruption(found.cost)
        with self.time_phase("account"):
            return self.describe(found)

    def _search(self, unlimited: CandidatePlan | None) -> CandidatePlan:
        """The plan that is wanted: within the limit, and fast by its timeline."""
        limit = self.settings.memory_limit
        self.unlimited = cheapest = self.solve(self.constraints) if unlimited is None else unlimited
        found = self.fastest(cheapest)
        if limit is not None and found.memory.peak > limit:
            # What bounds the problem without a limit bounds it with one; the problems solved on the way are narrower.
            return replace(BudgetSearch(self, limit, cheapest, found).run(), lower_bound=cheapest.lower_bound)
        return found

    def fastest(self, cheapest: CandidatePlan) -> CandidatePlan:
        """The plan with the shortest step that is found without a limit: none that keeps one is faster.

        Args:
            cheapest: the plan of the smallest cost, what to start from.
        """
        if self._fastest is None:
            # What is reduced once for several runs has no compute of one run to hide behind.
            plain = self.settings.effort == "fast" or self.settings.runs_per_reduction > 1
            self._fastest = cheapest if plain else OverlapSearch(self, cheapest).run()
        return self._fastest

    def solve(
        self,
        wishes: Constraints,
        *,
        method: str | None = None,
        limit: float | None = None,
        prices: np.ndarray | None = None,
        hiding: OverlapDiscount | None = None,
        work: int | None = None,
    ) -> CandidatePlan:
        """The best decisions found under some wishes.

        Args:
            wishes: what is pinned and forced.
            method: one of the solver's; by default that of the settings.
            limit: bytes that what operators and parameters hold may reach at any moment.
            prices: of memory, in seconds per byte at every moment; they decide, and are no part of the cost found.
            hiding: what collectives of a kind count; it decides, and is no part of the cost found.
            work: of the solver on a single problem, in its units; by default what the settings say.

        Raises:
            PlanError: the method found no decisions in the time there is, or can't solve this problem.
            BudgetError: the same under a limit.
            KeyboardInterrupt: somebody interrupted the search; `best` is then the cheapest plan met.
        """
        builder = self._builders.setdefault(id(wishes), self.builder.with_constraints(wishes))
        wanted = method or ("auto" if self.settings.method == "force" else self.settings.method)
        ask = SolveRequest(builder, wanted, limit, prices, hiding, work or self.settings.work_limit)
        if len(self.axes) <= 2:
            solved = self.solve_block(ask, frozenset(self.axes), None)
            bound = solved.lower_bound
        else:
            solved = self._multi_axis_solver.solve(ask)
            bound = min(solved.lower_bound if np.isfinite(solved.lower_bound) else self._bound, solved.cost)
        found = self.evaluate(solved.decisions, solved.cost, bound, solved.method)
        self._update_best(found)
        if solved.interrupted:
            raise KeyboardInterrupt
        return found

    @cached_property
    def _multi_axis_solver(self) -> MultiAxisSolver:
        return MultiAxisSolver(self)
