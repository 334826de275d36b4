"""A problem at loose prices, answered: messages look at all options, few of them are near, and these are taught.

Where repeated layers are known, all that is looked for is one choice for equal ones; what is proved is proved for the
whole depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import numpy as np

from autoshard.planner.lazy_costs import LazyCosts
from autoshard.planner.planning_problem import OverlapDiscount
from autoshard.planner.solving import (
    CLOSE,
    ITERATIONS,
    REPAIR_ITERATIONS,
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

_MAX_SCANS = 4
"""Times that all options are looked at, at most."""

_MAX_UPDATES = 40
"""Times that prices are learned for some options, at most."""

_EXACT_GAP = 1e-4
"""Relative distance of the best answer to what bounds it at which no more is learned."""

_FIRST_SCAN_GAP = 2e-3
"""The same of the first look, at prices that are not exact yet: what is learned next changes them by more."""

_PROPOSAL_GAP = 2e-2
"""The same of a proposal: a few passes do not bound it well."""

_UNTIED_ITERATIONS = 3
"""Passes there and back at full depth, at most, before options are left out that are proved to be of no use."""

_ROUNDING = 1e-9
"""Relative slack within which an option might be as good as a known assignment."""

_PROPOSAL_ITERATIONS = 5
"""Passes there and back after which a proposal is looked for among the options that are near the best."""

_NEAR_MARGIN = 3e-3
"""Part of the bound by which an option may raise it to be near, if all layers choose it; there are some ten of them on
three axes. What is chosen in one layer alone may raise it by as much less as there are layers."""

_MAX_SEGMENT_ROUNDS = 4
"""Times that segments are, where what messages give is not close."""


def solve_lazily(
    lessons: LazyCosts,
    resharder: Resharder,
    tiling: Tiling | None,
    search: SolveOptions,
    hiding: OverlapDiscount | None = None,
) -> tuple[SolveResult, LazyCosts]:
    """The best assignment of a problem at loose prices by exact ones, and what was learned on the way.

    Args:
        lessons: the problem, at prices that are not above the exact ones.
        resharder: the exact ones.
        tiling: which variables repeat others; None where nothing does.
        search: limits.
        hiding: what collectives of a kind count; all their seconds by default. The answer is then a proposal: tied
            layers are enough, if they come close to what bounds them, and nothing is proved.

    Returns:
        The assignment, with its cost at exact prices and a bound of all; and the problem with the prices learned.
    """
    course = _LazySolver(lessons, resharder, tiling, search, hiding)
    return course.run(), course.lazy_costs


class _LazySolver:
    """One problem on its way from loose prices to an answer: `best` is that so far, `lessons` what was learned."""

    def __init__(
        self,
        lessons: LazyCosts,
        resharder: Resharder,
        tiling: Tiling | None,
        search: SolveOptions,
        hiding: OverlapDiscount | None,
    ) -> None:
        self.lazy_costs = lessons
        self.resharder = resharder
        self.tiling = tiling
        self.search = search
        self.discount = hiding
        self.order = lessons.built.program_positions
        self._cached_problem: tuple[LazyCosts, Problem] | None = None  # at the prices learned last
        self.best = SolveResult((), float("inf"), -np.inf, "messages", "unknown")

    def run(self) -> SolveResult:
        enough = _EXACT_GAP if self.discount is None else _PROPOSAL_GAP
        around = None if self.discount is None else self.lazy_costs.near_options(self.discount)
        if around is not None:
            self._solve_near_options(around)
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
            self._bound_untied()
        for _ in range(_MAX_SEGMENT_ROUNDS):
            if self.best.gap <= CLOSE or self._is_finished():
                break
            stitched = solve_by_segments(self._problem(), self.order, self.tiling, self.search)
            if not self._examine(stitched, stitched.assignment):
                break
        return self.best

    def _is_finished(self) -> bool:
        return self.best.interrupted or monotonic() > self.search.deadline

    def _is_within(self, part: float, bound: float) -> bool:
        """Whether the best answer is within this part of a bound."""
        return self.best.cost <= bound + part * abs(bound)

    def _problem(self) -> Problem:
        if self._cached_problem is None or self._cached_problem[0].built is not self.lazy_costs.built:
            self._cached_problem = self.lazy_costs, self.lazy_costs.discounted_problem(self.discount).problem
        return self._cached_problem[1]

    def _scan_options(self) -> tuple[list[IntArray], float]:
        """The options of tied layers that are near the best, by passes over all, and what bounds such layers."""
        messages = tied_messages(self._problem(), self.order, self.tiling)
        if self.lazy_costs.messages is not None:
            messages.start_from(*self.lazy_costs.messages)
        known, looked = self.best.cost, ITERATIONS if self.discount is None else _PROPOSAL_ITERATIONS
        close = _EXACT_GAP if np.isfinite(known) else _FIRST_SCAN_GAP
        relaxed, interrupted = run_messages(messages, looked, self.search, known, close)
        near = messages.strategies_within(_NEAR_MARGIN * abs(relaxed.bound) * self._repeat_shares())
        self.lazy_costs = self.lazy_costs.with_scan(self.discount, near, messages)
        if self.tiling is None and self.discount is None:
            self.best = better_result(
                self.best, replace(result_of_messages(relaxed, interrupted), assignment=(), cost=float("inf"))
            )
        if interrupted or np.isfinite(known) or self._is_finished():
            found = replace(result_of_messages(relaxed, interrupted), lower_bound=-np.inf)
            self._examine(found, self._spread(relaxed.assignment))
        return near, relaxed.bound

    def _repeat_shares(self) -> np.ndarray:
        """Per variable of tied layers, the part of the layers that choose as it does, of the most that do so."""
        if self.tiling is None:
            return np.ones(len(self.order))
        counts = Counter(self.tiling.follows)
        repeated = np.array([counts[place] for place in range(len(self.tiling.leaders))], dtype=float)
        return repeated / repeated.max()

    def _spread(self, assignment: Sequence[int]) -> tuple[int, ...]:
        return self.tiling.spread(assignment) if self.tiling is not None and assignment else tuple(assignment)

    def _solve_near_options(self, near: list[IntArray]) -> None:
        """Answers of some options of tied layers, until all that the last one counts on is exact."""
        assert self.lazy_costs.messages is not None
        warm = self.lazy_costs.messages
        for attempt in range(_MAX_UPDATES):
            messages = tied_messages(self._problem(), self.order, self.tiling, near)
            messages.start_from(*(warm if attempt else restrict_messages(messages.problem, *warm, near)))
            relaxed, interrupted = run_messages(messages, ITERATIONS, self.search)
            warm, found = (messages.along, messages.against), result_of_messages(relaxed, interrupted)
            if found.gap > CLOSE and not interrupted:
                leaders = self.order if self.tiling is None else [self.order[leader] for leader in self.tiling.leaders]
                found = better_result(found, solve_by_segments(messages.problem, leaders, None, self.search))
            chosen = [int(options[place]) for options, place in zip(near, found.assignment, strict=False)]
            news = self._examine(replace(found, lower_bound=-np.inf), self._spread(chosen))
            if not news or self._is_finished() or self._is_within(_EXACT_GAP, relaxed.bound):
                break

    def _bound_untied(self) -> None:
        """Bounds the whole problem, all options of untied layers, from what was told in tied ones."""
        assert self.lazy_costs.messages is not None
        assert self.tiling is not None
        whole = Messages(self._problem(), self.order)
        whole.start_from(*self.tiling.messages(whole.problem, *self.lazy_costs.messages))
        found = self._bound_in_two_passes(whole, self.tiling.follows)
        self._examine(found, found.assignment)

    def _bound_in_two_passes(self, whole: Messages, follows: Sequence[int]) -> SolveResult:
        """Some passes, then, where these are not close, more among the options that they leave open below a known cost.

        What is left out costs at least that, so that no assignment costs less than it and what bounds the others.
        Layers keep the same options, to go on sharing their tables.
        """
        upper, search = self.best.cost, self.search
        relaxed, interrupted = run_messages(whole, _UNTIED_ITERATIONS, search, upper, CLOSE)
        slack = upper - relaxed.bound + _ROUNDING * abs(upper)
        if interrupted or not np.isfinite(slack) or slack <= CLOSE * abs(upper):
            return result_of_messages(relaxed, interrupted)
        whole.run(1, upper=upper)
        open_: dict[int, IntArray] = {}
        for leader, own in zip(follows, whole.strategies_within(slack), strict=True):
            open_[leader] = np.union1d(open_[leader], own) if leader in open_ else own
        kept = [open_[leader] for leader in follows]
        rest = Messages(restrict_problem(whole.problem, kept), self.order)
        rest.start_from(*restrict_messages(rest.problem, whole.along, whole.against, kept))
        relaxed, interrupted = run_messages(rest, REPAIR_ITERATIONS, search, upper)
        assignment = tuple(int(some[place]) for some, place in zip(kept, relaxed.assignment, strict=False))
        return replace(
            result_of_messages(relaxed, interrupted), assignment=assignment, lower_bound=min(relaxed.bound, upper)
        )

    def _examine(self, found: SolveResult, assignment: tuple[int, ...]) -> bool:
        """Takes an answer if it is better by the exact prices of what it uses; says whether these were news."""
        after = self.lazy_costs.with_exact_costs(assignment, self.resharder) if assignment else None
        self.lazy_costs = after or self.lazy_costs
        cost = self._problem().cost(assignment) if assignment else float("inf")
        self.best = better_result(
            self.best, replace(found, assignment=assignment if np.isfinite(cost) else (), cost=cost)
        )
        return after is not None
