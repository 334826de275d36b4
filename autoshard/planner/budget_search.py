"""Plans within a memory limit: what must be sharded, and what must not be held while most is held."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from torch.distributed.tensor import Placement

from autoshard.capture.joint import JointGraph
from autoshard.errors import BudgetError
from autoshard.memory.budget import (
    MEMORY_ONLY_STRENGTH,
    drop_negligible,
    first_that_fits,
    largest_names,
    memory_prices,
    peak_weights,
)
from autoshard.patterns.graph_rules import Value
from autoshard.planner.budget_error import ShortfallError
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints

_ROUNDS = 6  # plans made where memory alone has a price, at most
_MIN_GAIN = 0.01  # part of the peak by which such a plan must be leaner than those before for another to be made
_STEP_TOLERANCE = 0.002  # part of a step's time by which two plans may differ and none between them is looked for
_MIN_STRENGTH = 1e-3  # the same where memory hardly counts
_FORCED_LEVELS = 10  # rungs on which ever more parameters are forced to be sharded
_PRICED_LEVELS = 20  # rungs on which memory has ever higher prices
_MAX_CORRECTIONS = 7  # times that the memory rows of the integer program are tightened by what the account finds


class BudgetSearch:
    """Looks for the fastest plan whose peak is within a limit.

    A ladder leads from the plan without a limit to the leanest one that is found. On its lower rungs the largest
    parameters are forced to be sharded, more from rung to rung (Rhino 4.4); on the upper ones all are, and memory gets
    a price at the moments at which most is held. What stands on a rung does not depend on the limit; `first_that_fits`
    looks for one where less memory takes more time, and takes the fastest that it met and that fits. With
    `method="ilp"`, rows of memory in the problem itself (Rhino 4.2) are tried too; with `method="force"`, the lower
    rungs alone.

    Args:
        planner: solves problems.
        limit: bytes per device that the peak may reach.
        cheapest: the plan that the problem without a limit has.
        fastest: the plan that is made without a limit; it holds too much.
    """

    def __init__(self, planner: PlanningContext, limit: int, cheapest: CandidatePlan, fastest: CandidatePlan) -> None:
        self.planner = planner
        self.limit = limit
        self.cheapest = cheapest
        self.fastest = fastest
        self.sizes = drop_negligible(forceable_parameters(planner.graph, planner.constraints))
        # The others are for problems without a limit: too wide, or too slow, where everything is forced.
        self.method = "alternate" if planner.settings.method == "alternate" else "auto"
        self.all_forced = replace(planner.constraints, forced=frozenset(self.sizes))

    def run(self) -> CandidatePlan:
        """The plan.

        Raises:
            ShortfallError: no plan found fits. The smallest peak, which it names, is the same at every limit, so that a
                limit of that size can be met.
        """
        if self.planner.settings.method == "force":
            return self._search_by_forcing()
        leanest, weights = self._find_leanest()
        if leanest.memory.peak > self.limit:
            raise self._shortfall(leanest, weights)

        def make(rung: int) -> CandidatePlan:
            return leanest if self._is_past_deadline() else self._plan_at_level(rung, weights)

        rungs = 1 + _FORCED_LEVELS + _PRICED_LEVELS
        all_forced = 1 + _FORCED_LEVELS  # solved well, while plans at low prices next to it may be slower and hold more
        found = first_that_fits(
            self.fastest, leanest, rungs, make, self._measure, self.limit, _STEP_TOLERANCE, all_forced
        )
        rows = self._solve_with_memory_rows() if self.planner.settings.method == "ilp" else None
        return found if rows is None or rows.cost > found.cost else rows

    def _search_by_forcing(self) -> CandidatePlan:
        """The rungs alone on which parameters are forced to be sharded (Rhino 4.4): few problems, and no prices."""
        leanest = min(self.cheapest, self._plan_at_level(1 + _FORCED_LEVELS), key=lambda plan: plan.memory.peak)
        if leanest.memory.peak > self.limit:
            raise self._shortfall(leanest, peak_weights(leanest.held_bytes))

        def make(rung: int) -> CandidatePlan:
            return leanest if self._is_past_deadline() else self._plan_at_level(rung)

        return first_that_fits(self.fastest, leanest, _FORCED_LEVELS, make, self._measure, self.limit, _STEP_TOLERANCE)

    def _shortfall(self, leanest: CandidatePlan, weights: np.ndarray) -> ShortfallError:
        prices = memory_prices(weights, MEMORY_ONLY_STRENGTH, self.cheapest.cost, self.cheapest.memory.peak)
        return ShortfallError(
            self.planner, self.limit, leanest.memory, self.all_forced, prices, self._is_past_deadline()
        )

    def _measure(self, plan: CandidatePlan) -> tuple[float, int]:
        """Predicted seconds of a step, and the bytes of its peak."""
        return plan.step_seconds, plan.memory.peak

    def _plan_at_level(self, rung: int, weights: np.ndarray | None = None) -> CandidatePlan:
        """What stands on a rung of the ladder, the first of which is 1; upper ones need `weights` of the moments."""
        if rung == 1:
            return self.cheapest
        if rung <= 1 + _FORCED_LEVELS:
            forced = largest_names(self.sizes, (rung - 1) / _FORCED_LEVELS)
            found = self._solve_cached(forced, replace(self.planner.constraints, forced=forced))
            return replace(found, method=f"{found.method}, the {len(forced)} largest parameters forced to be sharded")
        assert weights is not None, "memory has a price at some moments"
        share = (rung - 1 - _FORCED_LEVELS) / (_PRICED_LEVELS + 1)
        return self._solve_priced(weights, _MIN_STRENGTH * (MEMORY_ONLY_STRENGTH / _MIN_STRENGTH) ** share)

    def _is_past_deadline(self) -> bool:
        return time.monotonic() > self.planner.deadline

    def _find_leanest(self) -> tuple[CandidatePlan, np.ndarray]:
        """The plan with the smallest peak that was found, and the weights of the moments that led to it.

        Each of those made is the cheapest where memory alone has a price, at the moments at which the plans before held
        most on average: fictitious play between a planner and somebody who picks the moment.
        """
        best = self.cheapest
        held = best.held_bytes
        weights = chosen = peak_weights(held)
        for played in range(1, _ROUNDS + 1):
            found = self._solve_priced(weights, MEMORY_ONLY_STRENGTH)
            gained = found.memory.peak < (1.0 - _MIN_GAIN) * best.memory.peak
            if found.memory.peak < best.memory.peak:
                best, chosen = found, weights
            if not gained or self._is_past_deadline():
                break
            held = (held * played + found.held_bytes) / (played + 1)
            weights = peak_weights(held)
        return best, chosen

    def _solve_priced(self, weights: np.ndarray, strength: float) -> CandidatePlan:
        """The cheapest plan with all parameters forced where memory has a price at some moments."""
        prices = memory_prices(weights, strength, self.cheapest.cost, self.cheapest.memory.peak)
        found = self._solve_cached(prices.tobytes(), self.all_forced, prices)
        return replace(found, method=f"{found.method}, all parameters forced to be sharded, memory priced")

    def _solve_cached(self, key: Hashable, wishes: Constraints, prices: np.ndarray | None = None) -> CandidatePlan:
        """What solves a problem of the ladder, which no limit has a part in."""
        rungs = self.planner.plan_cache
        if key not in rungs:
            rungs[key] = self.planner.solve(wishes, method=self.method, prices=prices)
        return rungs[key]

    def _solve_with_memory_rows(self) -> CandidatePlan | None:
        """Rows of memory in the problem (Rhino 4.2): the fastest plan found within the limit; None if there is none.

        The rows see less than the account does (copies that a reshard makes): their limit is lowered by what the
        account finds too much.
        """
        rows = float(self.limit)
        for _ in range(_MAX_CORRECTIONS):
            try:
                found = self.planner.solve(self.planner.constraints, method="ilp", limit=rows)
            except BudgetError:
                return None
            if found.memory.peak <= self.limit:
                return replace(found, method=f"{found.method}, memory bounded")
            rows -= max(found.memory.peak - self.limit, 0.01 * self.limit)
            if rows <= 0 or self._is_past_deadline():
                return None
        return None


def forceable_parameters(graph: JointGraph, wishes: Constraints) -> dict[str, int]:
    """Bytes of the parameters that are not pinned on every mesh axis."""
    return {
        source.name: Value(source.node).meta.bytes
        for source in graph.inputs
        if source.kind == "parameter" and not _is_fully_pinned(wishes.pinned.get(source.name))
    }


def _is_fully_pinned(pinned: Sequence[Placement | None] | None) -> bool:
    return pinned is not None and all(placement is not None for placement in pinned)
