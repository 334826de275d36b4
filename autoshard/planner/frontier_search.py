"""Every plan that is worth its memory: the frontier of a step's time and a device's peak (TensorOpt, section 3)."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.recomputation import recomputable, recompute_layers
from autoshard.errors import BudgetError, PlanError
from autoshard.memory.budget import names_by_size, peak_weights
from autoshard.patterns.decisions import Decisions
from autoshard.planner.budget_search import forceable_parameters
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.recombine import recombine_plans
from autoshard.plans.sharding_plan import ShardingPlan

_ROUNDS = 8  # plans made where memory alone has a price
_MEMORY_ONLY_PRICE = 1e3  # all the memory of a plan, in costs of a step, where memory alone counts
_MAX_SUM_PLANS = 6  # plans taken from a frontier of sums
_LOWER_PRICES = (1e2, 1e1, 1.0, 1e-1, 1e-2)  # prices below that one, tried from every set of forced parameters
_ROWS_WORK = 200_000_000  # of the solver on a problem with rows of memory: about two seconds
_MAX_HALVINGS = 2  # of the number of parameters that are forced, in one gap
_POOL_SIZE = 4  # plans that are mixed at a time
_MAX_RECOMBINED = 8  # mixtures of them that are accounted for


@dataclass(frozen=True, slots=True)
class FrontierCandidate:
    """A plan that was found, as the planner accounts for it.

    Attributes:
        found: its decisions, cost and memory.
        wishes: of the problem that it solves.
        step: predicted seconds of the step.
    """

    plan: CandidatePlan
    constraints: Constraints
    step_seconds: float

    @property
    def peak(self) -> int:
        """Bytes per device at the peak."""
        return self.plan.memory.peak


def frontier_plans(planner: Planner, gaps: int) -> list[ShardingPlan]:
    """The plans of a graph that are worth their memory, with layers recomputed as the planner's settings say.

    `"auto"`: the plans without recomputation, and those in which all layers are run again. Some of either may beat some
    of the others; `Frontier` leaves those out.

    Args:
        planner: without a memory limit.
        gaps: of each frontier that are looked into.
    """
    wanted = planner.settings.recompute
    layers = () if wanted == "none" else recomputable(planner.graph)
    plans = FrontierSearch(planner, gaps).run() if wanted != "full" or not layers else []
    if layers:
        graph = recompute_layers(planner.graph, [layer.name for layer in layers])
        other = Planner(
            graph, planner.mesh, planner.cluster, planner.constraints, planner.settings, planner.progress, like=planner
        )
        other.deadline = planner.deadline
        plans += FrontierSearch(other, gaps).run()
    return plans


class FrontierSearch:
    """Looks for plans no two of which are better than each other in the time of a step and in the peak of a device.

    Neither is a sum over operators: the time is that of a timeline on which communication hides behind compute, the
    peak is a maximum over moments. Candidates come from sums that stand for them, and the account decides.

    * The plan without a limit, its collectives hidden, is the fast end.
    * Where memory alone has a price, at the moments at which the plans so far held most, the plans are the lean end
      (fictitious play, as where a limit has to be met).
    * Between them lie the plans of the frontier of cost and memory summed at those moments (`solver.cost_frontier`);
      where there are too many strategies for it, lower prices. The largest parameters are forced to be sharded or not
      (Rhino 4.4).
    * Equal layers all flip at one price. So plans are mixed, each layer as in one or another of them: the mixtures that
      are looked at are the cost frontier (`solver.cost_frontier`) of the problem in which every operator has the
      strategies of these plans alone.
    * The widest gaps that are left are looked into: at the rate at which their two ends trade time for memory, with
      more parameters forced than at one end and fewer than at the other, with rows of memory in the problem
      (Rhino 4.2), and by mixing the plans around them.

    Rows of memory make some problems far harder than prices do: they are searched with so much work and no more. Only
    the time limit, which ends the search early, makes it depend on the machine.

    Args:
        planner: without a memory limit.
        gaps: of the frontier that are looked into.
    """

    def __init__(self, planner: Planner, gaps: int = 4) -> None:
        assert planner.settings.memory_limit is None, "a frontier has every limit"
        self.planner = planner
        self.gaps = gaps
        self.candidates: list[FrontierCandidate] = []
        self.method = "alternate" if planner.settings.method == "alternate" else "auto"
        self.sizes = forceable_parameters(planner.graph, planner.constraints)
        self.recombined_pools: set[frozenset[int]] = set()
        self.unmodelled_bytes = 0.0

    def run(self) -> list[ShardingPlan]:
        """The plans, from the smallest peak to the shortest step."""
        fastest = self.planner.plan()
        decisions = Decisions.from_data(fastest.decisions)
        found = self.planner.evaluate(decisions, fastest.cost, fastest.lower_bound, fastest.method)
        self.fastest = self._add_candidate(found, self.planner.constraints)
        forced = self._solve(self._force_largest(len(self.sizes)))
        if forced is not None:
            weights = self._find_leanest(forced)
            self._add_intermediate_plans(forced, weights)
        self._recombine_families()
        self._refine()
        return [self._plan(candidate, fastest) for candidate in self.frontier()]

    def frontier(self) -> list[FrontierCandidate]:
        """The candidates that no other one beats, from the smallest peak to the shortest step."""
        return _pareto_front(self.candidates)

    def _plan(self, candidate: FrontierCandidate, fastest: ShardingPlan) -> ShardingPlan:
        if candidate is self.fastest:
            return fastest
        # What bounds the problem bounds it with less memory too.
        return self.planner.describe(replace(candidate.plan, lower_bound=fastest.lower_bound))

    # Candidates

    def _find_leanest(self, forced: FrontierCandidate) -> np.ndarray:
        """Meets plans made for a small peak; the weights of the moments that led to the smallest."""
        average = forced.plan.held_bytes
        weights = chosen = peak_weights(average)
        best = forced
        for played in range(1, _ROUNDS + 1):
            found = self._solve_priced(forced.constraints, weights, self._unit_price(forced) * _MEMORY_ONLY_PRICE)
            if found is None:
                break
            if found.peak < best.peak:
                best, chosen = found, weights
            average = (average * played + found.plan.held_bytes) / (played + 1)
            weights = peak_weights(average)
        return chosen

    def _add_intermediate_plans(self, forced: FrontierCandidate, weights: np.ndarray) -> None:
        """Meets plans at lower prices, and plans with fewer parameters forced."""
        peak = peak_weights(self.fastest.plan.held_bytes)
        if not self._add_sum_plans(forced.constraints, weights) or not self._add_sum_plans(
            self.planner.constraints, peak
        ):
            for strength in _LOWER_PRICES:
                self._solve_priced(forced.constraints, weights, self._unit_price(forced) * strength)
            for strength in _LOWER_PRICES[:-1]:
                self._solve_priced(self.planner.constraints, peak, self._unit_price(self.fastest) * strength)
        count = 1
        while count < len(self.sizes):
            self._solve(self._force_largest(count))
            count *= 4

    def _add_sum_plans(self, wishes: Constraints, weights: np.ndarray) -> bool:
        """Meets plans from the frontier of cost and weighted memory; whether the problem is one that has it found."""
        if self._is_past_deadline():
            return True
        found = recombine_plans(self.planner, wishes, None, weights, _MAX_SUM_PLANS)
        for decisions, cost in found:
            self._add_candidate(self.planner.evaluate(decisions, cost, 0.0, "sums of memory"), wishes)
        return bool(found)

    def _unit_price(self, candidate: FrontierCandidate) -> float:
        """The price of a byte at which all the memory of a plan costs what its step does."""
        return candidate.plan.cost / candidate.peak

    def _refine(self) -> None:
        """Looks into the widest gaps of the frontier, one after the other."""
        seen: set[tuple[int, int]] = set()
        for _ in range(self.gaps):
            gaps = [gap for gap in self._gaps() if (id(gap[0]), id(gap[1])) not in seen]
            if not gaps or self._is_past_deadline():
                return
            lean, fast = max(gaps, key=self._width)
            seen.add((id(lean), id(fast)))
            self._search_gap(lean, fast)

    def _recombine_families(self) -> None:
        """Mixes plans of one problem that lie all over the frontier."""
        for forced in dict.fromkeys(one.constraints.forced for one in self.candidates):
            family = _pareto_front([one for one in self.candidates if one.constraints.forced == forced])
            places = np.unique(np.linspace(0, len(family) - 1, _POOL_SIZE).round().astype(int))
            pool = [family[place] for place in places]
            self._recombine(pool, self._weights_of(pool[0], pool[-1]))

    def _weights_of(self, lean: FrontierCandidate, fast: FrontierCandidate) -> np.ndarray:
        """Weights of the moments at which either plan holds most."""
        return (peak_weights(lean.plan.held_bytes) + peak_weights(fast.plan.held_bytes)) / 2

    def _gaps(self) -> Iterator[tuple[FrontierCandidate, FrontierCandidate]]:
        frontier = self.frontier()
        yield from itertools.pairwise(frontier)

    def _width(self, gap: tuple[FrontierCandidate, FrontierCandidate]) -> float:
        """Area between the curve as it is known and as it may be, in shares of its ends'."""
        lean, fast = gap
        return (fast.peak / lean.peak - 1.0) * (lean.step_seconds / fast.step_seconds - 1.0)

    def _search_gap(self, lean: FrontierCandidate, fast: FrontierCandidate) -> None:
        """Meets plans that may lie between two others."""
        middle = math.sqrt(lean.peak * fast.peak)
        self._solve_with_memory_rows(middle)
        weights = self._weights_of(lean, fast)
        rate = max(lean.plan.cost - fast.plan.cost, lean.step_seconds - fast.step_seconds) / (fast.peak - lean.peak)
        for forced in dict.fromkeys((lean.constraints.forced, fast.constraints.forced)):
            self._solve_priced(replace(self.planner.constraints, forced=forced), weights, rate)
        self._bisect_forced(lean, fast)
        near = sorted(self.frontier(), key=lambda one: abs(math.log(one.peak / middle)))
        for forced in dict.fromkeys((lean.constraints.forced, fast.constraints.forced)):
            self._recombine([one for one in near if one.constraints.forced == forced][:_POOL_SIZE], weights)

    def _bisect_forced(self, lean: FrontierCandidate, fast: FrontierCandidate) -> None:
        """Meets plans with more parameters forced than for the fast end of a gap, and fewer than for the lean one."""
        middle = math.sqrt(lean.peak * fast.peak)
        low, high = len(fast.constraints.forced), len(lean.constraints.forced)
        for _ in range(_MAX_HALVINGS):
            if high - low < 2:
                return
            count = (low + high) // 2
            found = self._solve(self._force_largest(count))
            low, high = (low, count) if found is not None and found.peak <= middle else (count, high)

    def _recombine(self, pool: Sequence[FrontierCandidate], weights: np.ndarray) -> None:
        """Meets plans that do in every operator as one or another of some plans of one problem."""
        if len(pool) < 2 or frozenset(map(id, pool)) in self.recombined_pools:
            return
        self.recombined_pools.add(frozenset(map(id, pool)))
        wishes = pool[0].constraints
        for decisions, cost in recombine_plans(
            self.planner, wishes, [one.plan.decisions for one in pool], weights, _MAX_RECOMBINED
        ):
            if self._is_past_deadline():
                return
            self._add_candidate(self.planner.evaluate(decisions, cost, 0.0, "plans mixed"), wishes)

    def _solve_with_memory_rows(self, peak: float) -> None:
        """Meets the plan of the problem with rows of memory (Rhino 4.2), for a peak of about so many bytes.

        The rows see less than the account does; by how much was seen the last time.
        """
        if self._is_past_deadline():
            return
        with contextlib.suppress(PlanError, BudgetError):
            limit = peak - self.unmodelled_bytes
            found = self.planner.solve(self.planner.constraints, method=self.method, limit=limit, work=_ROWS_WORK)
            self.unmodelled_bytes = max(0.0, found.memory.peak - limit)
            self._add_candidate(replace(found, method=f"{found.method}, memory bounded"), self.planner.constraints)

    # Problems

    def _force_largest(self, count: int) -> Constraints:
        """The wishes with so many of the largest parameters forced to be sharded."""
        return replace(self.planner.constraints, forced=frozenset(names_by_size(self.sizes)[:count]))

    def _solve_priced(self, wishes: Constraints, weights: np.ndarray, price: float) -> FrontierCandidate | None:
        """The plan where a byte held at all moments costs so many seconds, moments being weighted."""
        return self._solve(wishes, weights * price)

    def _solve(self, wishes: Constraints, prices: np.ndarray | None = None) -> FrontierCandidate | None:
        """The cheapest plan under some wishes and prices; None where time is up."""
        if self._is_past_deadline():
            return None
        try:
            found = self.planner.solve(wishes, method=self.method, prices=prices)
        except PlanError:  # the method found nothing in the time that was left
            return None
        told = [f"{len(wishes.forced)} parameters forced to be sharded"] if wishes.forced else []
        told += ["memory priced"] if prices is not None else []
        return self._add_candidate(replace(found, method=", ".join([found.method, *told])), wishes)

    def _add_candidate(self, found: CandidatePlan, wishes: Constraints) -> FrontierCandidate:
        """Notes a plan."""
        candidate = FrontierCandidate(found, wishes, found.step_seconds)
        self.candidates.append(candidate)
        return candidate

    def _is_past_deadline(self) -> bool:
        return time.monotonic() > self.planner.deadline


def _pareto_front(candidates: Sequence[FrontierCandidate]) -> list[FrontierCandidate]:
    """Those that no other one beats, from the smallest peak to the shortest step."""
    kept: list[FrontierCandidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.peak, one.step_seconds)):
        if not kept or candidate.step_seconds < kept[-1].step_seconds:
            kept.append(candidate)
    return kept
