"""Plans that send more behind compute and less in its way: what is hidden counts less than what is waited for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import PlanError
from autoshard.patterns.graph_rules import Value
from autoshard.planner.account import StepAccount
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import OverlapDiscount
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES

_MAX_SOLVES = 4  # problems solved for one kind of collectives, at other prices than one
_MIN_GAIN = 1e-3  # of a step's time: what is exposed of it at least for plans that hide more to be looked for
_TIE_TOLERANCE = (
    1e-9  # of a step's time: plans that differ by less are equally fast, and the one that costs least is taken
)


@dataclass(frozen=True, slots=True)
class _TradeoffPoint:
    """A plan in the plane of what one kind of collectives hides behind compute, and everything else.

    Attributes:
        found: the plan.
        price: of a hidden second, at which it is the cheapest.
        shown: seconds of compute, and of the collectives that nothing hides.
        hidden: seconds of collectives of the kind that have compute to hide behind.
        least: seconds that the step takes at least, where compute hides all kinds of collectives that it may.
    """

    plan: CandidatePlan
    price: float
    unhidden_seconds: float
    hideable_seconds: float
    lower_bound: float

    @property
    def step(self) -> float:
        """Predicted seconds of the step."""
        return self.plan.step_seconds

    def value(self, price: float) -> float:
        return self.unhidden_seconds + price * self.hideable_seconds


class OverlapSearch:
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

    def __init__(self, planner: PlanningContext, first: CandidatePlan) -> None:
        self.planner = planner
        self.first = first
        account, contention = planner.account(first.decisions), planner.cluster.contention
        hidings = (
            OverlapDiscount("reductions", _compute_after(account), contention),
            OverlapDiscount("gathers", _compute_before(account), contention * _joined_gather_ratio(account)),
        )
        self.curves = [_TradeoffCurve(planner, account, first, hiding, hidings) for hiding in hidings]

    def run(self) -> CandidatePlan:
        """The fastest plan found; of equally fast ones, the one that costs least."""
        if self.first.exposed_seconds <= _MIN_GAIN * self.first.step_seconds:
            return self.first
        for curve in self.curves:
            curve.explore()
        plans = [
            (point.plan, "" if point.plan is self.first else f", {curve.full_discount.kind} hidden")
            for curve in self.curves
            for point in curve.promising
        ]
        sharded = self._solve_fully_sharded()
        if sharded is not None and sharded.step_seconds < (1 - _MIN_GAIN) * min(one.step_seconds for one, _ in plans):
            plans.append((sharded, ", parameters sharded"))
        fastest = min(one.step_seconds for one, _ in plans)
        equal = [(one, told) for one, told in plans if one.step_seconds <= (1 + _TIE_TOLERANCE) * fastest]
        found, told = min(equal, key=lambda one: one[0].cost)
        if found is self.first:
            return found
        # No plan costs less than the bound of the problem in which everything counts.
        return replace(found, lower_bound=self.first.lower_bound, method=found.method + told)

    def _solve_fully_sharded(self) -> CandidatePlan | None:
        """The cheapest plan in which all parameters are sharded; None where there is none, or time is up."""
        planner = self.planner
        names = frozenset(source.name for source in planner.graph.inputs if source.kind == "parameter")
        if not names or time.monotonic() > planner.deadline:
            return None
        try:
            return planner.solve(replace(planner.constraints, forced=names))
        except PlanError:  # the method found nothing in the time that was left
            return None


class _TradeoffCurve:
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
        self,
        planner: PlanningContext,
        account: StepAccount,
        first: CandidatePlan,
        least: OverlapDiscount,
        every: Sequence[OverlapDiscount],
    ) -> None:
        self.planner = planner
        self.full_discount = least
        self.all_discounts = every
        self.first = self._point(first, 1.0, account)
        self.points = [self.first]

    @property
    def promising(self) -> list[_TradeoffPoint]:
        """The points but those that take longer than the first, whatever they hide: to know a step takes a program."""
        return [point for point in self.points if point is self.first or point.lower_bound < self.first.step]

    def explore(self) -> None:
        """Adds the corners between the first plan and the one that is cheapest where all is hidden, a few at most."""
        last = self._solve_at_price(self.full_discount.price)
        if last is None or last.plan.decisions == self.first.plan.decisions:
            return
        stretches = [(self.first, last)]
        while stretches:
            left, right = stretches.pop(0)
            if min(point.step for point in self.promising) <= (1 + _MIN_GAIN) * last.value(self.full_discount.price):
                return  # as fast as a plan would be that hides all of the kind
            if right.hideable_seconds <= left.hideable_seconds or left.unhidden_seconds <= right.unhidden_seconds:
                continue
            price = (left.unhidden_seconds - right.unhidden_seconds) / (right.hideable_seconds - left.hideable_seconds)
            if not right.price < price < left.price:
                continue  # one of them is not quite the cheapest
            if left.value(price) - _lower_bound(left, right, price) <= _MIN_GAIN * self.first.step:
                continue
            between = self._solve_at_price(price)
            if between is None:
                return
            if between.value(price) < (1 - 1e-9) * left.value(price):
                stretches += [(left, between), (between, right)]

    def _solve_at_price(self, price: float) -> _TradeoffPoint | None:
        """The cheapest plan at a price, which joins the others; None where enough were solved, or time is up."""
        if len(self.points) > _MAX_SOLVES or time.monotonic() > self.planner.deadline:
            return None
        try:
            found = self.planner.solve(self.planner.constraints, hiding=replace(self.full_discount, price=price))
        except PlanError:  # the method found nothing in the time that was left
            return None
        known = next((point for point in self.points if point.plan.decisions == found.decisions), None)
        if known is not None:
            self.points.append(replace(known, plan=found, price=price))
        else:
            self.points.append(self._point(found, price, self.planner.account(found.decisions)))
        return self.points[-1]

    def _point(self, found: CandidatePlan, price: float, account: StepAccount) -> _TradeoffPoint:
        hidden = {
            one.kind: sum(min(seconds, float(one.compute[moment])) for seconds, moment in account.hideable(one.kind))
            for one in self.all_discounts
        }
        least = found.cost - sum((1.0 - one.price) * hidden[one.kind] for one in self.all_discounts)
        own = hidden[self.full_discount.kind]
        return _TradeoffPoint(found, price, found.cost - own, own, least)


def _lower_bound(left: _TradeoffPoint, right: _TradeoffPoint, price: float) -> float:
    """What no plan costs less than at a price between those at which two are the cheapest.

    What the cheapest plan costs is concave in the price: the least of many straight lines.
    """
    share = (price - right.price) / (left.price - right.price)
    return share * left.value(left.price) + (1.0 - share) * right.value(right.price)


def _compute_after(account: StepAccount) -> np.ndarray:
    """Seconds of compute behind a reduction of a gradient that is made at each moment of the step.

    Gradients are reduced together, about `GRADIENT_BUCKET_BYTES` at once, when the last of them is there
    (`reshard.bucket`): what hides a reduction is the compute behind the last of its group.
    """
    seconds = [account.seconds(node) for node in account.rules.operators]
    behind = np.append(np.cumsum(seconds[::-1])[::-1], [0.0, 0.0])
    begin, last, held = 0, 0, 0
    for leg in (leg for leg in account.reshards if leg.gradient):
        bytes = leg.path.steps[0].bytes
        if held and held + bytes > GRADIENT_BUCKET_BYTES:
            behind[begin:last] = behind[last]
            begin, held = last + 1, 0
        last, held = leg.position, held + bytes
    behind[begin:last] = behind[last]
    return behind


def _compute_before(account: StepAccount) -> np.ndarray:
    """Seconds of compute in the same half before each moment of the step: gathers run that far ahead."""
    graph, done = account.flow.graph, {"forward": 0.0, "backward": 0.0}
    before = []
    for node in account.rules.operators:
        before.append(done[graph.phase(node)])
        done[graph.phase(node)] += account.seconds(node)
    return np.array([*before, 0.0, 0.0])


def _joined_gather_ratio(account: StepAccount) -> float:
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
