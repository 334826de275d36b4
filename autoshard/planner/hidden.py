"""Plans that send more behind compute and less in its way: what is hidden counts less than what is waited for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autoshard.cluster.cost import GROUPED_BYTES
from autoshard.errors import PlanError
from autoshard.patterns.graph import Value
from autoshard.planner.account import Account
from autoshard.planner.found import Found
from autoshard.planner.problem import Hiding

if TYPE_CHECKING:
    from autoshard.planner.planner import Planner

_SOLVES = 4  # problems solved for one kind of collectives, at other prices than one
_WORTH = 1e-3  # of a step's time: what is exposed of it at least for plans that hide more to be looked for
_TIE = 1e-9  # of a step's time: plans that differ by less are equally fast, and the one that costs least is taken


@dataclass(frozen=True, slots=True)
class _Point:
    """A plan in the plane of what one kind of collectives hides behind compute, and everything else.

    Attributes:
        found: the plan.
        price: of a hidden second, at which it is the cheapest.
        shown: seconds of compute, and of the collectives that nothing hides.
        hidden: seconds of collectives of the kind that have compute to hide behind.
        least: seconds that the step takes at least, where compute hides all kinds of collectives that it may.
    """

    found: Found
    price: float
    shown: float
    hidden: float
    least: float

    @property
    def step(self) -> float:
        """Predicted seconds of the step."""
        return self.found.step_seconds

    def value(self, price: float) -> float:
        return self.shown + price * self.hidden


class HiddenCollectives:
    """Looks for the plan with the shortest timeline among those that are cheapest at some price of hidden collectives.

    A problem adds up the seconds of a plan's parts; a device reduces gradients and gathers parameters while it
    computes. How much of that can be hidden depends on the whole plan, and is no sum. But a plan that hides its
    collectives well is cheapest where a hidden second counts less than others. Reductions run in the backward half, and
    most gathers in the forward half, of which one may have compute left where the other has none: the two kinds have
    prices of their own, and one kind is looked at after the other. Where all parameters are sharded, all are gathered
    and reduced alike, and few collectives do it, which no sum knows either: that plan is looked at too. The timeline
    chooses among all plans found.

    Args:
        planner: solves problems.
        first: the cheapest plan where hidden seconds count in full.
    """

    def __init__(self, planner: Planner, first: Found) -> None:
        self.planner = planner
        self.first = first
        account, contention = planner.account(first.decisions), planner.cluster.contention
        hidings = (
            Hiding("reductions", _after(account), contention),
            Hiding("gathers", _before(account), contention * _joined_share(account)),
        )
        self.curves = [_Curve(planner, account, first, hiding, hidings) for hiding in hidings]

    def run(self) -> Found:
        """The fastest plan found; of equally fast ones, the one that costs least."""
        if self.first.exposed <= _WORTH * self.first.step_seconds:
            return self.first
        for curve in self.curves:
            curve.explore()
        plans = [
            (point.found, "" if point.found is self.first else f", {curve.least.kind} hidden")
            for curve in self.curves
            for point in curve.promising
        ]
        sharded = self._sharded()
        if sharded is not None and sharded.step_seconds < (1 - _WORTH) * min(one.step_seconds for one, _ in plans):
            plans.append((sharded, ", parameters sharded"))
        fastest = min(one.step_seconds for one, _ in plans)
        equal = [(one, told) for one, told in plans if one.step_seconds <= (1 + _TIE) * fastest]
        found, told = min(equal, key=lambda one: one[0].cost)
        if found is self.first:
            return found
        # No plan costs less than the bound of the problem in which everything counts.
        return replace(found, lower_bound=self.first.lower_bound, method=found.method + told)

    def _sharded(self) -> Found | None:
        """The cheapest plan in which all parameters are sharded; None where there is none, or time is up."""
        planner = self.planner
        names = frozenset(source.name for source in planner.graph.inputs if source.kind == "parameter")
        if not names or time.monotonic() > planner.deadline:
            return None
        try:
            return planner.solve(replace(planner.wishes, forced=names))
        except PlanError:  # the method found nothing in the time that was left
            return None


class _Curve:
    """Plans that trade what is shown for what one kind of collectives hides.

    Each is the cheapest at some price between the least one, at which all of the kind is hidden, and 1. They
    are the corners of a convex curve, and are found as in parametric optimisation: between two corners lies a third if,
    at the price at which both cost the same, another plan costs less. It is looked for if that may be by a thousandth
    of the step.

    Args:
        planner: solves problems.
        account: of the first plan.
        first: the cheapest plan where hidden seconds count in full.
        least: what collectives of the kind count where all of it is hidden.
        every: the same of all kinds.
    """

    def __init__(
        self, planner: Planner, account: Account, first: Found, least: Hiding, every: Sequence[Hiding]
    ) -> None:
        self.planner = planner
        self.least = least
        self.every = every
        self.first = self._point(first, 1.0, account)
        self.points = [self.first]

    @property
    def promising(self) -> list[_Point]:
        """The points but those that take longer than the first, whatever they hide: to know a step takes a program."""
        return [point for point in self.points if point is self.first or point.least < self.first.step]

    def explore(self) -> None:
        """Adds the corners between the first plan and the one that is cheapest where all is hidden, a few at most."""
        last = self._solved(self.least.price)
        if last is None or last.found.decisions == self.first.found.decisions:
            return
        stretches = [(self.first, last)]
        while stretches:
            left, right = stretches.pop(0)
            if min(point.step for point in self.promising) <= (1 + _WORTH) * last.value(self.least.price):
                return  # as fast as a plan would be that hides all of the kind
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
            found = self.planner.solve(self.planner.wishes, hiding=replace(self.least, price=price))
        except PlanError:  # the method found nothing in the time that was left
            return None
        known = next((point for point in self.points if point.found.decisions == found.decisions), None)
        if known is not None:
            self.points.append(replace(known, found=found, price=price))
        else:
            self.points.append(self._point(found, price, self.planner.account(found.decisions)))
        return self.points[-1]

    def _point(self, found: Found, price: float, account: Account) -> _Point:
        hidden = {
            one.kind: sum(min(seconds, float(one.compute[moment])) for seconds, moment in account.hideable(one.kind))
            for one in self.every
        }
        least = found.cost - sum((1.0 - one.price) * hidden[one.kind] for one in self.every)
        own = hidden[self.least.kind]
        return _Point(found, price, found.cost - own, own, least)


def _least(left: _Point, right: _Point, price: float) -> float:
    """What no plan costs less than at a price between those at which two are the cheapest.

    What the cheapest plan costs is concave in the price: the least of many straight lines.
    """
    share = (price - right.price) / (left.price - right.price)
    return share * left.value(left.price) + (1.0 - share) * right.value(right.price)


def _after(account: Account) -> np.ndarray:
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


def _before(account: Account) -> np.ndarray:
    """Seconds of compute in the same half before each moment of the step: gathers run that far ahead."""
    graph, done = account.flow.graph, {"forward": 0.0, "backward": 0.0}
    before = []
    for node in account.rules.operators:
        before.append(done[graph.phase(node)])
        done[graph.phase(node)] += account.seconds(node)
    return np.array([*before, 0.0, 0.0])


def _joined_share(account: Account) -> float:
    """The part of the seconds of gathering parameters one at a time in which all of a layer are gathered together."""
    cost, layers = account.tables.cost, defaultdict[str, list[int]](list)
    for source in account.flow.graph.inputs:
        if source.kind == "parameter":
            layers[account.rules.parameter_layers[source.name]].append(Value(source.node).meta.bytes)
    alone, together = 0.0, 0.0
    for axis, size in enumerate(account.mesh.sizes):
        for held in layers.values():
            alone += sum(cost.collective("all_gather", bytes // size, axis) for bytes in held)
            together += cost.collective("all_gather", sum(held) // size, axis)
    return min(1.0, together / alone) if alone else 1.0
