"""The frontier of step time and peak memory: the plans that no other plan beats in both (TensorOpt, section 3).

`FrontierSearch` collects candidates and evaluates them; `recombine_plans` makes plans that decide in every operator as
one or another of some plans.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import BudgetError, PlanError
from autoshard.patterns.decisions import Decisions
from autoshard.planner.budget_search import find_leanest, forceable_parameters, names_by_size, peak_weights
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.explorer import check_host
from autoshard.planner.planner import Planner
from autoshard.planner.planning import explorer_for
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.plans.frontier import pareto_front
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.solver import Edge, Problem, cost_frontier
from autoshard.solver.problem import blend

_OPEN_GAPS = 8  # gaps that plans in which operators run again, or values are moved, are searched in
_ROUNDS = 8  # plans made where memory alone has a price
_MEMORY_ONLY_PRICE = 1e3  # all the memory of a plan, in costs of a step, where memory alone counts
_LOWER_PRICES = (1e2, 1e1, 1.0, 1e-1, 1e-2)  # further prices, in the same unit
_MAX_SUM_PLANS = 6  # plans taken from a frontier of sums
_ROWS_WORK = 200_000_000  # work limit of the solver on a problem with rows of memory: about two seconds
_MAX_HALVINGS = 2  # bisections of the number of forced parameters in one gap
_POOL_SIZE = 4  # plans that are recombined at a time
_MAX_RECOMBINED = 8  # recombinations of them that are evaluated

# Of the frontier of a problem with few strategies, see `solver.cost_frontier`.
_EPSILON = 0.01  # accuracy: its points are proposals
_LIMIT = 1  # partial assignments that one combination of strategies may keep for every gap of it
_CELLS = 5_000  # combinations of strategies of one table
_UNRESTRICTED_CELLS = 60_000  # the same if all strategies are open, and a fixed strategy would lose much


@dataclass(frozen=True, slots=True)
class FrontierCandidate:
    """An evaluated plan.

    Attributes:
        plan: the plan.
        constraints: the constraints that it was made under.
    """

    plan: CandidatePlan
    constraints: Constraints

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the step."""
        return self.plan.step_seconds

    @property
    def peak(self) -> int:
        """Bytes per device at the peak."""
        return self.plan.memory.peak


def frontier_plans(planner: Planner, gaps: int) -> list[ShardingPlan]:
    """Return the plans of a graph's frontier, from the smallest peak on.

    With `recompute="auto"`, plans in which operators run again are searched in the widest gaps, too; and with
    `offload="auto"` those that move values to the host.

    Args:
        planner: the planner, without a memory limit.
        gaps: the gaps that are searched in a frontier in which nothing runs again.
    """
    planner.warn_of_unknown_operators()
    explorer = explorer_for(planner)
    plans = FrontierSearch(explorer.planner, gaps).run()
    plans = explorer.frontier(plans[::-1], _OPEN_GAPS if explorer.may_rerun or explorer.may_move else 0)
    bound = plans[-1].lower_bound
    for plan in plans:
        check_host(plan.memory.host, planner)
    return [plan.estimate.context.describe(replace(plan, lower_bound=min(bound, plan.cost))) for plan in plans]


class FrontierSearch:
    """Searches for the plans that no other plan beats both in the time of a step and in the peak of a device.

    Neither is a sum over operators: the time is that of a timeline on which compute hides communication, the peak is a
    maximum over moments. Candidates come from sums that approximate both, and the evaluation decides.

    * The fast end is the plan without a limit, with its collectives hidden.
    * The lean end are plans at a price at which memory alone counts, at the moments at which the plans so far held most
      (fictitious play, as for a memory limit).
    * Between them are the plans of the frontier of cost and memory summed at those moments (`solver.cost_frontier`), or
      of lower prices if there are too many strategies for it. The largest parameters are forced to be sharded or not
      (Rhino 4.4).
    * All equal layers change at one price. So plans are recombined, each layer as in one or another of them:
      `recombine_plans` takes the cost frontier of the problem in which every operator has only the strategies of
      these plans.
    * The widest gaps are searched: at the rate at which their two ends trade time for memory, with more parameters
      forced than at one end and fewer than at the other, with rows of memory in the problem (Rhino 4.2), and by
      recombining the plans around them.

    Only the time limit, which ends the search early, makes the result depend on the machine.

    Args:
        planner: the planner, without a memory limit.
        gaps: the gaps of the frontier that are searched.
    """

    def __init__(self, planner: Planner, gaps: int = 4) -> None:
        assert planner.settings.memory_limit is None, "a frontier has every limit"
        self.planner = planner
        self.gaps = gaps
        self.candidates: list[FrontierCandidate] = []
        self.method = "alternate" if planner.settings.method == "alternate" else "auto"
        self.sizes = forceable_parameters(planner.graph, planner.constraints)
        self.recombined_pools: set[frozenset[int]] = set()
        self.unmodelled_bytes = 0.0  # of the last plan that rows of memory led to, those that the rows do not count

    def run(self) -> list[CandidatePlan]:
        """Return the plans, from the smallest peak to the shortest step; their bound is that of the last."""
        cheapest = self.planner.solve(self.planner.constraints)
        self.fastest = self._add_candidate(self.planner.fastest(cheapest), self.planner.constraints)
        forced = self._solve(self._force_largest(len(self.sizes)))
        if forced is not None:
            self._add_intermediate_plans(forced, self._add_lean_plans(forced))
        self._recombine_families()
        self._search_widest_gaps()
        return [
            replace(candidate.plan, lower_bound=self.fastest.plan.lower_bound)
            for candidate in _pareto_front(self.candidates)
        ]

    # Candidates between the ends

    def _add_lean_plans(self, forced: FrontierCandidate) -> np.ndarray:
        """Add plans of a small peak; return the weights of the moments that led to the smallest."""

        def solve(weights: np.ndarray) -> CandidatePlan | None:
            candidate = self._solve(forced.constraints, weights * (_unit_price(forced) * _MEMORY_ONLY_PRICE))
            return None if candidate is None else candidate.plan

        return find_leanest(forced.plan, solve, _ROUNDS)[1]

    def _add_intermediate_plans(self, forced: FrontierCandidate, weights: np.ndarray) -> None:
        """Add plans at lower prices of memory, and plans with fewer parameters forced."""
        # Lean plans have most parameters forced, fast ones none: both ends have a frontier of sums of their own.
        peak = peak_weights(self.fastest.plan.held_bytes)
        if not self._add_sum_plans(forced.constraints, weights) or not self._add_sum_plans(
            self.planner.constraints, peak
        ):
            for strength in _LOWER_PRICES:
                self._solve(forced.constraints, weights * (_unit_price(forced) * strength))
            for strength in _LOWER_PRICES[:-1]:
                self._solve(self.planner.constraints, peak * (_unit_price(self.fastest) * strength))
        count = 1
        while count < len(self.sizes):
            self._solve(self._force_largest(count))
            # Few of the parameters are large: their number grows by a factor.
            count *= 4

    def _add_sum_plans(self, constraints: Constraints, weights: np.ndarray) -> bool:
        """Add plans of the frontier of cost and weighted memory; return False if the problem is too large for it."""
        if self.planner.is_past_deadline:
            return True
        plans = recombine_plans(self.planner, constraints, None, weights, _MAX_SUM_PLANS)
        for decisions, cost in plans:
            self._add_candidate(self.planner.evaluate(decisions, cost, 0.0, "sums of memory"), constraints)
        return bool(plans)

    def _recombine_families(self) -> None:
        """Recombine plans that are spread over the frontier, separately for every set of forced parameters."""
        # Plans under other constraints are plans of another problem, in which a strategy may be missing.
        for forced in dict.fromkeys(candidate.constraints.forced for candidate in self.candidates):
            family = _pareto_front(_with_forced(self.candidates, forced))
            places = np.unique(np.linspace(0, len(family) - 1, _POOL_SIZE).round().astype(int))
            pool = [family[place] for place in places]
            self._recombine(pool, _mean_weights(pool[0], pool[-1]))

    def _recombine(self, pool: Sequence[FrontierCandidate], weights: np.ndarray) -> None:
        """Add plans that decide in every operator as one or another of some plans of one problem."""
        if len(pool) < 2 or frozenset(map(id, pool)) in self.recombined_pools:
            return
        self.recombined_pools.add(frozenset(map(id, pool)))  # `candidates` keeps them alive
        constraints, plans = pool[0].constraints, [candidate.plan.decisions for candidate in pool]
        for decisions, cost in recombine_plans(self.planner, constraints, plans, weights, _MAX_RECOMBINED):
            if self.planner.is_past_deadline:
                return
            self._add_candidate(self.planner.evaluate(decisions, cost, 0.0, "plans mixed"), constraints)

    # Gaps

    def _search_widest_gaps(self) -> None:
        seen: set[tuple[int, int]] = set()
        for _ in range(self.gaps):
            pairs = itertools.pairwise(_pareto_front(self.candidates))
            gaps = [(lean, fast) for lean, fast in pairs if (id(lean), id(fast)) not in seen]
            if not gaps or self.planner.is_past_deadline:
                return
            lean, fast = max(gaps, key=lambda gap: _gap_area(*gap))
            seen.add((id(lean), id(fast)))
            self._search_gap(lean, fast)

    def _search_gap(self, lean: FrontierCandidate, fast: FrontierCandidate) -> None:
        """Add plans that may lie between two others."""
        # Memory and time are compared by ratios, hence geometric means.
        middle = math.sqrt(lean.peak * fast.peak)
        self._solve_with_memory_rows(middle)
        weights = _mean_weights(lean, fast)
        # The seconds that the ends trade for a byte: a plan below the line between them is cheapest at this price.
        rate = max(lean.plan.cost - fast.plan.cost, lean.step_seconds - fast.step_seconds) / (fast.peak - lean.peak)
        for forced in dict.fromkeys((lean.constraints.forced, fast.constraints.forced)):
            self._solve(replace(self.planner.constraints, forced=forced), weights * rate)
        self._bisect_forced(lean, fast)
        near = sorted(_pareto_front(self.candidates), key=lambda candidate: abs(math.log(candidate.peak / middle)))
        for forced in dict.fromkeys((lean.constraints.forced, fast.constraints.forced)):
            self._recombine(_with_forced(near, forced)[:_POOL_SIZE], weights)

    def _bisect_forced(self, lean: FrontierCandidate, fast: FrontierCandidate) -> None:
        """Add plans with more parameters forced than at the fast end of a gap, and fewer than at the lean one."""
        middle = math.sqrt(lean.peak * fast.peak)
        low, high = len(fast.constraints.forced), len(lean.constraints.forced)
        for _ in range(_MAX_HALVINGS):
            if high - low < 2:
                return
            count = (low + high) // 2
            candidate = self._solve(self._force_largest(count))
            low, high = (low, count) if candidate is not None and candidate.peak <= middle else (count, high)

    def _solve_with_memory_rows(self, peak: float) -> None:
        """Add the plan of the problem with rows of memory (Rhino 4.2), for a peak of about so many bytes."""
        if self.planner.is_past_deadline:
            return
        with contextlib.suppress(PlanError, BudgetError):
            # The rows leave out some memory: about as much as the last time.
            limit = peak - self.unmodelled_bytes
            # Rows of memory make some problems far harder than prices do.
            plan = self.planner.solve(self.planner.constraints, method=self.method, limit=limit, work=_ROWS_WORK)
            self.unmodelled_bytes = max(0.0, plan.memory.peak - limit)
            self._add_candidate(replace(plan, method=f"{plan.method}, memory bounded"), self.planner.constraints)

    # Problems

    def _force_largest(self, count: int) -> Constraints:
        return replace(self.planner.constraints, forced=frozenset(names_by_size(self.sizes)[:count]))

    def _solve(self, constraints: Constraints, prices: np.ndarray | None = None) -> FrontierCandidate | None:
        """Add the cheapest plan under some constraints; return None if time is up.

        Args:
            constraints: the constraints.
            prices: seconds per byte of memory at every moment.
        """
        plan = self.planner.try_solve(constraints, method=self.method, prices=prices)
        if plan is None:
            return None
        notes = [f"{len(constraints.forced)} parameters forced to be sharded"] if constraints.forced else []
        notes += ["memory priced"] if prices is not None else []
        return self._add_candidate(replace(plan, method=", ".join([plan.method, *notes])), constraints)

    def _add_candidate(self, plan: CandidatePlan, constraints: Constraints) -> FrontierCandidate:
        self.candidates.append(FrontierCandidate(plan, constraints))
        return self.candidates[-1]


def _with_forced(candidates: Sequence[FrontierCandidate], forced: frozenset[str]) -> list[FrontierCandidate]:
    """Return the candidates with these forced parameters."""
    return [candidate for candidate in candidates if candidate.constraints.forced == forced]


def _unit_price(candidate: FrontierCandidate) -> float:
    """Return the price of a byte at which all the memory of a plan costs as much as its step."""
    return candidate.plan.cost / candidate.peak


def _mean_weights(lean: FrontierCandidate, fast: FrontierCandidate) -> np.ndarray:
    """Return weights of the moments at which either plan holds most."""
    return (peak_weights(lean.plan.held_bytes) + peak_weights(fast.plan.held_bytes)) / 2


def _gap_area(lean: FrontierCandidate, fast: FrontierCandidate) -> float:
    """Return the area between the frontier as it is known and as it may be, relative to the ends of the gap."""
    return (fast.peak / lean.peak - 1.0) * (lean.step_seconds / fast.step_seconds - 1.0)


def _pareto_front(candidates: Sequence[FrontierCandidate]) -> list[FrontierCandidate]:
    """Return the candidates that no other one beats, from the smallest peak to the shortest step."""
    return pareto_front(candidates, lambda candidate: (candidate.peak, candidate.step_seconds))


def recombine_plans(
    planner: PlanningContext,
    constraints: Constraints,
    plans: Sequence[Decisions] | None,
    weights: np.ndarray,
    count: int,
) -> list[tuple[Decisions, float]]:
    """Return decisions on the frontier of cost and weighted memory, in which every node decides as one of the plans.

    Args:
        planner: the planner of the graph.
        constraints: the constraints of all the plans.
        plans: the plans; None if all strategies are open.
        weights: weights of the moments [operators + 1].
        count: the most decisions, spread evenly over the frontier without its ends.

    Returns:
        Decisions and their cost in seconds. There are none on meshes of more than two axes, or of more than one if all
        strategies are open: these have too many strategies.
    """
    axes = frozenset(planner.axes)
    if len(axes) > (1 if plans is None else 2):
        return []
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, constraints)
    built = builder.build(axes, reuse="all")
    kept = [np.arange(len(costs)) for costs in built.problem.costs]
    if plans is not None:
        kept = [np.unique(chosen) for chosen in np.transpose([built.encode(plan) for plan in plans])]
    plain = _restrict_strategies(built.problem, kept)
    # The memory of a strategy is what a price adds to its seconds, which includes the copies that reshards make.
    priced = _restrict_strategies(built.with_memory_prices(weights).problem, kept)
    usages = tuple(_price_difference(*costs) for costs in zip(priced.costs, plain.costs, strict=True))
    tables = [
        _price_difference(*(edge.costs for edge in edges)) for edges in zip(priced.edges, plain.edges, strict=True)
    ]
    problem = replace(plain, usages=usages, intervals=((0, 1),) * len(usages))
    cells = _UNRESTRICTED_CELLS if plans is None else _CELLS
    frontier = cost_frontier(problem, edge_usages=tables, epsilon=_EPSILON, limit=_LIMIT, cells=cells)
    # The ends of the frontier are most often known: the fastest and the leanest of the plans.
    points = np.unique(np.linspace(0, len(frontier) - 1, count + 2).round().astype(int))[1:-1]
    recombined = []
    for point in points:
        chosen = zip(kept, frontier.assignments[point], strict=True)
        assignment = [int(strategies[place]) for strategies, place in chosen]
        recombined.append((built.decode(assignment), built.problem.cost(assignment)))
    return recombined


def _restrict_strategies(problem: Problem, kept: Sequence[np.ndarray]) -> Problem:
    """Return the problem with only the kept strategies of every node."""
    ends = [(edge, np.ix_(kept[edge.source], kept[edge.target])) for edge in problem.edges]
    edges = (
        Edge(edge.source, edge.target, blend((factor, table[at]) for factor, table in edge.parts).table)
        for edge, at in ends
    )
    costs = tuple(costs[strategies] for costs, strategies in zip(problem.costs, kept, strict=True))
    # An edge between single strategies costs the same in all assignments.
    return Problem(costs, tuple(edge for edge in edges if edge.costs.size > 1))


def _price_difference(priced: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """Return what the price added; zero where the plain costs are infinite."""
    finite = np.isfinite(plain)
    return np.maximum(0.0, np.where(finite, priced, 0.0) - np.where(finite, plain, 0.0))
