"""The plans of one graph: the fastest, the fastest within a memory limit, and the leanest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autoshard.capture.recomputation import recomputable
from autoshard.errors import BudgetError
from autoshard.planner.budget_search import ShortfallError, solve_with_memory_rows
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.limit_search import LimitSearch
from autoshard.planner.planner import Planner
from autoshard.planner.rerun_context import RerunContext
from autoshard.plans.frontier import pareto_front
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.units import format_bytes

# Prices of a second of copies to the host and back, in seconds of the step. Compute hides most of them, up to the
# capacity of the link, which is not a sum of costs: the replay compares the plans of both prices.
_COPY_PRICES = (0.1, 0.2)

_SMALL_GAP = 1e-4  # product of relative memory and relative time of a gap that is not searched


class Explorer:
    """Finds plans of a graph.

    Args:
        planner: the planner of the graph.
        may_rerun: True if operators may run again to satisfy a memory limit.
    """

    def __init__(self, planner: Planner, *, may_rerun: bool) -> None:
        self.planner = planner
        self.may_rerun = may_rerun
        self._search: LimitSearch | None = None
        self._bound = -math.inf  # of the cost of every plan within the limit

    def plan(self, unlimited: CandidatePlan | None = None) -> ShardingPlan:
        """Return the fastest plan within the memory limit of the planner's settings, if there is one.

        Args:
            unlimited: the plan without the memory limit, if it is known.

        Raises:
            ShortfallError: no plan that was found fits the memory limit; the message names the smallest peak.
            KeyboardInterrupt: the search was interrupted before it found a plan that fits.
        """
        planner = self.planner
        planner.warn_of_unknown_operators()
        try:
            plan = self._fastest_that_fits(unlimited)
        except KeyboardInterrupt:
            plan = self._best_met()
            planner.warn_of_interruption(plan.step_seconds)
        else:
            if planner.budget.is_over and plan.cost > plan.lower_bound * (1 + 1e-9):
                limit = f"time_limit={planner.settings.time_limit:g} s"
                plan = replace(plan, method=f"{plan.method}, ended by {limit}: a longer search may find a faster plan")
        with planner.time_phase("account"):
            return plan.estimate.context.describe(plan)

    def leanest(self) -> ShardingPlan:
        """Return the plan with the smallest peak that is found, which shards everything possible."""
        # Nothing fits into one byte, so the search finds all plans with small peaks.
        search = LimitSearch(self._context(), 1, [self.planner.solve(self.planner.constraints)])
        search.run()
        plan = search.leanest_met
        return plan.estimate.context.describe(plan)

    @property
    def may_move(self) -> bool:
        """True if values may be moved to the host besides those in hints."""
        return self.planner.settings.offload == "auto" and self.planner.settings.method != "force"

    def frontier(self, gaps: int) -> list[ShardingPlan]:
        """Return the Pareto-optimal plans in seconds and bytes among those found, from the smallest peak on.

        Plans are searched within limits in the middle of the widest gaps between known ones. As in TensorOpt, section
        3, whose frontier is of sums; here the replay and the account of programs decide.

        Args:
            gaps: most limits; the planner itself has none.

        Raises:
            BudgetError: the host has no room for the values that hints move there.
        """
        planner = self.planner
        planner.warn_of_unknown_operators()
        planner.unlimited = cheapest = planner.solve(planner.constraints)
        fastest = planner.fastest(cheapest)
        contexts = [self._context(price) for price in (None, *(_COPY_PRICES if self.may_move else ()))]
        pool, tried = [cheapest, *([] if fastest.estimate is cheapest.estimate else [fastest])], set[int]()
        if contexts[0].may_rerun:
            pool.append(contexts[0].whole_layers)
        pool = self._meet_within(1, contexts, pool)
        for _ in range(gaps):
            pairs = list(itertools.pairwise(pareto_front(pool, _peak_and_step)))
            areas = {_middle(lean, fast): _gap_area(lean, fast) for lean, fast in pairs}
            open_gaps = {limit: area for limit, area in areas.items() if limit not in tried and area > _SMALL_GAP}
            if not open_gaps or planner.budget.is_over:
                break
            limit = max(open_gaps, key=open_gaps.__getitem__)
            tried.add(limit)
            pool = self._meet_within(limit, contexts, pool)
        plans = pareto_front(pool, _peak_and_step)
        for plan in plans:
            check_host(plan.memory.host, planner)
        bound = cheapest.lower_bound
        return [plan.estimate.context.describe(replace(plan, lower_bound=min(bound, plan.cost))) for plan in plans]

    def _meet_within(
        self, limit: int, contexts: Sequence[RerunContext], pool: Sequence[CandidatePlan]
    ) -> list[CandidatePlan]:
        """Return the plans of a pool, and those found in the search for a limit in one context after another."""
        met = [*pool]
        for context in contexts:
            # If nothing may be moved, the problem has no plans with moves.
            known = [plan for plan in met if context.moves or not self._moves(plan)]
            search = LimitSearch(context, limit, known)
            search.run()
            met += [plan for plan in search.met if all(plan.estimate is not each.estimate for each in known)]
        return met

    def _moves(self, plan: CandidatePlan) -> bool:
        """Return True if a plan moves more values than hints do."""
        return len(plan.estimate.context.graph.offloaded) > len(self.planner.graph.offloaded)

    def _context(self, copy_price: float | None = None, may_host: bool = False) -> RerunContext:
        # Without layers to recompute, there are no operators to rerun.
        may_rerun = self.may_rerun and bool(recomputable(self.planner.graph))
        return RerunContext(self.planner, may_rerun, copy_price, may_host)

    def _fastest_that_fits(self, unlimited: CandidatePlan | None) -> CandidatePlan:
        planner, limit = self.planner, self.planner.settings.memory_limit
        planner.unlimited = cheapest = planner.solve(planner.constraints) if unlimited is None else unlimited
        fastest = planner.fastest(cheapest)
        planner.unlimited_seconds = fastest.step_seconds
        if limit is None or fastest.memory.peak <= limit:
            return fastest
        # A bound of the problem without a limit is also one with a limit, and if operators run again.
        self._bound = cheapest.lower_bound
        return self._with_bound(self._within(limit, cheapest, fastest))

    def _within(self, limit: int, cheapest: CandidatePlan, fastest: CandidatePlan) -> CandidatePlan:
        planner, context = self.planner, self._context()
        known = [cheapest, fastest, *planner.met]
        self._search = LimitSearch(context, limit, known)
        plan = self._search.run_forced() if planner.settings.method == "force" else self._search.run()
        may_host = planner.settings.offload_optimizer == "auto" and planner.settings.method != "force"
        prices = _COPY_PRICES if self.may_move else ()
        if not prices and not may_host:
            self._bound = max(self._bound, self._search.bound)
        # Plans found without the host stay in the search.
        for price in prices or ((None,) if may_host else ()):
            if not planner.budget.is_over:
                context = self._context(price, may_host)
                self._search = LimitSearch(context, limit, [cheapest, *self._search.met])
                plan = self._search.run()
                if price == min(prices, default=None):  # no plan costs less at another price
                    self._bound = max(self._bound, self._search.bound)
        planner.met[:] = self._search.met
        rows = solve_with_memory_rows(planner, limit) if planner.settings.method == "ilp" else None
        if rows is not None and (plan is None or rows.step_seconds < plan.step_seconds):
            return rows
        if plan is None:
            raise ShortfallError(limit, self._search.leanest_met, planner.budget.is_over)
        return plan

    def _best_met(self) -> CandidatePlan:
        """Return the best plan found that fits the limit; raise `KeyboardInterrupt` if there is none."""
        if self._search is None:
            best = self.planner.best
        else:
            best = None if self._search.best is None else self._with_bound(self._search.best)
        if best is None:
            raise KeyboardInterrupt
        return best

    def _with_bound(self, plan: CandidatePlan) -> CandidatePlan:
        """Return a plan with the bound of all plans, instead of that at its prices of memory."""
        return replace(plan, lower_bound=min(self._bound, plan.cost))


def _peak_and_step(plan: CandidatePlan) -> tuple[int, float]:
    return plan.memory.peak, plan.step_seconds


def _middle(lean: CandidatePlan, fast: CandidatePlan) -> int:
    return round(math.sqrt(lean.memory.peak * fast.memory.peak))


def _gap_area(lean: CandidatePlan, fast: CandidatePlan) -> float:
    """Return the area between the known and the best possible frontier in a gap, relative to its ends."""
    return (fast.memory.peak / lean.memory.peak - 1.0) * (lean.step_seconds / fast.step_seconds - 1.0)


def check_host(moved: int, planner: Planner) -> None:
    """Raise a `BudgetError` if a plan moves more bytes to the host than its room for one device."""
    room = planner.settings.host_memory
    if room is not None and moved > room:
        raise BudgetError(
            f"the plan moves {format_bytes(moved)} of every device to its host, which has {format_bytes(room)} for it "
            "(host_memory, or that of the cluster). Move less: take autoshard.offload() from some modules, or "
            'offload_optimizer="auto" in place of "all"; use more devices, or raise host_memory.'
        )
