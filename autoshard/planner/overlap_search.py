"""Plans that hide more collectives behind compute: a hidden second counts less than one that the step waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.patterns.graph_rules import Value
from autoshard.planner.account import StepAccount
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import OverlapDiscount
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES

_MAX_SOLVES = 4  # problems solved for one kind of collectives, at prices below 1
# Shares of a step's time.
_MIN_GAIN = 1e-3  # plans that hide more are searched only if this much is exposed
_TIE_TOLERANCE = 1e-9  # plans that differ by less are equally fast, and the cheapest of them is taken


@dataclass(frozen=True, slots=True)
class _TradeoffPoint:
    """A plan in the plane of hideable collectives of one kind, and everything else.

    Attributes:
        plan: the plan.
        price: the price of a hidden second at which it is the cheapest.
        unhidden_seconds: seconds of compute, and of collectives that nothing hides.
        hideable_seconds: seconds of collectives of the kind that have compute to hide behind.
        lower_bound: a lower bound of the step's seconds: compute hides all kinds of collectives that it may.
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
    """Searches for the plan with the shortest timeline among those that are cheapest at some price of hidden seconds.

    A problem adds up the seconds of a plan's parts, while a device reduces gradients and gathers parameters beside its
    compute. How much of that is hidden depends on the whole plan, and is no sum. But a plan that hides its collectives
    well is cheapest if a hidden second counts less than others. Reductions run in the backward half and most gathers in
    the forward half, of which one may have compute left where the other has none. So the two kinds have separate
    prices, and are searched one after the other.

    If all parameters are sharded, a few joined collectives gather and reduce them, which no sum knows either: that plan
    is a candidate too. The timeline chooses among all candidates.

    Args:
        planner: solves problems.
        first: the cheapest plan if hidden seconds count in full.
    """

    def __init__(self, planner: PlanningContext, first: CandidatePlan) -> None:
        self.planner = planner
        self.first = first
        account, contention = planner.account(first.decisions), planner.cluster.contention
        discounts = (
            OverlapDiscount("reductions", compute_after(account), contention),
            OverlapDiscount("gathers", compute_before(account), contention * _joined_gather_ratio(account)),
        )
        self.curves = [_TradeoffCurve(planner, account, first, discount, discounts) for discount in discounts]

    def run(self) -> CandidatePlan:
        """Return the fastest plan found; of equally fast ones, the cheapest."""
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
        if sharded is not None and sharded.step_seconds < (1 - _MIN_GAIN) * min(plan.step_seconds for plan, _ in plans):
            plans.append((sharded, ", parameters sharded"))
        shortest = min(plan.step_seconds for plan, _ in plans)
        equal = [(plan, note) for plan, note in plans if plan.step_seconds <= (1 + _TIE_TOLERANCE) * shortest]
        fastest, note = min(equal, key=lambda pair: pair[0].cost)
        if fastest is self.first:
            return fastest
        # Without discounts no plan costs less than the first plan's bound.
        return replace(fastest, lower_bound=self.first.lower_bound, method=fastest.method + note)

    def _solve_fully_sharded(self) -> CandidatePlan | None:
        """Return the cheapest plan in which all parameters are sharded; None without one, or if time is up."""
        planner = self.planner
        names = frozenset(source.name for source in planner.graph.inputs if source.kind == "parameter")
        return planner.try_solve(replace(planner.constraints, forced=names)) if names else None


class _TradeoffCurve:
    """Plans that trade unhidden seconds for hideable seconds of one kind.

    Each is the cheapest at some price between that of the full discount, at which all of the kind is hidden, and 1.
    They are the corners of a convex curve, and are found as in parametric optimisation: a third corner lies between two
    if another plan costs less at the price at which both cost the same. It is searched if that may be by a thousandth
    of the step.

    Args:
        planner: solves problems.
        account: the account of the first plan.
        first: the cheapest plan if hidden seconds count in full.
        full_discount: the discount at which all collectives of the kind are hidden.
        all_discounts: the full discounts of all kinds.
    """

    def __init__(
        self,
        planner: PlanningContext,
        account: StepAccount,
        first: CandidatePlan,
        full_discount: OverlapDiscount,
        all_discounts: Sequence[OverlapDiscount],
    ) -> None:
        self.planner = planner
        self.full_discount = full_discount
        self.all_discounts = all_discounts
        self.first = self._point(first, 1.0, account)
        self.points = [self.first]

    @property
    def promising(self) -> list[_TradeoffPoint]:
        """The points that may take less time than the first one; to know their time takes a program."""
        return [point for point in self.points if point is self.first or point.lower_bound < self.first.step]

    def explore(self) -> None:
        """Add a few corners between the first plan and the one that is cheapest at the full discount."""
        last = self._solve_at_price(self.full_discount.price)
        if last is None or last.plan.decisions == self.first.plan.decisions:
            return
        pairs = [(self.first, last)]
        while pairs:
            left, right = pairs.pop(0)
            if min(point.step for point in self.promising) <= (1 + _MIN_GAIN) * last.value(self.full_discount.price):
                return  # as fast as a plan that hides all of the kind
            if right.hideable_seconds <= left.hideable_seconds or left.unhidden_seconds <= right.unhidden_seconds:
                continue
            price = (left.unhidden_seconds - right.unhidden_seconds) / (right.hideable_seconds - left.hideable_seconds)
            if not right.price < price < left.price:
                continue  # a plan was not quite the cheapest at its price
            if left.value(price) - _lower_bound(left, right, price) <= _MIN_GAIN * self.first.step:
                continue
            between = self._solve_at_price(price)
            if between is None:
                return
            if between.value(price) < (1 - 1e-9) * left.value(price):
                pairs += [(left, between), (between, right)]

    def _solve_at_price(self, price: float) -> _TradeoffPoint | None:
        """Add and return the cheapest plan at a price; None after enough plans, or if time is up."""
        if len(self.points) > _MAX_SOLVES:
            return None
        plan = self.planner.try_solve(self.planner.constraints, discount=replace(self.full_discount, price=price))
        if plan is None:
            return None
        # One plan may be the cheapest at several prices; its account is made once.
        known = next((point for point in self.points if point.plan.decisions == plan.decisions), None)
        if known is not None:
            self.points.append(replace(known, plan=plan, price=price))
        else:
            self.points.append(self._point(plan, price, self.planner.account(plan.decisions)))
        return self.points[-1]

    def _point(self, plan: CandidatePlan, price: float, account: StepAccount) -> _TradeoffPoint:
        hidden = {discount.kind: hidden_seconds(account, discount) for discount in self.all_discounts}
        saved = sum((1.0 - discount.price) * hidden[discount.kind] for discount in self.all_discounts)
        hideable = hidden[self.full_discount.kind]
        return _TradeoffPoint(plan, price, plan.cost - hideable, hideable, plan.cost - saved)


def hidden_seconds(account: StepAccount, discount: OverlapDiscount) -> float:
    """Return the seconds of a step's collectives of a kind that compute hides."""
    return sum(min(seconds, float(discount.compute[moment])) for seconds, moment in account.hideable(discount.kind))


def _lower_bound(left: _TradeoffPoint, right: _TradeoffPoint, price: float) -> float:
    """Return a lower bound of the cheapest plan at a price between those at which two plans are the cheapest."""
    # The cost of the cheapest plan is concave in the price, as the minimum of straight lines is.
    share = (price - right.price) / (left.price - right.price)
    return share * left.value(left.price) + (1.0 - share) * right.value(right.price)


def compute_after(account: StepAccount) -> np.ndarray:
    """Return for every moment of the step the seconds of compute after a reduction of a gradient that starts there."""
    seconds = [account.seconds(node) for node in account.rules.operators]
    after = np.append(np.cumsum(seconds[::-1])[::-1], [0.0, 0.0])
    # Gradients are reduced in buckets (`reshard.bucket`) when the last one of a bucket exists, so that the compute
    # after that one hides the whole bucket.
    begin, last, held = 0, 0, 0
    for reshard in account.reshards:
        if reshard.gradient:
            bytes = reshard.path.steps[0].bytes
            if held and held + bytes > GRADIENT_BUCKET_BYTES:
                after[begin:last] = after[last]
                begin, held = last + 1, 0
            last, held = reshard.position, held + bytes
    after[begin:last] = after[last]
    return after


def compute_before(account: StepAccount) -> np.ndarray:
    """Return for every moment the seconds of compute before it in the same half: gathers start that far ahead."""
    graph, done = account.flow.graph, {"forward": 0.0, "backward": 0.0}
    before = []
    for node in account.rules.operators:
        before.append(done[graph.phase(node)])
        done[graph.phase(node)] += account.seconds(node)
    return np.array([*before, 0.0, 0.0])


def _joined_gather_ratio(account: StepAccount) -> float:
    """Return the seconds of gathering parameters a layer at a time, relative to those of gathering each alone."""
    # The step gathers the parameters of a layer in one collective, so that the latency counts once.
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
