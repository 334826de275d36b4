"""Plans within a memory limit: what must be sharded, and what must not be held while most is held."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch.distributed.tensor import Placement

from autoshard.capture.joint import JointGraph
from autoshard.errors import BudgetError
from autoshard.memory.force import largest, that_count
from autoshard.memory.ladder import first_that_fits
from autoshard.memory.prices import DEAR, memory_prices, peak_weights
from autoshard.patterns.graph import Value
from autoshard.planner.found import Found
from autoshard.planner.problem import Wishes
from autoshard.planner.ways_out import ShortfallError

if TYPE_CHECKING:
    from autoshard.planner.planner import Planner

_ROUNDS = 6  # plans made where memory alone has a price, at most
_GAINED = 0.01  # part of the peak by which such a plan must be leaner than those before for another to be made
_ALIKE = 0.002  # part of a step's time by which two plans may differ and none between them is looked for
_CHEAP = 1e-3  # the same where memory hardly counts
_FORCED = 10  # rungs on which ever more parameters are forced to be sharded
_PRICED = 20  # rungs on which memory has ever higher prices
_CORRECTIONS = 7  # times that the memory rows of the integer program are tightened by what the account finds


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

    def __init__(self, planner: Planner, limit: int, cheapest: Found, fastest: Found) -> None:
        self.planner = planner
        self.limit = limit
        self.cheapest = cheapest
        self.fastest = fastest
        self.sizes = that_count(forceable(planner.graph, planner.wishes))
        # The others are for problems without a limit: too wide, or too slow, where everything is forced.
        self.method = "alternate" if planner.settings.method == "alternate" else "auto"
        self.everything = replace(planner.wishes, forced=frozenset(self.sizes))

    def run(self) -> Found:
        """The plan.

        Raises:
            ShortfallError: no plan found fits. The smallest peak, which it names, is the same at every limit, so that a
                limit of that size can be met.
        """
        if self.planner.settings.method == "force":
            return self._by_force()
        leanest, weights = self._leanest()
        if leanest.memory.peak > self.limit:
            raise self._shortfall(leanest, weights)

        def make(rung: int) -> Found:
            return leanest if self._late() else self._rung(rung, weights)

        rungs = 1 + _FORCED + _PRICED
        all_forced = 1 + _FORCED  # solved well, while plans at low prices next to it may be slower and hold more
        found = first_that_fits(self.fastest, leanest, rungs, make, self._measure, self.limit, _ALIKE, all_forced)
        rows = self._by_rows() if self.planner.settings.method == "ilp" else None
        return found if rows is None or rows.cost > found.cost else rows

    def _by_force(self) -> Found:
        """The rungs alone on which parameters are forced to be sharded (Rhino 4.4): few problems, and no prices."""
        leanest = min(self.cheapest, self._rung(1 + _FORCED), key=lambda plan: plan.memory.peak)
        if leanest.memory.peak > self.limit:
            raise self._shortfall(leanest, peak_weights(leanest.held))

        def make(rung: int) -> Found:
            return leanest if self._late() else self._rung(rung)

        return first_that_fits(self.fastest, leanest, _FORCED, make, self._measure, self.limit, _ALIKE)

    def _shortfall(self, leanest: Found, weights: np.ndarray) -> ShortfallError:
        prices = memory_prices(weights, DEAR, self.cheapest.cost, self.cheapest.memory.peak)
        return ShortfallError(self.planner, self.limit, leanest.memory, self.everything, prices, self._late())

    def _measure(self, plan: Found) -> tuple[float, int]:
        """Predicted seconds of a step, and the bytes of its peak."""
        return plan.step_seconds, plan.memory.peak

    def _rung(self, rung: int, weights: np.ndarray | None = None) -> Found:
        """What stands on a rung of the ladder, the first of which is 1; upper ones need `weights` of the moments."""
        if rung == 1:
            return self.cheapest
        if rung <= 1 + _FORCED:
            forced = largest(self.sizes, (rung - 1) / _FORCED)
            found = self._once(forced, replace(self.planner.wishes, forced=forced))
            return replace(found, method=f"{found.method}, the {len(forced)} largest parameters forced to be sharded")
        assert weights is not None, "memory has a price at some moments"
        share = (rung - 1 - _FORCED) / (_PRICED + 1)
        return self._priced(weights, _CHEAP * (DEAR / _CHEAP) ** share)

    def _late(self) -> bool:
        return time.monotonic() > self.planner.deadline

    def _leanest(self) -> tuple[Found, np.ndarray]:
        """The plan with the smallest peak that was found, and the weights of the moments that led to it.

        Each of those made is the cheapest where memory alone has a price, at the moments at which the plans before held
        most on average: fictitious play between a planner and somebody who picks the moment.
        """
        best = self.cheapest
        held = best.held
        weights = chosen = peak_weights(held)
        for played in range(1, _ROUNDS + 1):
            found = self._priced(weights, DEAR)
            gained = found.memory.peak < (1.0 - _GAINED) * best.memory.peak
            if found.memory.peak < best.memory.peak:
                best, chosen = found, weights
            if not gained or self._late():
                break
            held = (held * played + found.held) / (played + 1)
            weights = peak_weights(held)
        return best, chosen

    def _priced(self, weights: np.ndarray, strength: float) -> Found:
        """The cheapest plan with all parameters forced where memory has a price at some moments."""
        prices = memory_prices(weights, strength, self.cheapest.cost, self.cheapest.memory.peak)
        found = self._once(prices.tobytes(), self.everything, prices)
        return replace(found, method=f"{found.method}, all parameters forced to be sharded, memory priced")

    def _once(self, key: Hashable, wishes: Wishes, prices: np.ndarray | None = None) -> Found:
        """What solves a problem of the ladder, which no limit has a part in."""
        rungs = self.planner.rungs
        if key not in rungs:
            rungs[key] = self.planner.solve(wishes, method=self.method, prices=prices)
        return rungs[key]

    def _by_rows(self) -> Found | None:
        """Rows of memory in the problem (Rhino 4.2): the fastest plan found within the limit; None if there is none.

        The rows see less than the account does (copies that a reshard makes): their limit is lowered by what the
        account finds too much.
        """
        rows = float(self.limit)
        for _ in range(_CORRECTIONS):
            try:
                found = self.planner.solve(self.planner.wishes, method="ilp", limit=rows)
            except BudgetError:
                return None
            if found.memory.peak <= self.limit:
                return replace(found, method=f"{found.method}, memory bounded")
            rows -= max(found.memory.peak - self.limit, 0.01 * self.limit)
            if rows <= 0 or self._late():
                return None
        return None


def forceable(graph: JointGraph, wishes: Wishes) -> dict[str, int]:
    """Bytes of the parameters that are not pinned on every mesh axis."""
    return {
        source.name: Value(source.node).meta.bytes
        for source in graph.inputs
        if source.kind == "parameter" and not _settled(wishes.pinned.get(source.name))
    }


def _settled(pinned: Sequence[Placement | None] | None) -> bool:
    return pinned is not None and all(placement is not None for placement in pinned)
