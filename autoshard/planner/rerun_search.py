"""The fastest plan within a memory limit, with operators that run again chosen one by one.

Memory gets a price at every moment, found by column generation: each plan that is met makes the prices better, and
each set of prices leads to another plan. All layers change at one price, so that the last plans are mixed, some layers
as in the one, the others as in the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from autoshard.capture.offloading import HOST_NAME
from autoshard.capture.recomputation import rerun_name
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.graph_rules import value_of
from autoshard.planner.budget_search import first_that_fits
from autoshard.planner.memory_prices import mix_prices
from autoshard.planner.planning_context import CandidatePlan, ProgramEstimate
from autoshard.planner.rerun_context import RerunContext

Entry = TypeVar("Entry")

_ROUNDS = 12  # plans made at prices of memory, at most
_STRONGEST = 30.0  # steps that the limit's bytes have where no mix of plans fits
_ENOUGH = 1e-3  # part of a step by which another plan has to make the mix better
_STRENGTHS = (10.0, 0.01)  # the largest and the smallest price of the limit's bytes between which is searched, in steps
_LEVELS = 30  # prices between these
_MIXES = 3  # pairs of plans that are mixed, at most


class RerunSearch:
    """Searches for the fastest plan whose peak is within a limit.

    Args:
        context: the problem in which operators may run again.
        limit: bytes per device.
        known: plans in which nothing runs again; the first is that without a limit.
    """

    def __init__(self, context: RerunContext, limit: int, known: Sequence[CandidatePlan]) -> None:
        self.context = context
        self.limit = limit
        self.unlimited = known[0]
        self.met: list[CandidatePlan] = []
        self._held: dict[ProgramEstimate, np.ndarray] = {}  # bytes at every moment, of the plans met
        self._mixed: set[tuple[ProgramEstimate, ProgramEstimate]] = set()
        for plan in known:
            self._meet(plan)

    def run(self) -> CandidatePlan | None:
        """Return the fastest plan met that fits; None if none does."""
        prices = self._generate()
        if prices is not None and prices.any():
            self._bisect(prices)
        self._mix()
        fitting = [plan for plan in self.met if self._fits(plan)]
        return min(fitting, key=lambda plan: plan.step_seconds, default=None)

    @property
    def leanest(self) -> CandidatePlan:
        """The plan with the smallest peak that was met."""
        return min(self.met, key=lambda plan: plan.memory.peak)

    def _fits(self, plan: CandidatePlan) -> bool:
        return plan.memory.peak <= self.limit

    def _generate(self) -> np.ndarray | None:
        """Meet plans at the prices of memory that the plans met so far lead to; return the last prices."""
        context = self.context
        longest, center = self.unlimited.step_seconds, None
        for _ in range(_ROUNDS):
            held = [self._held[plan.estimate] for plan in self.met]
            steps = [plan.step_seconds for plan in self.met]
            prices, best_mix = mix_prices(steps, held, self.limit, _STRONGEST * longest)
            # Prices of few plans go to and fro: half of the last ones steady them. If what these lead to does not make
            # the mix better, its own prices are asked.
            center = prices if center is None else (center + prices) / 2
            for asked in (center, prices) if center is not prices else (prices,):
                plan = context.try_solve(context.constraints, prices=asked)
                if plan is None:
                    return center
                self._meet(plan)
                gain = best_mix - plan.step_seconds - float(prices @ self._held[plan.estimate])
                if gain > _ENOUGH * longest:
                    break
            else:
                break
        return center

    def _bisect(self, prices: np.ndarray) -> None:
        """Meet plans at more and at less of the last prices, which lie next to the limit."""
        # What a problem minimises is not quite the step that is predicted: prices are right up to a factor.
        lean = [plan for plan in self.met if self._fits(plan)]
        if not lean:
            return
        leanest = min(lean, key=lambda plan: plan.memory.peak)
        weights = prices / prices.sum()
        strongest, weakest = (share * self.unlimited.step_seconds / self.limit for share in _STRENGTHS)

        def make(level: int) -> CandidatePlan:
            strength = weakest * (strongest / weakest) ** (level / _LEVELS)
            plan = self.context.try_solve(self.context.constraints, prices=weights * strength)
            if plan is None:
                return leanest
            self._meet(plan)
            return plan

        def measure(plan: CandidatePlan) -> tuple[float, int]:
            return plan.step_seconds, plan.memory.peak

        first_that_fits(self.unlimited, leanest, _LEVELS, make, measure, self.limit, _ENOUGH)

    def _meet(self, plan: CandidatePlan) -> None:
        if plan.estimate not in self._held:
            self._held[plan.estimate] = self.context.moments_of(plan)
            self.met.append(plan)

    def _mix(self) -> None:
        """Meet plans in which some layers are as in one plan, which fits, and the others as in a faster one."""
        for _ in range(_MIXES):
            pair = self._promising_pair()
            if pair is None:
                return
            self._mixed.add((pair[0].estimate, pair[1].estimate))
            mix = LayerMix(self.context, *pair)
            # The more layers are as in the lean plan, the less is held: bisection finds the fewest that fit.
            low, high = 0, len(mix.layers)
            while high - low > 1 and not self.context.is_past_deadline:
                count = (low + high) // 2
                plan = mix.plan(count)
                self._meet(plan)
                low, high = (low, count) if self._fits(plan) else (count, high)

    def _promising_pair(self) -> tuple[CandidatePlan, CandidatePlan] | None:
        """Return the plan that fits and the faster one that does not whose mix promises the shortest step."""
        fitting = [plan for plan in self.met if self._fits(plan)]
        if not fitting:
            return None
        best = min(plan.step_seconds for plan in fitting)

        def mix_seconds(lean: CandidatePlan, fast: CandidatePlan) -> float:
            # Seconds and bytes of a mix lie between those of its plans.
            share = (self.limit - lean.memory.peak) / (fast.memory.peak - lean.memory.peak)
            return lean.step_seconds + share * (fast.step_seconds - lean.step_seconds)

        pairs = [
            (mix_seconds(lean, fast), place, lean, fast)
            for place, (lean, fast) in enumerate(itertools.product(fitting, self.met))
            if not self._fits(fast) and (lean.estimate, fast.estimate) not in self._mixed
        ]
        if not pairs or min(pairs)[0] > (1 - _ENOUGH) * best:
            return None
        return min(pairs)[2:]


class LayerMix:
    """Plans in which the first layers are as in one plan, and the others as in another one.

    Args:
        context: the problem in which operators may run again.
        lean: the plan of the first layers, whose tensors are kept longest, and of all that is in no layer.
        fast: the plan of the other layers.

    Attributes:
        layers: the layers, in order.
    """

    def __init__(self, context: RerunContext, lean: CandidatePlan, fast: CandidatePlan) -> None:
        self.context, self.lean, self.fast = context, lean, fast
        placed = {name: layer for name, (layer, _) in context.without.layers.items()}
        self.layers = sorted(set(placed.values()))
        self._layer_of = dict(placed)
        rules = context.without.rules
        for node in rules.graph.graph.nodes:
            if node.op == "placeholder":
                users = (value_of(user).node.name for user in node.users)
                layer = next((placed[name] for name in users if name in placed), None)
                if layer is not None:
                    self._layer_of[node.name] = layer
        for name in context.reruns:
            if name in placed:
                self._layer_of[rerun_name(name)] = placed[name]
        for name, node in context.moves.items():
            layer = placed.get(value_of(node).node.name)
            if layer is not None:
                self._layer_of |= {name: layer, HOST_NAME.format(node.name): layer}

    def plan(self, count: int) -> CandidatePlan:
        """Return the plan in which so many layers are as in the lean plan."""
        first = set(self.layers[:count])

        def is_lean(name: str) -> bool:
            layer = self._layer_of.get(name)
            return layer is None or layer in first

        def select(of: Callable[[Decisions], Mapping[str, Entry]], key: Callable[[str], str]) -> dict[str, Entry]:
            lean, fast = of(self.lean.decisions), of(self.fast.decisions)
            chosen = {name: entry for name, entry in lean.items() if is_lean(key(name))}
            return chosen | {name: entry for name, entry in fast.items() if not is_lean(key(name))}

        decisions = Decisions(
            select(lambda each: each.choices, lambda name: name),
            select(lambda each: each.rest, lambda name: name),
            self.lean.decisions.outputs,
            select(lambda each: each.hubs, lambda key: key.partition("@")[0].partition(":")[0]),
        )
        reruns = [
            name
            for plan, wanted in ((self.lean, True), (self.fast, False))
            for name in self.context.names_of(plan)
            if is_lean(name) == wanted
        ]
        planner = self.context.planner_with(reruns)
        account = planner.account(self.context.settle(decisions, planner))
        cost = account.total_seconds
        return self.context.evaluate_reruns(reruns, decisions, cost, 0.0, f"{self.lean.method}, layers mixed")
