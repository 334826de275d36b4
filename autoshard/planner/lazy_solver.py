"""Solves a problem at lower bounds of its prices: scans all options, and makes the prices of near ones exact.

On three axes and more there are too many pairs of specs to find a path for each, but few of them matter. The optimum at
lower bounds of prices bounds that of the exact problem. If its solution uses a price that is too low, the exact price
replaces it, and the problem is solved again. A solution with only exact prices is optimal for the exact problem too, up
to the proved gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.planner.planning_problem import BuiltProblem, HideableKind, OverlapDiscount, ReshardEdge
from autoshard.planner.solving import (
    CLOSE,
    ITERATIONS,
    REPAIR_ITERATIONS,
    SolveOptions,
    SolveResult,
    Start,
    better_result,
    result_of_messages,
    run_messages,
    solve_by_segments,
)
from autoshard.planner.tiling import Tiling
from autoshard.reshard.path import Resharder
from autoshard.solver import Edge, Problem
from autoshard.solver.problem import IntArray
from autoshard.solver.reduced_problem import ReducedProblem, restrict_messages, untie_messages

_MAX_SCANS = 4  # scans of all options
_MAX_UPDATES = 40  # updates of the prices of near options between two scans
_MAX_SEGMENT_ROUNDS = 4  # solutions by segments, if message passing has a gap

# Relative gaps between the best result and a bound.
_EXACT_GAP = 1e-4  # at which no further prices are made exact
_FIRST_SCAN_GAP = 2e-3  # at which the first scan ends: exact prices will change its result by more
_PROPOSAL_GAP = 2e-2  # at which the search for a proposal ends, whose bound by few passes is not tight

UNTIED_ITERATIONS = 3  # passes at full depth before options that are proved useless are dropped
_PROPOSAL_ITERATIONS = 5  # passes before a proposal is searched among near options
_ROUNDING = 1e-9  # relative slack within which an option may be as good as a known assignment
_PRICE_TOLERANCE = 1e-9  # relative difference up to which two prices are equal

# An option is near if it raises the bound by less than this fraction when all layers choose it; on three axes about ten
# options of an operator are near. For an option of a single layer, the fraction is divided by the number of layers.
_NEAR_MARGIN = 3e-3


class LazySolver:
    """Solves a problem at lower bounds of its prices.

    With repeated layers it searches one choice for equal layers; its bound is that of the problem at full depth.

    Args:
        lazy_costs: the problem, at prices that are at most the exact ones.
        resharder: the exact prices.
        tiling: the repeated layers; None if there are none.
        options: limits.
        discount: the price of collectives of a kind that compute hides. The result is then a proposal: tied layers
            close to their bound suffice, and nothing is proved.

    Attributes:
        lazy_costs: the problem with the exact prices known so far.
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
            # Scans at a lower and a higher price have found the near options of all prices in between.
            self._solve_near_options(near)
            return self.best
        for _ in range(_MAX_SCANS):
            near, bound = self._scan_options()
            if self._is_within(enough, bound) or self._is_finished():
                break
            self._solve_near_options(near)
            # The bound of a scan, over all options at too low prices, is valid and may suffice.
            if self._is_within(enough, bound) or self._is_finished():
                break
        if self.discount is not None:
            return self.best
        if self.tiling is not None and not self._is_finished():
            self._bound_untied(self.tiling)
        for _ in range(_MAX_SEGMENT_ROUNDS):
            if self.best.gap <= CLOSE or self._is_finished():
                break
            # Without changed prices, the segments would find the same assignment.
            if not self._update(solve_by_segments(self._tied_layers(self._whole()), self.options)):
                break
        return self.best

    def _is_finished(self) -> bool:
        return self.options.budget.is_over

    def _is_within(self, gap: float, bound: float) -> bool:
        return self.best.cost <= bound + gap * abs(bound)

    def _problem(self) -> Problem:
        built = self.lazy_costs.built
        if self._cached_problem is None or self._cached_problem[0] is not built:
            discounted = built if self.discount is None else built.with_discount(self.discount)
            self._cached_problem = built, discounted.problem
        return self._cached_problem[1]

    def _whole(self) -> ReducedProblem:
        return ReducedProblem.of(self._problem(), self.order)

    def _tied_layers(self, reduced: ReducedProblem) -> ReducedProblem:
        return reduced if self.tiling is None else self.tiling.tie(reduced)

    def _scan_options(self) -> tuple[list[IntArray], float]:
        """Return the options of tied layers that are near the best, by messages over all options, and their bound."""
        known, iterations = self.best.cost, ITERATIONS if self.discount is None else _PROPOSAL_ITERATIONS
        # Before exact prices are known, the result is rough, and the scan may end early.
        close = _EXACT_GAP if np.isfinite(known) else _FIRST_SCAN_GAP
        tied, start = self._tied_layers(self._whole()), self.lazy_costs.messages
        messages = run_messages(tied, iterations, self.options, start=start, upper=known, close=close)
        result = result_of_messages(tied, messages)
        near = messages.strategies_within(_NEAR_MARGIN * abs(messages.bound) * self._repeat_shares())
        scans = (*self.lazy_costs.scans, OptionScan(self.discount, near))
        self.lazy_costs = replace(self.lazy_costs, messages=(messages.along, messages.against), scans=scans)
        if self.discount is None:
            # The costs may be too low, but the bound is valid.
            self.best = better_result(self.best, replace(result, assignment=(), cost=float("inf")))
        # The first scan only finds near options; its assignment is used if nothing better can follow.
        if np.isfinite(known) or self._is_finished():
            self._update(replace(result, lower_bound=-np.inf))
        return near, messages.bound

    def _repeat_shares(self) -> np.ndarray:
        """Return, for every variable of tied layers, the number of layers with its choice, relative to the most."""
        if self.tiling is None:
            return np.ones(len(self.order))
        counts = Counter(self.tiling.follows)
        repeated = np.array([counts[place] for place in range(len(self.tiling.leaders))], dtype=float)
        return repeated / repeated.max()

    def _solve_near_options(self, near: list[IntArray]) -> None:
        """Solve with the near options of tied layers until all prices of a result are exact."""
        assert self.lazy_costs.messages is not None
        warm: Start = self.lazy_costs.messages
        kept = near if self.tiling is None else [near[leader] for leader in self.tiling.follows]
        for attempt in range(_MAX_UPDATES):
            reduced = self._tied_layers(self._whole().restrict(kept))
            # Each attempt starts from the messages of the previous one, the first from those of the scan.
            start = warm if attempt else restrict_messages(reduced.problem, *self.lazy_costs.messages, near)
            messages = run_messages(reduced, ITERATIONS, self.options, start=start)
            warm, result = (messages.along, messages.against), result_of_messages(reduced, messages)
            # Message passing among few options may stall; segments of the small problem are fast.
            if messages.gap > CLOSE and not self.options.budget.interrupted:
                result = better_result(result, solve_by_segments(reduced, self.options))
            changed = self._update(result)
            if not changed or self._is_finished() or self._is_within(_EXACT_GAP, messages.bound):
                break

    def _bound_untied(self, tiling: Tiling) -> None:
        """Bound the whole problem, with independent layers and all options, from the messages of tied layers."""
        assert self.lazy_costs.messages is not None
        start = untie_messages(self._problem(), tiling.follows, *self.lazy_costs.messages)
        self._update(self.bound_in_two_passes(start, tiling.follows))

    def bound_in_two_passes(self, start: Start | None, follows: Sequence[int]) -> SolveResult:
        """Run some passes, and then more among the options that may be better than the best result.

        An assignment with a dropped option costs at least as much as the best result. So no assignment costs less than
        the minimum of that and the bound of the other options.
        """
        upper, options, whole = self.best.cost, self.options, self._whole()
        messages = run_messages(whole, UNTIED_ITERATIONS, options, start=start, upper=upper, close=CLOSE)
        slack = upper - messages.bound + _ROUNDING * abs(upper)
        # Without a known cost no option can be dropped; with a small gap none has to be.
        if options.budget.interrupted or not np.isfinite(slack) or slack <= CLOSE * abs(upper):
            return result_of_messages(whole, messages)
        # A pass gives the increase of the bound by an option, relative to the bound before it, as the slack.
        messages.iterate()
        # Equal layers keep the same options, and share tables.
        kept_of: dict[int, IntArray] = {}
        for leader, within in zip(follows, messages.strategies_within(slack), strict=True):
            kept_of[leader] = np.union1d(kept_of[leader], within) if leader in kept_of else within
        kept = [kept_of[leader] for leader in follows]
        rest = whole.restrict(kept, lost=upper)
        start = restrict_messages(whole.problem, messages.along, messages.against, kept)
        return result_of_messages(rest, run_messages(rest, REPAIR_ITERATIONS, options, start=start, upper=upper))

    def _update(self, result: SolveResult) -> bool:
        """Make the prices of an assignment exact, and keep it if it is better; return True if prices changed."""
        assignment = result.assignment
        exact = self.lazy_costs.with_exact_costs(assignment, self.resharder) if assignment else None
        self.lazy_costs = exact or self.lazy_costs
        cost = self._problem().cost(assignment) if assignment else float("inf")
        result = replace(result, assignment=assignment if np.isfinite(cost) else (), cost=cost)
        self.best = better_result(self.best, result)
        return exact is not None


@dataclass(frozen=True, slots=True, eq=False)
class OptionScan:
    """The options near the best at one discount.

    Attributes:
        discount: the price of hidden seconds; None if they count in full.
        near: per variable of the problem, or of its tied layers, the options near the best.
    """

    discount: OverlapDiscount | None
    near: Sequence[np.ndarray]

    def price(self, kind: HideableKind) -> float | None:
        """Return the price of a hidden second of a kind; None if the discount is on another kind."""
        if self.discount is None:
            return 1.0
        return self.discount.price if self.discount.kind == kind else None


@dataclass(frozen=True, eq=False)
class LazyCosts:
    """A problem at prices that may be too low.

    Attributes:
        built: the problem, with the known exact prices.
        messages: the last messages along its edges and against them (of its tied layers, if there are any), a good
            start for the next ones.
        scans: scans of all options at several discounts, in order.
    """

    built: BuiltProblem
    messages: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None
    scans: tuple[OptionScan, ...] = ()

    def near_options(self, discount: OverlapDiscount) -> list[np.ndarray] | None:
        """Return the options near the best at any price of a kind; None without scans at a lower and a higher price."""
        scans = [scan for scan in self.scans if scan.price(discount.kind) is not None]
        prices = [price for scan in scans if (price := scan.price(discount.kind)) is not None]
        if not prices or not min(prices) <= discount.price <= max(prices):
            return None
        return [np.unique(np.concatenate(options)) for options in zip(*(scan.near for scan in scans), strict=True)]

    def with_exact_costs(self, assignment: Sequence[int], resharder: Resharder) -> LazyCosts | None:
        """Return the problem with the exact prices of an assignment's reshards; None if they were exact already."""
        exact_costs: dict[int, list[_ExactCosts]] = {}  # by identity of the edge's table
        seen: set[tuple[int, int, int]] = set()
        edges = self.built.problem.edges
        used: dict[tuple[int, int, int], int] = {}  # equal layers use the same entries of the same tables
        for number in self.built.reshard_edges:
            edge = edges[number]
            used.setdefault((id(edge.costs), assignment[edge.source], assignment[edge.target]), number)
        for (_, row, column), number in used.items():
            edge, reshard = edges[number], self.built.reshard_edges[number]
            source, target = reshard.sources.index[row], reshard.targets.index[column]
            if (id(edge.costs), source, target) in seen:
                continue
            seen.add((id(edge.costs), source, target))
            known = exact_costs.setdefault(id(edge.costs), [])
            # An earlier path search has found this price.
            if any(exact.covers(source, target) for exact in known):
                continue
            exact = _find_exact_costs(reshard, int(source), int(target), resharder)
            if exact.price(source, target) > edge.costs[row, column] + _PRICE_TOLERANCE * abs(edge.costs[row, column]):
                known.append(exact)
        if not any(exact_costs.values()):
            return None
        return replace(self, built=self._replace_costs(exact_costs))

    def _replace_costs(self, exact_costs: dict[int, list[_ExactCosts]]) -> BuiltProblem:
        edges, hideable = list(self.built.problem.edges), dict(self.built.hideable)
        raised = _memoize_by_identity(_raise_to_exact_costs)
        for number, reshard in self.built.reshard_edges.items():
            edge = edges[number]
            known = exact_costs.get(id(edge.costs))
            if known:
                edges[number] = Edge(edge.source, edge.target, raised(edge.costs, reshard, known))
                if number in hideable:
                    seconds = raised(hideable[number].seconds, reshard, known)
                    hideable[number] = replace(hideable[number], seconds=seconds)
        return replace(self.built, problem=replace(self.built.problem, edges=tuple(edges)), hideable=hideable)


@dataclass(frozen=True, eq=False)
class _ExactCosts:
    """Exact prices from some of the distinct specs of an edge's source to some of its target."""

    rows: np.ndarray
    columns: np.ndarray
    seconds: np.ndarray

    def covers(self, row: int, column: int) -> bool:
        return row in self.rows and column in self.columns

    def price(self, row: int, column: int) -> float:
        return float(self.seconds[np.searchsorted(self.rows, row), np.searchsorted(self.columns, column)])


def _find_exact_costs(reshard: ReshardEdge, row: int, column: int, resharder: Resharder) -> _ExactCosts:
    """Return the exact prices from one spec to another, and to all specs covered by the same path search."""
    exact = resharder.gradients if reshard.gradient else resharder
    meta, source, targets = reshard.meta, reshard.sources.distinct[row], reshard.targets.distinct
    columns = np.array(exact.same_graph_positions(meta.shape, targets, column))
    seconds = exact.seconds(meta.shape, meta.dtype.itemsize, [source], [targets[column] for column in columns])
    return _ExactCosts(np.array([row]), columns, seconds)


def _raise_to_exact_costs(costs: np.ndarray, reshard: ReshardEdge, exact_costs: Sequence[_ExactCosts]) -> np.ndarray:
    known = np.zeros((len(reshard.sources.distinct), len(reshard.targets.distinct)))
    for exact in exact_costs:
        known[np.ix_(exact.rows, exact.columns)] = exact.seconds
    # The maximum keeps forbidden pairs infinite.
    return np.maximum(costs, known[np.ix_(reshard.sources.index, reshard.targets.index)])


def _memoize_by_identity(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Cache results by the identity of the first argument, so that equal layers share tables."""
    results: dict[int, np.ndarray] = {}

    def lookup(first: np.ndarray, *others: object) -> np.ndarray:
        if id(first) not in results:
            results[id(first)] = function(first, *others)
        return results[id(first)]

    return lookup
