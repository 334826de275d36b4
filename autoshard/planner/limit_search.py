"""The fastest plan within a memory limit, and the plan with the smallest peak.

Memory gets a price at every moment, found by column generation: each plan improves the prices, and each set of prices
leads to another plan. At one price equal layers make the same choice, so plans next to the limit are spliced: the first
operators as in one plan, the others as in the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from autoshard.patterns.decisions import Decisions
from autoshard.planner.budget_search import (
    MEMORY_ONLY,
    drop_negligible,
    find_leanest,
    first_that_fits,
    forceable_parameters,
    largest_names,
    memory_prices,
)
from autoshard.planner.candidate_plan import CandidatePlan, ProgramEstimate
from autoshard.planner.limit_bound import bound_within
from autoshard.planner.memory_prices import mix_prices
from autoshard.planner.planning_problem import BuiltProblem
from autoshard.planner.recombination import recombine
from autoshard.planner.rerun_context import RerunContext, RouteError
from autoshard.planner.splice import Splice

_ROUNDS = 12  # most plans made at prices of memory
_STRONGEST = 30.0  # price of the limit's bytes, in steps, if no mix of plans fits
_ENOUGH = 1e-3  # fraction of a step by which another plan has to improve the mix
_CLOSE = 3e-3  # fraction of a step by which the best plan may be slower than the best mix to stop trying prices
_MANY_OPERATORS = 3000  # of a graph with second operators, from which on the search is less thorough
_STRENGTHS = (10.0, 0.01)  # the largest and the smallest price of the limit's bytes, in steps, for bisection
_LEVELS = 30  # prices between these
_FORCED_LEVELS = 10  # levels with growing numbers of parameters forced to be sharded
_MIXES = 3  # most pairs of plans that are mixed
_MAX_COUNTS = 5  # most numbers of operators that are tried for a pair
# With 6, the least step of Mixtral is 0.6 % longer; with 16, none is shorter.
_NEAR = 12  # plans next to the limit that are recombined
_RECOMBINED = 4  # most plans made from them
_UNLIKE = 0.1  # fraction of the limit by which the memory of a plan may differ from the estimate
_FULL = 3e-3  # fraction of the limit by which a plan may stay below it

_LEAN_ROUNDS = 6  # most plans made with a price on memory only
_LEAN_TARGETS = 3  # most unreachable limits that are searched for
_LEAN_SHARE = 0.8  # such a limit, as a fraction of the smallest known peak
_MIN_GAIN = 0.01  # fraction of the peak by which such a plan must be leaner than the last one to continue


class LimitSearch:
    """Searches for the fastest plan whose peak is within a limit.

    Args:
        context: the problem in which operators may run again.
        limit: bytes per device.
        known: plans to start from; the first is the cheapest without a limit.

    Attributes:
        met: the plans found so far.
        bound: a lower bound of the cost of every plan within the limit, in seconds; minus infinity if none is known.
    """

    def __init__(self, context: RerunContext, limit: int, known: Sequence[CandidatePlan]) -> None:
        self.context = context
        self.limit = limit
        self.cheapest = known[0]
        self.fastest = min(known, key=lambda plan: plan.step_seconds)
        # Other methods are too slow at prices of memory, or require narrow problems.
        self._method = "alternate" if context.settings.method == "alternate" else "auto"
        self.met: list[CandidatePlan] = []
        self.bound = -math.inf
        self._lean_plans: list[CandidatePlan] = []
        self._held: dict[ProgramEstimate, np.ndarray] = {}  # bytes of known plans at every moment
        self._mixed: set[tuple[ProgramEstimate, ProgramEstimate]] = set()
        for plan in known:
            self._meet(plan)

    @property
    def best(self) -> CandidatePlan | None:
        """The fastest known plan that fits; None if none does."""
        return min(filter(self._fits, self.met), key=lambda plan: plan.step_seconds, default=None)

    @property
    def leanest_met(self) -> CandidatePlan:
        """The known plan with the smallest peak."""
        return min(self.met, key=_peak)

    def run(self) -> CandidatePlan | None:
        """Return the fastest plan found that fits; None if none does."""
        known, prices = len(self.met), None
        # No plan holds much less than an equal share of the leanest plan's total bytes.
        if self.limit >= self.leanest_met.memory.peak / self.context.mesh.size:
            prices = self._approach()
        if self.best is None:
            # The smallest peak in an error must not depend on the limit: set plans found for the limit aside.
            aside, self.met[known:] = self.met[known:], []
            self._meet_lean()
            prices = self._meet_between(aside)
        if self.best is None:
            self._host_less()
        if self.best is None:
            return None
        self._mix()
        self._recombine()
        if not self._is_within(self._enough):
            self._force(self._without_reruns)
            if self.context.proposes:
                self._generate_without_reruns()
            self._meet(self.lean)
            self._mix()
            self._recombine()
        if prices is not None and prices.any() and not self._is_within(_CLOSE):
            self._bisect(prices)
            self._mix()
            self._recombine()
        self._host_less()
        return self.best

    def _approach(self) -> np.ndarray | None:
        """Find plans at the prices of the bound, and at those from programs' memory; return the last prices."""
        self._raise_bound()
        return self._generate()

    def _meet_lean(self) -> None:
        """Find the leanest plans, if none fits yet."""
        # The first of these is faster and mostly finds a plan that fits; the smallest peak is equal at every limit.
        searches = self._lean_searches()
        for find in (lambda search: search.lean, lambda search: search.leanest):
            for search in searches:
                if self.best is None:
                    self._meet(find(search))

    def _meet_between(self, aside: list[CandidatePlan]) -> np.ndarray | None:
        """Find plans between the leanest ones and those found for the limit, unless it is out of reach.

        Returns:
            The last prices; None if no plan fits.
        """
        if self.best is None and self.limit < _LEAN_SHARE * self.leanest_met.memory.peak:
            return None
        known = len(self.met)
        self.met += aside
        prices = self._approach()
        if self.best is None:
            self._recombine()
        if self.best is None:
            self.met[known:] = []
            return None
        return prices

    def _host_less(self) -> None:
        """Find plans with only as much optimizer state on the host as the limit requires.

        At one price of memory, equal parameters make the same choice, and large ones move before small ones.
        """
        if not self.context.constraints.may_host:
            return
        found = [(self.context.with_least_hosted(plan, self.limit), number) for number, plan in enumerate(self.met)]
        changed = sorted((one[0], number, one[1]) for one, number in found if one is not None)
        for seconds, _, make in changed[:_MIXES]:
            if self.best is None or seconds < self.best.step_seconds:
                self._meet(make())

    @property
    def _enough(self) -> float:
        """The relative gap between the best plan and the best mix at which no other plan is tried."""
        # Each plan of a large graph takes seconds.
        return _ENOUGH if len(self.context.rules.operators) < _MANY_OPERATORS else _CLOSE

    def _lean_searches(self) -> list[LimitSearch]:
        """Return this search, and those with fixed reruns, where less is left to decide."""
        if self.best is not None:
            return []
        searches = [self]
        if self.context.proposes:
            searches.append(LimitSearch(self._without_reruns, self.limit, [self.cheapest]))
        if self.context.may_rerun:
            searches.append(LimitSearch(self._with_whole_layers, self.limit, [self.context.whole_layers]))
        # If the host has little room, not everything may move.
        if self.context.moves and self.context.settings.host_memory is None:
            moving = self._with_all_moves
            searches.append(LimitSearch(moving, self.limit, [moving.solve(moving.constraints)]))
        return searches

    def run_forced(self) -> CandidatePlan | None:
        """Return the fastest plan found that fits, with the largest parameters forced to be sharded."""
        contexts = [self._without_reruns, *([self._with_whole_layers] if self.context.may_rerun else [])]
        for context in contexts:
            leanest = min(self.cheapest, self._forced_plan(context, 1.0) or self.cheapest, key=_peak)
            self._meet(leanest)
            if self._fits(leanest):
                self._force(context)
        return self.best

    def _force(self, context: RerunContext) -> None:
        """Find plans with about the fewest largest parameters forced to be sharded that fit (Rhino 4.4).

        The plans are of `context`, with fixed reruns.
        """

        def make(level: int) -> CandidatePlan:
            plan = self._forced_plan(context, level / _FORCED_LEVELS)
            if plan is None:
                return self.leanest_met
            self._meet(plan)
            return plan

        first_that_fits(self.fastest, self.leanest_met, _FORCED_LEVELS, make, self.limit, _ENOUGH)

    def _forced_plan(self, context: RerunContext, share: float) -> CandidatePlan | None:
        """Return the cheapest plan with the largest parameters forced to be sharded; None if time is up.

        `share` is as for `largest_names`.
        """
        forced = largest_names(self._forceable, share)
        plan = context.try_solve(replace(context.constraints, forced=forced), method=self._method)
        if plan is None:
            return None
        return replace(plan, method=f"{plan.method}, the {len(forced)} largest parameters forced to be sharded")

    @cached_property
    def _without_reruns(self) -> RerunContext:
        return RerunContext(self.context.without, may_rerun=False) if self.context.proposes else self.context

    @cached_property
    def _with_whole_layers(self) -> RerunContext:
        return RerunContext(self.context.planner_with(self.context.reruns), may_rerun=False)

    @cached_property
    def _with_all_moves(self) -> RerunContext:
        return RerunContext(self.context.planner_with(self.context.moves), may_rerun=False)

    @cached_property
    def _forceable(self) -> dict[str, int]:
        """Bytes of the parameters that may be forced to be sharded."""
        return drop_negligible(forceable_parameters(self.context.graph, self.context.constraints))

    @cached_property
    def lean(self) -> CandidatePlan:
        """A plan with a small peak, at prices at which only memory counts."""
        return find_leanest(self.cheapest, self._solve_lean, _LEAN_ROUNDS, _MIN_GAIN, self.context.moments_of)[0]

    @cached_property
    def leanest(self) -> CandidatePlan:
        """The plan with the smallest peak that is found."""
        best, known = self.lean, [self.cheapest, *self._lean_plans]
        # Once some lean plans are known, prices for an unreachable limit weigh moments better. Then recombine their
        # decisions.
        for share, find in ((_LEAN_SHARE, LimitSearch._generate), (1 - _MIN_GAIN, LimitSearch._recombine)):
            for _ in range(_LEAN_TARGETS):
                search = LimitSearch(self.context, round(share * best.memory.peak), known)
                find(search)
                gained = search.leanest_met.memory.peak <= (1 - _MIN_GAIN) * best.memory.peak
                best, known = min(search.leanest_met, best, key=_peak), search.met
                if not gained or self.context.budget.is_over:
                    break
        return best

    def _solve_lean(self, weights: np.ndarray) -> CandidatePlan | None:
        """Return the plan if only memory counts, at these weights of the moments; None if time is up.

        Parameters are forced to be sharded (Rhino 4.4).
        """
        context, first = self.context, self.cheapest
        if self._lean_plans and context.budget.is_over:
            return None
        forced = replace(context.constraints, forced=frozenset(self._forceable))
        prices = memory_prices(weights, MEMORY_ONLY, first.cost, first.memory.peak)
        try:
            self._lean_plans.append(context.solve(forced, method=self._method, prices=prices))
        except RouteError:
            return None if self._lean_plans else self.cheapest
        return self._lean_plans[-1]

    def _fits(self, plan: CandidatePlan) -> bool:
        return plan.memory.peak <= self.limit

    def _is_within(self, gap: float) -> bool:
        """Return True if the best plan that fits is within a relative gap of the best mix of known plans."""
        best, (prices, mix) = self.best, self._mix_prices()
        return best is not None and best.step_seconds <= (1 + gap) * (mix - self.limit * prices.sum())

    def _mix_prices(self) -> tuple[np.ndarray, float]:
        held = [self._held[plan.estimate] for plan in self.met]
        steps = [plan.step_seconds for plan in self.met]
        return mix_prices(steps, held, self.limit, _STRONGEST * self.cheapest.step_seconds)

    def _generate(self) -> np.ndarray | None:
        """Find plans at the prices of memory from known plans, by column generation; return the last prices."""
        context = self.context
        longest, center = self.cheapest.step_seconds, None
        for _ in range(_ROUNDS):
            prices, best_mix = self._mix_prices()
            # Prices of few plans oscillate: average them with the last ones. If this does not improve the mix, use the
            # prices themselves.
            center = prices if center is None else (center + prices) / 2
            for asked in (center, prices) if center is not prices else (prices,):
                plan = context.try_solve(context.constraints, method=self._method, prices=asked)
                if plan is None:
                    return center
                self._meet(plan)
                gain = best_mix - plan.step_seconds - float(prices @ self._held[plan.estimate])
                if gain > _ENOUGH * longest:
                    break
            else:
                break
        return center

    def _raise_bound(self) -> None:
        """Find plans at prices of memory that bound the cost of all plans (`bound_within`)."""
        context = self.context
        # Other meshes have too many strategies for one problem, and price memory over a few axes at a time.
        if len(context.axes) > 2 or context.budget.is_over:
            return

        def meet(decisions: Decisions, cost: float) -> None:
            with suppress(RouteError):
                self._meet(context.evaluate(decisions, cost, 0.0, "messages"))

        costs = [plan.cost for plan in self.met]
        held = [self._held[plan.estimate] for plan in self.met]
        strongest = _STRONGEST * self.cheapest.step_seconds
        self.bound = max(self.bound, bound_within(context, self.limit, costs, held, strongest, meet))

    def _generate_without_reruns(self) -> None:
        """Find plans without reruns at prices of memory: with fewer options, assignments are better."""
        search = LimitSearch(self._without_reruns, self.limit, self.met)
        search._generate()
        for plan in search.met:
            self._meet(plan)

    def _bisect(self, prices: np.ndarray) -> None:
        """Find plans next to the limit, at multiples of the last prices, by bisection."""
        # A problem's objective is not exactly the predicted step: prices are right up to a factor.
        leanest, weights = self.leanest_met, prices / prices.sum()
        strongest, weakest = (share * self.cheapest.step_seconds / self.limit for share in _STRENGTHS)

        def make(level: int) -> CandidatePlan:
            strength = weakest * (strongest / weakest) ** (level / _LEVELS)
            plan = self.context.try_solve(self.context.constraints, method=self._method, prices=weights * strength)
            if plan is None:
                return leanest
            self._meet(plan)
            return plan

        first_that_fits(self.fastest, leanest, _LEVELS, make, self.limit, _ENOUGH)

    def _meet(self, plan: CandidatePlan) -> None:
        if plan.estimate not in self._held:
            self._held[plan.estimate] = self.context.moments_of(plan)
            self.met.append(plan)

    def _mix(self) -> None:
        """Find plans with the first operators of a plan that fits, and the others of a faster one."""
        for _ in range(_MIXES):
            pair = self._promising_pair()
            if pair is None or self._is_within(self._enough):
                return
            lean, fast = pair
            self._mixed.add((lean.estimate, fast.estimate))
            self._search_splices(Splice(self.context, lean, fast))

    def _search_splices(self, splice: Splice) -> None:
        """Find plans of a splice that fit, with about the fewest operators of the lean plan."""
        low, high, missed = 0, splice.length, 0.0
        for _ in range(_MAX_COUNTS):
            if high - low <= 1 or self.context.budget.is_over:
                return
            # The estimate ignores the seam: correct it by the last error.
            count = splice.fewest_within((1 - _FULL / 2) * self.limit - missed, low, high)
            try:
                plan = splice.plan(count)
            except RouteError:
                low = count  # the seam is within a route of rows
                continue
            self._meet(plan)
            missed = plan.memory.peak - splice.foreseen_peak(count)
            low, high = (low, count) if self._fits(plan) else (count, high)
            if self._fits(plan) and plan.memory.peak >= (1 - _FULL) * self.limit:
                return

    def _recombine(self) -> None:
        """Find the cheapest plans within the limit whose every decision is that of some known plan near it."""
        context, start = self.context, self.best or self.leanest_met
        if self._is_within(self._enough) or len(context.axes) > 2 or context.budget.is_over:
            return
        with context.time_phase("problem"):
            built = context.builder_for(context.certain).build(frozenset(context.axes), reuse="all")
            near = sorted(self.met, key=lambda plan: abs(plan.memory.peak - self.limit))[:_NEAR]
            encoded = [(plan, context.assignment_of(plan, built)) for plan in (start, self.leanest_met, *near)]
            pairs = [(plan, assignment) for plan, assignment in encoded if assignment is not None]
        if not pairs:
            return
        known = [assignment for _, assignment in pairs]
        # Memory of programs that the problem does not count is similar nearby: take it from the best plan, and from the
        # plan next to the limit.
        over = [pair for pair in pairs if not self._fits(pair[0])]
        for plan, assignment in (pairs[0], *over[:1]):
            self._recombine_around(built, known, self._bytes_beside(built, plan, assignment))

    def _recombine_around(self, built: BuiltProblem, known: list[list[int]], start: np.ndarray) -> None:
        """Find plans that combine decisions of known assignments, and add these to the known.

        Args:
            built: the problem without prices.
            known: the assignments.
            start: bytes of programs at every moment that the problem does not count.
        """
        context, uncounted = self.context, start
        for _ in range(_RECOMBINED):
            with context.time_phase("solve"):
                seconds = max(1.0, context.budget.seconds)
                assignment = recombine(built, known, uncounted, self.limit, seconds)
            if assignment is None and uncounted is start:
                return
            if assignment is None:
                uncounted = (uncounted + start) / 2  # the bytes of another plan are too many for all
                continue
            if assignment in known:
                return
            known.append(assignment)
            cost = built.problem.cost(assignment)
            try:
                plan = context.evaluate(built.decode(assignment), cost, 0.0, "plans recombined")
            except RouteError:
                return  # known plans are mixed within a route of rows
            self._meet(plan)
            held, beside = self._held[plan.estimate], self._bytes_beside(built, plan, assignment)
            if self._fits(plan):
                start = uncounted = beside
            elif (beside - uncounted).max() > _UNLIKE * self.limit:
                return  # it is unlike the others, and the estimate of its memory is wrong
            else:
                uncounted = np.where(held > self.limit, np.maximum(uncounted, beside), uncounted)

    def _bytes_beside(self, built: BuiltProblem, plan: CandidatePlan, assignment: Sequence[int]) -> np.ndarray:
        """Return the bytes of a plan at every moment that the problem does not count for its assignment."""
        held = self._held[plan.estimate]
        return held - built.held_bytes(assignment, len(held))

    def _promising_pair(self) -> tuple[CandidatePlan, CandidatePlan] | None:
        """Return the pair of a plan that fits and a faster one that does not, with the most promising mix."""
        fitting = [plan for plan in self.met if self._fits(plan)]
        if not fitting:
            return None
        best = min(plan.step_seconds for plan in fitting)

        def mix_seconds(lean: CandidatePlan, fast: CandidatePlan) -> float:
            # Seconds and bytes of a mix are between those of its plans.
            share = (self.limit - lean.memory.peak) / (fast.memory.peak - lean.memory.peak)
            return lean.step_seconds + share * (fast.step_seconds - lean.step_seconds)

        pairs = [
            (mix_seconds(lean, fast), place, lean, fast)
            for place, (lean, fast) in enumerate(itertools.product(fitting, self.met))
            if not self._fits(fast) and (lean.estimate, fast.estimate) not in self._mixed
        ]
        if not pairs or min(pairs)[0] > (1 - _ENOUGH) * best:
            return None
        return min(pairs)[2:]


def _peak(plan: CandidatePlan) -> int:
    return plan.memory.peak
