"""The search for the plan of one joint graph: fast, and within the memory limit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property

from autoshard.patterns.ops.unknown import batch_advice
from autoshard.planner.budget_search import BudgetSearch
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.multi_axis import MultiAxisSolver
from autoshard.planner.overlap_search import OverlapSearch
from autoshard.planner.planning_context import BlockSolution, PlanningContext, SolveRequest
from autoshard.plans.sharding_plan import ShardingPlan


class Planner(PlanningContext):
    """Plans one joint graph on one mesh; the arguments are those of `PlanningContext`."""

    def plan(self, unlimited: CandidatePlan | None = None) -> ShardingPlan:
        """Return the plan of this graph as it is; `plan_with_recompute` also changes the graph as the settings ask.

        Args:
            unlimited: the plan without the memory limit, if it is known.

        Raises:
            BudgetError: no plan that was found fits the memory limit; the message names the smallest peak.
            KeyboardInterrupt: the search was interrupted before it met a plan that fits.
        """
        for name, count in self.rules.unknown.items():
            warnings.warn(
                f"no sharding rule for {name} ({count} calls): it is replicated on every device. "
                + batch_advice(name, self.rules.batch_rules[name]),
                stacklevel=2,
            )
        try:
            plan = self._search(unlimited)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            plan = self.best
            self.warn_of_interruption(plan.cost)
        with self.time_phase("account"):
            return self.describe(plan)

    def _search(self, unlimited: CandidatePlan | None) -> CandidatePlan:
        limit = self.settings.memory_limit
        self.unlimited = cheapest = self.solve(self.constraints) if unlimited is None else unlimited
        plan = self.fastest(cheapest)
        if limit is not None and plan.memory.peak > limit:
            # A bound of the problem without a limit is one with it. The problems solved on the way are narrower.
            return replace(BudgetSearch(self, limit, cheapest, plan).run(), lower_bound=cheapest.lower_bound)
        return plan

    def fastest(self, cheapest: CandidatePlan) -> CandidatePlan:
        """Return the plan with the shortest step that is found without a memory limit.

        Args:
            cheapest: the plan of the smallest cost, where the search starts.
        """
        if self._fastest is None:
            # A reduction once for several runs has no compute of one run that hides it.
            plain = self.settings.effort == "fast" or self.settings.runs_per_reduction > 1
            self._fastest = cheapest if plain else OverlapSearch(self, cheapest).run()
        return self._fastest

    def _solve_all_axes(self, request: SolveRequest) -> BlockSolution:
        if len(self.axes) <= 2:
            return self.solve_block(request, frozenset(self.axes), None)
        return self._multi_axis_solver.solve(request)

    @cached_property
    def _multi_axis_solver(self) -> MultiAxisSolver:
        return MultiAxisSolver(self)
