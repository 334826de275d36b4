"""Solves a problem at lower bounds of its prices: scans all options, and makes the prices of the near ones exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import numpy as np

from autoshard.planner.planning_problem import BuiltProblem, OverlapDiscount
from autoshard.planner.solving import (
    CLOSE,
    ITERATIONS,
    REPAIR_ITERATIONS,
    LazyCosts,
    SolveOptions,
    SolveResult,
    better_result,
    result_of_messages,
    run_messages,
    solve_by_segments,
    tied_messages,
)
from autoshard.planner.tiling import Tiling
from autoshard.reshard.path import Resharder
from autoshard.solver import Problem
from autoshard.solver.problem import IntArray
from autoshard.solver.trws import Messages, restrict_messages, restrict_problem

_MAX_SCANS = 4  # scans of all options
_MAX_UPDATES = 40  # updates of the prices of near options between two scans
_MAX_SEGMENT_ROUNDS = 4  # solutions by segments, where messages leave a gap

# Relative gaps between the best result and a bound.
_EXACT_GAP = 1e-4  # no further prices are made exact
_FIRST_SCAN_GAP = 2e-3  # the first scan ends: exact prices will change its result by more
_PROPOSAL_GAP = 2e-2  # the search for a proposal ends: few passes do not bound it well

UNTIED_ITERATIONS = 3  # passes at full depth before options are left out that are proved to be of no use
_PROPOSAL_ITERATIONS = 5  # passes before a proposal is searched among near options
_ROUNDING = 1e-9  # relative slack within which an option may be as good as a known assignment

# An option is near if it raises the bound by less than this part of it when all layers choose it; on three axes about
# ten options of an operator are near. An option of one layer may raise it by as much less as there are layers.
_NEAR_MARGIN = 3e-3


class LazySolver:
    """Solves a problem at lower bounds of its prices.

    With repeated layers it searches one choice for equal layers; its bound is of the problem at full depth.

    Args:
        lazy_costs: the problem, at prices that are at most the exact ones.
        resharder: the exact prices.
        tiling: the repeated layers; None if there are none.
        options: limits.
        discount: the price of collectives of a kind that compute hides. The result is then a proposal: tied layers are
            enough, if they come close to their bound, and nothing is proved.

    Attributes:
        lazy_costs: the problem with the exact prices that are known now.
        best: the best result, with its cost at exact prices.
    """

    def __init__(
        self,
        lazy_costs: LazyCosts,
        resharder: Resharder,
        tiling: Tiling | None,
        options: SolveOptions,
        discount: OverlapDiscount | None = None,
    ) -> None:
        self.lazy_costs = lazy_costs
        self.resharder = resharder
        self.tiling = tiling
        self.options = options
        self.discount = discount
        self.order = lazy_costs.built.program_positions
        self.best = SolveResult(status="unknown")
        self._cached_problem: tuple[BuiltProblem, Problem] | None = None  # with the discount

    def run(self) -> SolveResult:
        """Return the best assignment at exact prices, with a bound of all assignments."""
        enough = _EXACT_GAP if self.discount is None else _PROPOSAL_GAP
        near = None if self.discount is None else self.lazy_costs.near_options(self.discount)
        if near is not None:
            # Scans at a lower and a higher price have found the near options of all prices between.
            self._solve_near_options(near)
            return self.best
        for _ in range(_MAX_SCANS):
            near, bound = self._scan_options()
            if self._is_within(enough, bound) or self._is_finished():
                break
            self._solve_near_options(near)
            if self._is_within(enough, bound) or self._is_finished():
                break
        if self.discount is not None:
            return self.best
        if self.tiling is not None and not self._is_finished():
            self._bound_untied(self.tiling)
        for _ in range(_MAX_SEGMENT_ROUNDS):
            if self.best.gap <= CLOSE or self._is_finished():
                break
            result = solve_by_segments(self._problem(), self.order, self.tiling, self.options)
            if not self._update(result, result.assignment):
                break
        return self.best

    def _is_finished(self) -> bool:
        return self.best.interrupted or monotonic() > self.options.deadline

    def _is_within(self, gap: float, bound: float) -> bool:
        return self.best.cost <= bound + gap * abs(bound)

    def _problem(self) -> Problem:
        built = self.lazy_costs.built
        if self._cached_problem is None or self._cached_problem[0] is not built:
            discounted = built if self.discount is None else built.with_discount(self.discount)
            self._cached_problem = built, discounted.problem
        return self._cached_problem[1]

    def _scan_options(self) -> tuple[list[IntArray], float]:
        """Return the options of tied layers that are near the best, by messages over all options, and their bound."""
        messages = tied_messages(self._problem(), self.order, self.tiling)
        if self.lazy_costs.messages is not None:
            messages.start_from(*self.lazy_costs.messages)
        known, iterations = self.best.cost, ITERATIONS if self.discount is None else _PROPOSAL_ITERATIONS
        close = _EXACT_GAP if np.isfinite(known) else _FIRST_SCAN_GAP
        relaxed, interrupted = run_messages(messages, iterations, self.options, known, close)
        result = result_of_messages(relaxed, interrupted)
        near = messages.strategies_within(_NEAR_MARGIN * abs(relaxed.bound) * self._repeat_shares())
        self.lazy_costs = self.lazy_costs.with_scan(self.discount, near, messages)
        if self.tiling is None and self.discount is None:
            # The costs may be too low; the bound holds.
            self.best = better_result(self.best, replace(result, assignment=(), cost=float("inf")))
        if interrupted or np.isfinite(known) or self._is_finished():
            self._update(replace(result, lower_bound=-np.inf), self._spread(relaxed.assignment))
        return near, relaxed.bound

    def _repeat_shares(self) -> np.ndarray:
        """Return for every variable of tied layers how many layers share its choice, relative to the most."""
        if self.tiling is None:
            return np.ones(len(self.order))
        counts = Counter(self.tiling.follows)
        repeated = np.array([counts[place] for place in range(len(self.tiling.leaders))], dtype=float)
        return repeated / repeated.max()

    def _spread(self, assignment: Sequence[int]) -> tuple[int, ...]:
        return self.tiling.spread(assignment) if self.tiling is not None and assignment else tuple(assignment)

    def _solve_near_options(self, near: list[IntArray]) -> None:
        """Solve with the near options of tied layers, until all prices of a result were exact."""
        assert self.lazy_costs.messages is not None
        warm = self.lazy_costs.messages
        for attempt in range(_MAX_UPDATES):
            # Each attempt starts from the messages of the one before, the first from those of the scan.
            messages = tied_messages(self._problem(), self.order, self.tiling, near)
            messages.start_from(*(warm if attempt else restrict_messages(messages.problem, *warm, near)))
            relaxed, interrupted = run_messages(messages, ITERATIONS, self.options)
            warm, result = (messages.along, messages.against), result_of_messages(relaxed, interrupted)
            if result.gap > CLOSE and not interrupted:
                leaders = self.order if self.tiling is None else [self.order[leader] for leader in self.tiling.leaders]
                result = better_result(result, solve_by_segments(messages.problem, leaders, None, self.options))
            chosen = [int(options[place]) for options, place in zip(near, result.assignment, strict=False)]
            changed = self._update(replace(result, lower_bound=-np.inf), self._spread(chosen))
            if not changed or self._is_finished() or self._is_within(_EXACT_GAP, relaxed.bound):
                break

    def _bound_untied(self, tiling: Tiling) -> None:
        """Bound the whole problem, with all options of layers that choose freely, from the messages of tied ones."""
        assert self.lazy_costs.messages is not None
        whole = Messages(self._problem(), self.order)
        whole.start_from(*tiling.messages(whole.problem, *self.lazy_costs.messages))
        result = self.bound_in_two_passes(whole, tiling.follows)
        self._update(result, result.assignment)

    def bound_in_two_passes(self, whole: Messages, follows: Sequence[int]) -> SolveResult:
        """Run some passes, and then more among the options that may be better than the best result.

        An assignment with an option that is left out costs at least as much as the best result. So no assignment costs
        less than that and the bound of the other options.
        """
        upper, options = self.best.cost, self.options
        relaxed, interrupted = run_messages(whole, UNTIED_ITERATIONS, options, upper, CLOSE)
        slack = upper - relaxed.bound + _ROUNDING * abs(upper)
        if interrupted or not np.isfinite(slack) or slack <= CLOSE * abs(upper):
            return result_of_messages(relaxed, interrupted)
        whole.run(1, upper=upper)
        # Equal layers keep the same options, and go on sharing their tables.
        kept_of: dict[int, IntArray] = {}
        for leader, within in zip(follows, whole.strategies_within(slack), strict=True):
            kept_of[leader] = np.union1d(kept_of[leader], within) if leader in kept_of else within
        kept = [kept_of[leader] for leader in follows]
        rest = Messages(restrict_problem(whole.problem, kept), self.order)
        rest.start_from(*restrict_messages(rest.problem, whole.along, whole.against, kept))
        relaxed, interrupted = run_messages(rest, REPAIR_ITERATIONS, options, upper)
        assignment = tuple(int(open_[place]) for open_, place in zip(kept, relaxed.assignment, strict=False))
        return replace(
            result_of_messages(relaxed, interrupted), assignment=assignment, lower_bound=min(relaxed.bound, upper)
        )

    def _update(self, result: SolveResult, assignment: tuple[int, ...]) -> bool:
        """Make the prices of an assignment exact, and keep it if it is better; return True if prices changed."""
        exact = self.lazy_costs.with_exact_costs(assignment, self.resharder) if assignment else None
        self.lazy_costs = exact or self.lazy_costs
        cost = self._problem().cost(assignment) if assignment else float("inf")
        result = replace(result, assignment=assignment if np.isfinite(cost) else (), cost=cost)
        self.best = better_result(self.best, result)
        return exact is not None
