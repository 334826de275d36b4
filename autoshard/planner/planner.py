"""The search for the plan of one joint graph: fast, and within the memory limit.

`Planner` solves problems, on three mesh axes and more by `MultiAxisSolver`. `OverlapSearch` finds the fastest of the
plans that are cheapest at some price of hidden seconds.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.errors import BudgetError, PlanError, warn_caller
from autoshard.patterns.borrowed import batch_advice
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.graph_rules import Value
from autoshard.patterns.strategy import axis_choices
from autoshard.planner.account import StepAccount
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.lazy_solver import LazyCosts, LazySolver
from autoshard.planner.planning_context import PlanningContext
from autoshard.planner.planning_problem import Constraints, OverlapDiscount
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.solve_request import BlockSolution, SolveRequest
from autoshard.planner.solving import CLOSE, SolveOptions, is_large
from autoshard.planner.tiling import Tiling
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES

_MAX_SOLVES = 4  # problems solved for one kind of collectives, at prices below 1
# Shares of a step's time.
_MIN_GAIN = 1e-3  # plans that hide more are searched only if this much is exposed
_TIE_TOLERANCE = 1e-9  # plans that differ by less are equally fast, and the cheapest of them is taken

# Of three axes and more.
_MOST_STRATEGIES = 3000  # strategies of one operator over all axes that a bound may list
MOST_PAIRS = 100_000_000  # pairs of strategies in tables of different edges over all axes, 8 bytes each
_ROUNDS = 4  # passes over the axes, and over the pairs of axes


@dataclass(frozen=True, slots=True)
class _TradeoffPoint:
    """A plan as a point with two coordinates: hideable collectives of one kind, and everything else.

    Attributes:
        plan: the plan.
        price: the price of a hidden second at which it is the cheapest.
        unhidden_seconds: seconds of compute, and of collectives that nothing hides.
        hideable_seconds: seconds of collectives of the kind that compute can hide.
        lower_bound: a lower bound of the step's seconds, if compute hides all collectives that it can.
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

    A problem sums the seconds of a plan's parts, but a device reduces gradients and gathers parameters while it
    computes. How much of that is hidden depends on the whole plan, and is no sum. But a plan that hides its collectives
    well is the cheapest if a hidden second counts less than others. The plan with all parameters sharded is a candidate
    too. The timeline chooses among all candidates.

    Args:
        planner: solves problems.
        first: the cheapest plan if hidden seconds count in full.
    """

    def __init__(self, planner: PlanningContext, first: CandidatePlan) -> None:
        self.planner = planner
        self.first = first
        account, contention = planner.account(first.decisions), planner.cluster.contention
        # Reductions run in the backward half and most gathers in the forward half: one half may have compute left where
        # the other has none. So the two kinds have separate prices, and are searched one after the other. Hidden
        # collectives are not free: they slow concurrent compute down.
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
        # All curves begin at the first plan, which has no note.
        plans = [
            (point.plan, "" if point.plan is self.first else f", {curve.full_discount.kind} hidden")
            for curve in self.curves
            for point in curve.promising
        ]
        # If all parameters are sharded, few joined collectives gather and reduce them, which sums do not include.
        names = frozenset(source.name for source in self.planner.graph.parameters)
        sharded = self.planner.try_solve(replace(self.planner.constraints, forced=names)) if names else None
        if sharded is not None and sharded.step_seconds < (1 - _MIN_GAIN) * min(plan.step_seconds for plan, _ in plans):
            plans.append((sharded, ", parameters sharded"))
        shortest = min(plan.step_seconds for plan, _ in plans)
        equal = [(plan, note) for plan, note in plans if plan.step_seconds <= (1 + _TIE_TOLERANCE) * shortest]
        fastest, note = min(equal, key=lambda pair: pair[0].cost)
        if fastest is self.first:
            return fastest
        # Without discounts no plan costs less than the first plan's bound.
        return replace(fastest, lower_bound=self.first.lower_bound, method=fastest.method + note)


class _TradeoffCurve:
    """Plans that trade unhidden seconds for hideable seconds of one kind.

    Each is the cheapest at some price between that of the full discount, at which all of the kind is hidden, and 1.
    They are the corners of a convex curve, found as in parametric optimisation: there is a third corner between two if
    another plan costs less at the price at which both cost the same. It is searched if the gain may be a thousandth of
    the step.

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
        """The points that may take less time than the first, to be timed by their programs."""
        return [point for point in self.points if point is self.first or point.lower_bound < self.first.step]

    def explore(self) -> None:
        """Add a few corners between the first plan and the cheapest plan at the full discount."""
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
    # The cost of the cheapest plan is concave in the price, as a minimum of linear functions.
    share = (price - right.price) / (left.price - right.price)
    return share * left.value(left.price) + (1.0 - share) * right.value(right.price)


def compute_after(account: StepAccount) -> np.ndarray:
    """Return, for every moment of the step, the seconds of compute after a gradient reduction that starts there."""
    seconds = [account.seconds(node) for node in account.rules.operators]
    # Two more moments: that of the optimizer's step, and its end.
    after = np.append(np.cumsum(seconds[::-1])[::-1], [0.0, 0.0])
    # Gradients are reduced in buckets (`reshard.reductions`) when the last one of a bucket exists, so the compute after
    # that hides the whole bucket.
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
    """Return, for every moment, the seconds of compute before it in the same half, by which gathers start early."""
    graph, done = account.flow.graph, {"forward": 0.0, "backward": 0.0}
    before = []
    for node in account.rules.operators:
        before.append(done[graph.phase(node)])
        done[graph.phase(node)] += account.seconds(node)
    return np.array([*before, 0.0, 0.0])


def _joined_gather_ratio(account: StepAccount) -> float:
    """Return the seconds of gathering parameters layer by layer, relative to those of gathering each alone."""
    # The step gathers the parameters of a layer in one collective, so latency counts once.
    cost, layers = account.tables.cost, defaultdict[str, list[int]](list)
    for source in account.flow.graph.parameters:
        layers[account.rules.parameter_layers[source.name]].append(Value(source.node).meta.bytes)
    alone, together = 0.0, 0.0
    for axis, size in enumerate(account.mesh.sizes):
        for held in layers.values():
            alone += sum(cost.collective("all_gather", bytes // size, axis) for bytes in held)
            together += cost.collective("all_gather", sum(held) // size, axis)
    return min(1.0, together / alone) if alone else 1.0


class MultiAxisSolver:
    """Solves the problems of a planner whose mesh has three axes or more.

    Args:
        planner: the planner; it solves problems with some open axes.
    """

    def __init__(self, planner: PlanningContext) -> None:
        self.planner = planner
        # Of the last constraints: the next problem with these constraints uses their exact prices.
        self._lazy: tuple[Constraints, LazyCosts, Tiling | None] | None = None

    def solve(self, request: SolveRequest) -> BlockSolution:
        """Return the best decisions for all axes."""
        planner = self.planner
        solved = self._solve_lazily(request)
        # A plan at a discount is a proposal for the timeline, and needs no proof.
        enough = planner.settings.effort == "fast" or request.discount is not None
        if solved is not None and (enough or solved.gap <= CLOSE or solved.interrupted):
            return solved
        start = solved or planner.best
        try:
            in_turn = self._solve_in_turn(request, None if start is None else start.decisions)
        except (PlanError, BudgetError):
            if start is None:
                raise
            # Decisions under other constraints may be forbidden under these.
            in_turn = self._solve_in_turn(request, None)
        if solved is None:
            return replace(in_turn, lower_bound=-math.inf)
        better = in_turn if in_turn.value < solved.value else replace(solved, interrupted=in_turn.interrupted)
        return replace(better, lower_bound=solved.lower_bound)

    def _solve_lazily(self, request: SolveRequest) -> BlockSolution | None:
        """Solve all axes at once, with lower bounds as prices and exact prices where solutions use them.

        Small problems have exact prices at once. The result is None if memory counts, since not all prices are then of
        reshards; if there are too many strategies; or if no assignment is found.
        """
        planner = self.planner
        plain = request.prices is None and request.limit is None and request.method == "auto"
        if not plain or not self._is_listable:
            return None
        axes, constraints = frozenset(planner.axes), request.builder.constraints
        if self._lazy is None or self._lazy[0] is not constraints:
            with planner.time_phase("problem"):
                lower_bounds = LowerBoundResharder(planner.mesh, planner.cost.collective, planner.gradient_price)
                built = ProblemBuilder(planner.rules, planner.tables, lower_bounds, constraints).build(axes)
                self._lazy = constraints, LazyCosts(built), Tiling.of(built, planner.layers, free="families")
        _, lazy_costs, tiling = self._lazy
        # For a small problem, computing all exact prices is quicker than learning the used ones.
        if not is_large(lazy_costs.built.problem):
            return planner.solve_block(request, axes, None)
        budget, proof = planner.budget.part(1.0), request.discount is None
        options = SolveOptions("auto", budget, proof=proof, work_limit=request.work, report=planner.report)
        with planner.time_phase("solve"):
            solver = LazySolver(lazy_costs, planner.resharder, tiling, options, request.discount)
            result = solver.run()
            self._lazy = constraints, solver.lazy_costs, tiling
        if not result.assignment and budget.interrupted:
            raise KeyboardInterrupt
        if not result.assignment:
            return None
        built = solver.lazy_costs.built
        decisions, cost = built.decode(result.assignment), built.problem.cost(result.assignment)
        return BlockSolution(decisions, result.cost, cost, result.lower_bound, result.method, budget.interrupted)

    @cached_property
    def _is_listable(self) -> bool:
        """True if operators have few strategies over all axes, and distinct edges few pairs."""
        planner, rules = self.planner, self.planner.rules.rules
        counts = {
            id(rule): math.prod(len(axis_choices(rule, size)) for size in planner.mesh.sizes)
            for rule in {id(rule): rule for rule in rules.values()}.values()
        }
        edges = {
            (id(rules[value.node]), id(rules[node]), operand)
            for node in planner.rules.operators
            for operand, value in enumerate(planner.rules.operands[node])
            if value.node in rules
        }
        pairs = sum(counts[producer] * counts[reader] for producer, reader, _ in edges)
        return max(counts.values(), default=0) <= _MOST_STRATEGIES and pairs <= MOST_PAIRS

    def _solve_in_turn(self, request: SolveRequest, start: Decisions | None) -> BlockSolution:
        """Solve blocks of axes in turn, the others fixed, until no block improves the solution."""
        planner = self.planner
        # The largest axis first: while an axis is fixed to replication, its devices all do the same.
        order = sorted(planner.axes, key=lambda axis: -planner.mesh.sizes[axis])
        # Without a start, one axis after the other, each solved exactly, is quick and comes near. Pairs of axes then
        # make the changes that only two axes can make together.
        widths = (1, 2) if start is None else (2,)
        rounds = 1 if planner.settings.effort == "fast" else _ROUNDS
        best: BlockSolution | None = None
        for width in widths:
            blocks = [frozenset(block) for block in itertools.combinations(order, width)]
            idle = 0  # blocks since the last improvement
            for block in itertools.islice(itertools.cycle(blocks), rounds * len(blocks)):
                if best is not None and (idle == len(blocks) or best.interrupted or planner.budget.is_over):
                    break
                solved = planner.solve_block(request, block, start if best is None else best.decisions)
                idle += 1
                if best is None or solved.value < best.value * (1 - 1e-9):
                    best, idle = solved, 1
                elif solved.interrupted:
                    best = replace(best, interrupted=True)
        assert best is not None
        return best


class Planner(PlanningContext):
    """Plans one joint graph on one mesh; the arguments are those of `PlanningContext`."""

    def warn_of_unknown_operators(self) -> None:
        """Warn of operators without a sharding rule, which are replicated."""
        for name, count in self.rules.unknown.items():
            warn_caller(
                f"no sharding rule for {name} ({count} calls): it is replicated on every device. "
                + batch_advice(name, self.rules.batch_rules[name]),
            )

    def fastest(self, cheapest: CandidatePlan) -> CandidatePlan:
        """Return the plan with the shortest step that is found without a memory limit.

        Args:
            cheapest: the plan with the smallest cost, the start of the search.
        """
        if self._fastest is None:
            # A reduction shared by several runs is not hidden by the compute of one run.
            plain = self.settings.effort == "fast" or self.settings.runs_per_reduction > 1
            self._fastest = cheapest if plain else OverlapSearch(self, cheapest).run()
        return self._fastest

    def _solve_all_axes(self, request: SolveRequest) -> BlockSolution:
        if len(self.axes) <= 2:
            return self.solve_block(request, frozenset(self.axes), None)
        return self._multi_axis_solver.solve(request)

    @cached_property
    def _multi_axis_solver(self) -> MultiAxisSolver:
        return MultiAxisSolver(self)
