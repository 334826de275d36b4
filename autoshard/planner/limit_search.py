"""The fastest plan within a memory limit, and the plan with the smallest peak.

Memory gets a price at every moment, found by column generation: each plan that is met makes the prices better, and
each set of prices leads to another plan. Equal layers choose alike at one price, so that plans next to the limit are
spliced: the first operators as in the one, the others as in the other.
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

_ROUNDS = 12  # plans made at prices of memory, at most
_STRONGEST = 30.0  # steps that the limit's bytes have where no mix of plans fits
_ENOUGH = 1e-3  # part of a step by which another plan has to make the mix better
_CLOSE = 3e-3  # part of a step by which the best plan may be slower than the best mix and no other price is tried
_MANY_OPERATORS = 3000  # of a graph with second operators, from which the best plan is not searched so closely
_STRENGTHS = (10.0, 0.01)  # the largest and the smallest price of the limit's bytes between which is searched, in steps
_LEVELS = 30  # prices between these
_FORCED_LEVELS = 10  # levels on which ever more parameters are forced to be sharded
_MIXES = 3  # pairs of plans that are mixed, at most
_MAX_COUNTS = 5  # numbers of operators that are tried of a pair, at most
# With 6, the least step of Mixtral is 0.6 % longer; with 16, none is shorter.
_NEAR = 12  # plans next to the limit that are recombined
_RECOMBINED = 4  # plans made of them, at most
_UNLIKE = 0.1  # part of the limit by which what a plan holds may differ from what was foreseen
_FULL = 3e-3  # part of the limit by which a plan may stay below it

_LEAN_ROUNDS = 6  # plans made where memory alone has a price, at most
_LEAN_TARGETS = 3  # limits out of reach that are searched for, at most
_LEAN_SHARE = 0.8  # of the smallest peak that is known, such a limit
_MIN_GAIN = 0.01  # part of the peak by which such a plan must be leaner than the last one for another to be made


class LimitSearch:
    """Searches for the fastest plan whose peak is within a limit.

    Args:
        context: the problem in which operators may run again.
        limit: bytes per device.
        known: plans of which it starts; the first is the cheapest without a limit.

    Attributes:
        met: the plans met.
        bound: a lower bound of the cost of every plan within the limit, in seconds; minus infinity if none is known.
    """

    def __init__(self, context: RerunContext, limit: int, known: Sequence[CandidatePlan]) -> None:
        self.context = context
        self.limit = limit
        self.cheapest = known[0]
        self.fastest = min(known, key=lambda plan: plan.step_seconds)
        # Other methods are too slow at prices of memory, or need too narrow a problem.
        self._method = "alternate" if context.settings.method == "alternate" else "auto"
        self.met: list[CandidatePlan] = []
        self.bound = -math.inf
        self._lean_plans: list[CandidatePlan] = []
        self._held: dict[ProgramEstimate, np.ndarray] = {}  # bytes at every moment, of the plans met
        self._mixed: set[tuple[ProgramEstimate, ProgramEstimate]] = set()
        for plan in known:
            self._meet(plan)

    @property
    def best(self) -> CandidatePlan | None:
        """The fastest plan met that fits; None if none does."""
        return min(filter(self._fits, self.met), key=lambda plan: plan.step_seconds, default=None)

    @property
    def leanest_met(self) -> CandidatePlan:
        """The plan with the smallest peak that was met."""
        return min(self.met, key=_peak)

    def run(self) -> CandidatePlan | None:
        """Return the fastest plan met that fits; None if none does."""
        known, prices = len(self.met), None
        # No plan holds much less than its share of all devices' bytes.
        if self.limit >= self.leanest_met.memory.peak / self.context.mesh.size:
            prices = self._approach()
        if self.best is None:
            # The smallest peak that an error names does not depend on the limit: what was met for it is set aside.
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
        """Meet plans at the prices of the bound, and at those of what programs hold; return the last prices."""
        self._raise_bound()
        return self._generate()

    def _meet_lean(self) -> None:
        """Meet the leanest plans, if none fits yet."""
        # What the first of these find most often fits, in less time; the smallest peak is the same at every limit.
        searches = self._lean_searches()
        for find in (lambda search: search.lean, lambda search: search.leanest):
            for search in searches:
                if self.best is None:
                    self._meet(find(search))

    def _meet_between(self, aside: list[CandidatePlan]) -> np.ndarray | None:
        """Meet plans between the leanest ones and those that were met for the limit, if it is not out of reach.

        Returns:
            The last prices; None where no plan fits.
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
        """Meet plans with just so much optimizer state on the host as the limit asks for.

        At one price of memory, equal parameters choose alike, and large ones before small ones.
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
        """The part by which the best plan may be slower than the best mix and no other plan is tried."""
        # Each plan of a large graph takes seconds.
        return _ENOUGH if len(self.context.rules.operators) < _MANY_OPERATORS else _CLOSE

    def _lean_searches(self) -> list[LimitSearch]:
        """Return this search, and those in which it is not open what runs again, where less is left to decide."""
        if self.best is not None:
            return []
        searches = [self]
        if self.context.proposes:
            searches.append(LimitSearch(self._without_reruns, self.limit, [self.cheapest]))
        if self.context.may_rerun:
            searches.append(LimitSearch(self._with_whole_layers, self.limit, [self.context.whole_layers]))
        # Where the host has little room, not all may move.
        if self.context.moves and self.context.settings.host_memory is None:
            moving = self._with_all_moves
            searches.append(LimitSearch(moving, self.limit, [moving.solve(moving.constraints)]))
        return searches

    def run_forced(self) -> CandidatePlan | None:
        """Return the fastest plan met that fits among those whose largest parameters are forced to be sharded."""
        contexts = [self._without_reruns, *([self._with_whole_layers] if self.context.may_rerun else [])]
        for context in contexts:
            leanest = min(self.cheapest, self._forced_plan(context, 1.0) or self.cheapest, key=_peak)
            self._meet(leanest)
            if self._fits(leanest):
                self._force(context)
        return self.best

    def _force(self, context: RerunContext) -> None:
        """Meet plans whose largest parameters are forced to be sharded, about the fewest that fit (Rhino 4.4).

        The plans are of `context`, in which it is not open what runs again.
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
        """A plan with a small peak, at prices at which memory alone counts."""
        return find_leanest(self.cheapest, self._solve_lean, _LEAN_ROUNDS, _MIN_GAIN, self.context.moments_of)[0]

    @cached_property
    def leanest(self) -> CandidatePlan:
        """The plan with the smallest peak that is found."""
        best, known = self.lean, [self.cheapest, *self._lean_plans]
        # Prices for a limit that is out of reach weigh the moments better, once some lean plans are known. Then their
        # decisions are mixed.
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
        """Return the plan at prices at which memory alone counts, by these weights of the moments; None if time is up.

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
        """Return True if the best plan that fits is by no larger part slower than the best mix of the plans met."""
        best, (prices, mix) = self.best, self._mix_prices()
        return best is not None and best.step_seconds <= (1 + gap) * (mix - self.limit * prices.sum())

    def _mix_prices(self) -> tuple[np.ndarray, float]:
        held = [self._held[plan.estimate] for plan in self.met]
        steps = [plan.step_seconds for plan in self.met]
        return mix_prices(steps, held, self.limit, _STRONGEST * self.cheapest.step_seconds)

    def _generate(self) -> np.ndarray | None:
        """Meet plans at the prices of memory that the plans met so far lead to; return the last prices."""
        context = self.context
        longest, center = self.cheapest.step_seconds, None
        for _ in range(_ROUNDS):
            prices, best_mix = self._mix_prices()
            # Prices of few plans go to and fro: half of the last ones steady them. If what these lead to does not make
            # the mix better, its own prices are asked.
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
        """Meet plans at prices of the memory that programs hold in any case, at which the cost of all is bounded."""
        context = self.context
        # Other meshes have too many strategies for one problem, and memory is priced over a few axes at a time.
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
        """Meet plans at prices of memory in which nothing runs again: where less is open, assignments are better."""
        search = LimitSearch(self._without_reruns, self.limit, self.met)
        search._generate()
        for plan in search.met:
            self._meet(plan)

    def _bisect(self, prices: np.ndarray) -> None:
        """Meet plans at more and at less of the last prices, which lie next to the limit."""
        # What a problem minimises is not quite the step that is predicted: prices are right up to a factor.
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
        """Meet plans whose first operators are as in a plan that fits, and the others as in a faster one."""
        for _ in range(_MIXES):
            pair = self._promising_pair()
            if pair is None or self._is_within(self._enough):
                return
            lean, fast = pair
            self._mixed.add((lean.estimate, fast.estimate))
            self._search_splices(Splice(self.context, lean, fast))

    def _search_splices(self, splice: Splice) -> None:
        """Meet the plans of a splice with about the fewest operators as in the lean plan that fit."""
        low, high, missed = 0, splice.length, 0.0
        for _ in range(_MAX_COUNTS):
            if high - low <= 1 or self.context.budget.is_over:
                return
            # What is foreseen leaves out what the seam changes: about as much as the last time.
            count = splice.fewest_within((1 - _FULL / 2) * self.limit - missed, low, high)
            try:
                plan = splice.plan(count)
            except RouteError:
                low = count  # the seam lies within a route of rows
                continue
            self._meet(plan)
            missed = plan.memory.peak - splice.foreseen_peak(count)
            low, high = (low, count) if self._fits(plan) else (count, high)
            if self._fits(plan) and plan.memory.peak >= (1 - _FULL) * self.limit:
                return

    def _recombine(self) -> None:
        """Meet the cheapest plans within the limit that decide everywhere as some plan that was met near it."""
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
        # What programs hold beside what the problem counts is nearly the same where they are: it is taken from the best
        # plan, and from the one that lies next to the limit.
        over = [pair for pair in pairs if not self._fits(pair[0])]
        for plan, assignment in (pairs[0], *over[:1]):
            self._recombine_around(built, known, self._bytes_beside(built, plan, assignment))

    def _recombine_around(self, built: BuiltProblem, known: list[list[int]], start: np.ndarray) -> None:
        """Meet plans that decide as known assignments do, which are added to these.

        Args:
            built: the problem without prices.
            known: the assignments.
            start: bytes that programs hold at every moment beside what the problem counts.
        """
        context, uncounted = self.context, start
        for _ in range(_RECOMBINED):
            with context.time_phase("solve"):
                seconds = max(1.0, context.budget.seconds)
                assignment = recombine(built, known, uncounted, self.limit, seconds)
            if assignment is None and uncounted is start:
                return
            if assignment is None:
                uncounted = (uncounted + start) / 2  # what another plan holds is too much for all
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
                return  # it is unlike the others: what it holds is not foreseen
            else:
                uncounted = np.where(held > self.limit, np.maximum(uncounted, beside), uncounted)

    def _bytes_beside(self, built: BuiltProblem, plan: CandidatePlan, assignment: Sequence[int]) -> np.ndarray:
        """Return the bytes that a plan holds at every moment beside what the problem counts of its assignment."""
        held = self._held[plan.estimate]
        return held - built.held_bytes(assignment, len(held))

    def _promising_pair(self) -> tuple[CandidatePlan, CandidatePlan] | None:
        """Return the plan that fits and the faster one that does not whose mix promises the shortest step."""
        fitting = [plan for plan in self.met if self._fits(plan)]
        if not fitting:
            return None
        best = min(plan.step_seconds for plan in fitting)

        def mix_seconds(lean: CandidatePlan, fast: CandidatePlan) -> float:
            # Seconds and bytes of a mix lie between those of its plans.
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
