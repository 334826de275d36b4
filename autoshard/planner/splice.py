"""Splices of two plans: the first operators are as in one plan, and the others as in the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from autoshard.patterns.decisions import Decisions
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.rerun_context import RerunContext

Entry = TypeVar("Entry")


class Splice:
    """Plans in which the first operators of the forward half are as in one plan, and the others as in another.

    Args:
        context: the problem with optional recomputation.
        lean: the plan of the first operators, whose tensors are kept longest.
        fast: the plan of the others.

    Attributes:
        length: the number of operators of the forward half.
    """

    def __init__(self, context: RerunContext, lean: CandidatePlan, fast: CandidatePlan) -> None:
        self.context, self.lean, self.fast = context, lean, fast
        self.length = 1 + max(context.forward_places.values(), default=-1)
        self._lives = [_Lives(context, plan) for plan in (lean, fast)]

    def fewest_within(self, limit: float, low: int, high: int) -> int:
        """Return the smallest number of operators from the lean plan, between `low` and `high`, that seems to fit."""
        # More of them hold less, but for memory of both plans at the seam.
        low, high = low + 1, high - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.foreseen_peak(middle) <= limit else (middle + 1, high)
        return low

    def foreseen_peak(self, count: int) -> float:
        """Return the peak of a splice, predicted from the memory of its two plans, without changes at the seam."""
        lean, fast = self._lives
        return float(np.cumsum(lean.changes(lean.places < count) + fast.changes(fast.places >= count)).max())

    def plan(self, count: int) -> CandidatePlan:
        """Return the plan with the first `count` operators as in the lean plan.

        Raises:
            RouteError: the two plans send rows differently, and the seam is within their route.
        """
        places = self.context.forward_places

        def is_lean(name: str) -> bool:
            return places.get(name, 0) < count

        def select(of: Callable[[Decisions], Mapping[str, Entry]]) -> dict[str, Entry]:
            lean, fast = of(self.lean.decisions), of(self.fast.decisions)
            # The key of a hub starts with the name of the operator.
            chosen = {key: entry for key, entry in lean.items() if is_lean(_operator_name(key))}
            return chosen | {key: entry for key, entry in fast.items() if not is_lean(_operator_name(key))}

        decisions = Decisions(
            select(lambda each: each.choices),
            select(lambda each: each.rest),
            self.lean.decisions.outputs,
            select(lambda each: each.hubs),
            frozenset(select(lambda each: dict.fromkeys(each.hosted))),
        )
        reruns = [
            name
            for plan, wanted in ((self.lean, True), (self.fast, False))
            for name in self.context.names_of(plan)
            if is_lean(name) == wanted
        ]
        planner = self.context.planner_with(reruns)
        account = self.context.account_of(self.context.settle(decisions, planner), planner)
        cost = account.total_seconds + sum(update.seconds for update in planner.host_updates(account.flow))
        return self.context.evaluate_reruns(reruns, decisions, cost, 0.0, "two plans spliced")


class _Lives:
    """The memory that a plan allocates.

    Attributes:
        places: per allocation, the place of its operator in the forward half; see `RerunContext.forward_places`.
    """

    def __init__(self, context: RerunContext, plan: CandidatePlan) -> None:
        # The order of second operators may change if others are absent: use nearly the same moments, but sorted.
        footprint, moments = plan.estimate.footprint, np.maximum.accumulate(context.places_of(plan))
        self._bytes = footprint.lives[:, 0].astype(np.float64)
        self._starts, self._ends = np.searchsorted(moments, footprint.lives[:, 1:]).T
        self._moments = len(moments)
        self.places = np.array([context.forward_places.get(name, 0) for name in footprint.makers])

    def changes(self, chosen: np.ndarray) -> np.ndarray:
        """Return the changes in the bytes that some allocations hold, at every moment of the whole problem."""
        begun, ended = (
            np.bincount(moments[chosen], self._bytes[chosen], self._moments + 1)
            for moments in (self._starts, self._ends)
        )
        return (begun - ended)[:-1]


def _operator_name(key: str) -> str:
    return key.partition("@")[0].partition(":")[0]
