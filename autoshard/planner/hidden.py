"""Plans that send more behind compute and less in its way: what is hidden counts less than what is waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autoshard.cluster.cost import GROUPED_BYTES
from autoshard.errors import PlanError
from autoshard.planner.account import Account
from autoshard.planner.found import Found
from autoshard.planner.problem import Hiding

if TYPE_CHECKING:
    from autoshard.planner.planner import Planner

_SOLVES = 4  # problems solved at other prices than one
_WORTH = 1e-3  # of a step's time: what is exposed of it at least for plans that hide more to be looked for
_TIE = 1e-9  # of a step's time: plans that differ by less are equally fast, and the one that costs least is taken


@dataclass(frozen=True, slots=True)
class _Point:
    """A plan in the plane of what reductions of gradients hide behind compute, and everything else.

    Attributes:
        found: the plan.
        price: of a hidden second, at which it is the cheapest.
        shown: seconds of compute, and of the collectives that nothing hides.
        hidden: seconds of reductions of gradients that have compute to hide behind.
    """

    found: Found
    price: float
    shown: float
    hidden: float

    @property
    def step(self) -> float:
        """Predicted seconds of the step."""
        return self.found.step_seconds

    def value(self, price: float) -> float:
        return self.shown + price * self.hidden


class HiddenReductions:
    """Looks for the plan with the shortest timeline among those that are cheapest at some price of hidden reductions.

    A problem adds up the seconds of a plan's parts; a device reduces gradients while it computes. How much of that can
    be hidden depends on the whole plan, and is no sum. But a plan that hides its reductions well is cheapest where a
    hidden second counts less than others, at some price between the cluster's `contention`, where all of it is hidden,
    and 1. Those plans are the corners of a convex curve that trades what is shown for what is hidden. They are found
    as in parametric optimisation: between two corners lies a third if, at the price at which both cost the same,
    another plan costs less. It is looked for if that may be by a thousandth of the step. The timeline then chooses.

    Args:
        planner: solves problems.
        first: the cheapest plan where hidden seconds count in full.
    """

    def __init__(self, planner: Planner, first: Found) -> None:
        self.planner = planner
        self._contention = planner.cluster.contention
        account = planner.account(first.decisions)
        self.behind = _behind(account)
        self.first = self._point(first, 1.0, account)
        self.points = [self.first]

    def run(self) -> Found:
        """The fastest plan found; of equally fast ones, the one that costs least."""
        if self.first.found.exposed > _WORTH * self.first.step:
            self._explore()
        fastest = min(point.step for point in self._promising)
        found = min(
            (point.found for point in self._promising if point.step <= (1 + _TIE) * fastest), key=lambda one: one.cost
        )
        if found is self.first.found:
            return found
        # No plan costs less than the bound of the problem in which everything counts.
        return replace(found, lower_bound=self.first.found.lower_bound, method=f"{found.method}, reductions hidden")

    @property
    def _promising(self) -> list[_Point]:
        """The points but those that take longer than the first with all their reductions hidden: to know a step takes a
        program."""
        contention, most = self._contention, self.first.step
        return [point for point in self.points if point is self.first or point.value(contention) < most]

    def _explore(self) -> None:
        """Adds the corners between the first plan and the one that is cheapest where all is hidden, a few at most."""
        contention = self._contention
        last = self._solved(contention)
        if last is None or last.found.decisions == self.first.found.decisions:
            return
        stretches = [(self.first, last)]
        while stretches:
            left, right = stretches.pop(0)
            if min(point.step for point in self._promising) <= (1 + _WORTH) * last.value(contention):
                return  # as fast as a plan would be that hides all its reductions
            if right.hidden <= left.hidden or left.shown <= right.shown:
                continue
            price = (left.shown - right.shown) / (right.hidden - left.hidden)
            if not right.price < price < left.price:
                continue  # one of them is not quite the cheapest
            if left.value(price) - _least(left, right, price) <= _WORTH * self.first.step:
                continue
            between = self._solved(price)
            if between is None:
                return
            if between.value(price) < (1 - 1e-9) * left.value(price):
                stretches += [(left, between), (between, right)]

    def _solved(self, price: float) -> _Point | None:
        """The cheapest plan at a price, which joins the others; None where enough were solved, or time is up."""
        if len(self.points) > _SOLVES or time.monotonic() > self.planner.deadline:
            return None
        try:
            found = self.planner.solve(self.planner.wishes, hiding=Hiding(self.behind, price))
        except PlanError:  # the method found nothing in the time that was left
            return None
        known = next((point for point in self.points if point.found.decisions == found.decisions), None)
        if known is not None:
            self.points.append(replace(known, found=found, price=price))
        else:
            self.points.append(self._point(found, price, self.planner.account(found.decisions)))
        return self.points[-1]

    def _point(self, found: Found, price: float, account: Account) -> _Point:
        reductions = [leg for leg in account.legs if leg.gradient]
        hidden = sum(min(leg.path.seconds, float(self.behind[leg.position])) for leg in reductions)
        return _Point(found, price, found.cost - hidden, hidden)


def _least(left: _Point, right: _Point, price: float) -> float:
    """What no plan costs less than at a price between those at which two are the cheapest.

    What the cheapest plan costs is concave in the price: the least of many straight lines.
    """
    share = (price - right.price) / (left.price - right.price)
    return share * left.value(left.price) + (1.0 - share) * right.value(right.price)


def _behind(account: Account) -> np.ndarray:
    """Seconds of compute behind a reduction of a gradient that is made at each moment of the step.

    Gradients are reduced together, about `GROUPED_BYTES` at once, when the last of them is there
    (`reshard.bucket`): what hides a reduction is the compute behind the last of its group.
    """
    seconds = [account.seconds(node) for node in account.rules.operators]
    behind = np.append(np.cumsum(seconds[::-1])[::-1], [0.0, 0.0])
    begin, last, held = 0, 0, 0
    for leg in (leg for leg in account.legs if leg.gradient):
        bytes = leg.path.steps[0].bytes
        if held and held + bytes > GROUPED_BYTES:
            behind[begin:last] = behind[last]
            begin, held = last + 1, 0
        last, held = leg.position, held + bytes
    behind[begin:last] = behind[last]
    return behind
