"""Plans within a memory limit: what must be sharded, and what must not be held while most is held."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch.distributed.tensor import Placement

from autoshard.capture.joint import JointGraph
from autoshard.errors import BudgetError
from autoshard.memory.budget import format_bytes
from autoshard.memory.footprint import Allocation
from autoshard.memory.force import smallest_feasible_k
from autoshard.patterns.graph import Value
from autoshard.planner.found import Found
from autoshard.planner.problem import Wishes

if TYPE_CHECKING:
    from autoshard.planner.planner import Planner

_ROUNDS = 8  # plans made where memory alone has a price
_SHARPNESS = 30.0  # how much more the moments of the peak weigh than others
_DEAR = 1e3  # all the memory of a plan, in costs of a step, where memory alone counts
_LOWER = 6  # prices tried below `_DEAR`, each a tenth of the one before
_CLOSER = 3  # prices tried between one at which the limit is kept and the next, at which it is not
_CORRECTIONS = 7  # times that the memory rows of the integer program are tightened by what the account finds


class BudgetSearch:
    """Looks for the fastest plan whose peak is within a limit.

    Forcing the largest parameters to be sharded comes first (Rhino 4.4). What then is still too much are activations:
    memory gets a price at the moments at which most is held. Rows of memory in the problem itself (Rhino 4.2) are a
    third way, which `method="ilp"` goes first.

    Args:
        planner: solves problems.
        limit: bytes per device that the peak may reach.
        unlimited: the plan without a limit, which does not fit.
    """

    def __init__(self, planner: Planner, limit: int, unlimited: Found) -> None:
        self.start = time.monotonic()
        self.planner = planner
        self.limit = limit
        self.unlimited = unlimited
        self.sizes = forceable(planner.graph, planner.wishes)
        # The others are for problems without a limit: too wide, or too slow, where everything is forced.
        self.method = "alternate" if planner.settings.method == "alternate" else "auto"
        self.everything = replace(planner.wishes, forced=frozenset(self.sizes))

    def run(self) -> Found:
        """The fastest plan found.

        Raises:
            BudgetError: no plan found fits. The smallest peak, which it names, is looked for in the same way at every
                limit and with every method, so that a limit of that size can be met.
        """
        plans = [self._by_rows("ilp")] if self.planner.settings.method == "ilp" else []
        if not any(plans):
            plans = [self._forced() or self._priced_memory()]
            if not self._late():
                plans.append(self._by_rows(self.method, time.monotonic() - self.start))
        return min((plan for plan in plans if plan is not None), key=lambda plan: plan.cost)

    def _forced(self) -> Found | None:
        """The plan in which the fewest, largest parameters must be sharded."""
        answer = smallest_feasible_k(self.sizes, self._fits)
        if answer is None:
            return None
        count, found = answer
        return replace(found, method=f"{found.method}, the {count} largest parameters forced to be sharded")

    def _priced_memory(self) -> Found:
        """The fastest plan found when memory has a price, all parameters forced to be sharded."""
        forced = self.planner.solve(self.everything, method=self.method)
        plans, weights = self._leanest(forced)
        strength = self._lower(forced, weights, plans)
        least = min(plans, key=lambda plan: plan.memory.peak)
        if not self._kept(least):
            raise self._error(least)
        self._closer(forced, weights, plans, strength)
        found = min((plan for plan in plans if self._kept(plan)), key=lambda plan: plan.cost)
        return replace(found, method=f"{found.method}, all parameters forced to be sharded, memory priced")

    def _kept(self, plan: Found) -> bool:
        return plan.memory.peak <= self.limit

    def _late(self) -> bool:
        return time.monotonic() > self.planner.deadline

    def _fits(self, forced: frozenset[str]) -> Found | None:
        """A plan with these parameters sharded, if it fits; none where time is up before all are tried."""
        if self._late() and len(forced) < len(self.sizes):
            return None
        found = self.unlimited
        if forced:
            found = self.planner.solve(replace(self.planner.wishes, forced=forced), method=self.method)
        return found if self._kept(found) else None

    def _leanest(self, forced: Found) -> tuple[list[Found], np.ndarray]:
        """Plans made for a small peak, and the weights of the moments that led to the smallest.

        Each is the cheapest where memory alone has a price, at the moments at which the plans so far held most on
        average: fictitious play between a planner and somebody who picks the moment.
        """
        plans, best = [forced], forced
        held = self._held(forced)
        weights = chosen = _weights(held)
        for played in range(1, _ROUNDS + 1):
            found = self._priced(forced, weights, _DEAR)
            plans.append(found)
            if found.memory.peak < best.memory.peak:
                best, chosen = found, weights
            if self._late():
                break
            held = (held * played + self._held(found)) / (played + 1)
            weights = _weights(held)
        return plans, chosen

    def _lower(self, forced: Found, weights: np.ndarray, plans: list[Found]) -> float:
        """Adds plans at lower and lower prices until the limit, once kept, is passed; the price of the last."""
        strength = _DEAR
        for _ in range(_LOWER):
            if self._late():
                break
            strength /= 10
            plans.append(self._priced(forced, weights, strength))
            if not self._kept(plans[-1]) and any(map(self._kept, plans)):
                break
        return strength

    def _closer(self, forced: Found, weights: np.ndarray, plans: list[Found], strength: float) -> None:
        """Adds plans at prices above one that is too low, ever closer to the lowest at which the limit is kept."""
        low, high = strength, 10 * strength
        for _ in range(_CLOSER):
            if self._late():
                break
            middle = math.sqrt(low * high)
            plans.append(self._priced(forced, weights, middle))
            low, high = (low, middle) if self._kept(plans[-1]) else (middle, high)

    def _priced(self, forced: Found, weights: np.ndarray, strength: float) -> Found:
        prices = weights * strength * forced.cost / forced.memory.peak
        return self.planner.solve(self.everything, method=self.method, prices=prices)

    def _held(self, found: Found) -> np.ndarray:
        """Bytes held at every moment of the step."""
        return held(self.planner.allocations(found.decisions), len(self.planner.rules.operators) + 1)

    def _by_rows(self, method: str, seconds: float = math.inf) -> Found | None:
        """Rows of memory in the problem (Rhino 4.2): the fastest plan found within the limit; None if there is none.

        The rows see less than the account does (copies that a reshard makes): their limit is lowered by what the
        account finds too much.

        Args:
            method: one of the planner's.
            seconds: that it may take, besides the planner's time limit.
        """
        rows, end = float(self.limit), time.monotonic() + seconds
        for _ in range(_CORRECTIONS):
            left = end - time.monotonic()
            try:
                found = self.planner.solve(self.planner.wishes, method=method, limit=rows, seconds=left)
            except BudgetError:
                return None
            if self._kept(found):
                return replace(found, method=f"{found.method}, memory bounded")
            rows -= max(found.memory.peak - self.limit, 0.01 * self.limit)
            if rows <= 0 or self._late() or time.monotonic() > end:
                return None
        return None

    def _error(self, least: Found) -> BudgetError:
        memory, settings = least.memory, self.planner.settings
        shortened = (
            f" The search ended at time_limit={settings.time_limit:g} s: a longer one may find a smaller peak."
            if self._late()
            else ""
        )
        return BudgetError(
            f"no plan fits in {format_bytes(self.limit)} per device on mesh {self.planner.mesh}: the smallest peak "
            f"found is {format_bytes(memory.peak)} (parameters {format_bytes(memory.parameters)}, gradients "
            f"{format_bytes(memory.gradients)}, optimizer {format_bytes(memory.optimizer)}, activations "
            f"{format_bytes(memory.activations)}). Raise memory_limit to {memory.peak} bytes, add devices, or make the "
            f"batch smaller.{shortened}"
        )


def forceable(graph: JointGraph, wishes: Wishes) -> dict[str, int]:
    """Bytes of the parameters that are not pinned on every mesh axis."""
    return {
        source.name: Value(source.node).meta.bytes
        for source in graph.inputs
        if source.kind == "parameter" and not _settled(wishes.pinned.get(source.name))
    }


def _settled(pinned: Sequence[Placement | None] | None) -> bool:
    return pinned is not None and all(placement is not None for placement in pinned)


def held(allocations: Sequence[Allocation], moments: int) -> np.ndarray:
    """Bytes held at each of the moments `0` to `moments - 1`."""
    change = np.zeros(moments + 1)
    for one in allocations:
        change[min(one.start, moments)] += one.bytes
        change[min(one.end, moments)] -= one.bytes
    return np.cumsum(change)[:moments]


def _weights(held: np.ndarray) -> np.ndarray:
    """Weights of the moments, which sum to one: most where most is held."""
    weights = np.exp(_SHARPNESS * (held / held.max() - 1.0))
    return np.asarray(weights / weights.sum())
