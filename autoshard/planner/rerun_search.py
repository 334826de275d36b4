"""The fastest plan within a memory limit, with operators that run again chosen one by one.

Memory gets a price at every moment, found by column generation: each plan that is met makes the prices better, and
each set of prices leads to another plan. All layers change at one price, so that the last plans are mixed, some layers
as in the one, the others as in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from autoshard.capture.recomputation import rerun_name
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.graph_rules import value_of
from autoshard.planner.memory_prices import memory_prices
from autoshard.planner.planning_context import CandidatePlan
from autoshard.planner.rerun_context import RerunContext

Entry = TypeVar("Entry")

_ROUNDS = 12  # plans made at prices of memory, at most
_STRONGEST = 30.0  # costs of a step that the limit's bytes have where no mix of plans fits
_ENOUGH = 2e-3  # part of a step's cost by which another plan has to make the mix better
_MIN_LAYERS = 2  # that a mix of plans chooses from


class RerunSearch:
    """Searches for the fastest plan whose peak is within a limit.

    Args:
        context: the problem in which operators may run again.
        limit: bytes per device.
        unlimited: the plan without a limit.
    """

    def __init__(self, context: RerunContext, limit: int, unlimited: CandidatePlan) -> None:
        self.context = context
        self.limit = limit
        self.unlimited = unlimited
        self.met: list[CandidatePlan] = [unlimited]

    def run(self) -> CandidatePlan | None:
        """Return the fastest plan met that fits; None if none does."""
        self._generate()
        self._mix()
        fitting = [plan for plan in self.met if self._fits(plan)]
        plan = min(fitting, key=lambda plan: plan.step_seconds, default=None)
        return None if plan is None else replace(plan, lower_bound=self.unlimited.lower_bound)

    @property
    def leanest(self) -> CandidatePlan:
        """The plan with the smallest peak that was met."""
        return min(self.met, key=lambda plan: plan.memory.peak)

    def _fits(self, plan: CandidatePlan) -> bool:
        return plan.memory.peak <= self.limit

    def _generate(self) -> None:
        """Meet plans at the prices of memory that the plans met so far lead to."""
        context, center = self.context, None
        strongest = _STRONGEST * self.unlimited.cost
        costs, held = [self.unlimited.cost], [context.moments_of(self.unlimited)]
        for _ in range(_ROUNDS):
            if context.is_past_deadline:
                return
            prices, bound = memory_prices(costs, held, self.limit, strongest)
            # Prices of few plans lie at few moments and go to and fro: half of the last ones steady them.
            center = prices if center is None else (center + prices) / 2
            gains = 0.0
            for tried in (center, prices):
                plan = context.try_solve(context.constraints, prices=tried)
                if plan is None:
                    return
                column = context.moments_of(plan)
                gain = bound - (plan.cost + float(prices @ column))
                gains = max(gains, gain)
                self._meet(plan)
                costs.append(plan.cost)
                held.append(column)
                # What the steadied prices lead to most often is better for the mix: else the mix's own are asked.
                if gain > _ENOUGH * self.unlimited.cost:
                    break
            if gains <= _ENOUGH * self.unlimited.cost:
                return

    def _meet(self, plan: CandidatePlan) -> None:
        if not any(plan.estimate is known.estimate for known in self.met):
            self.met.append(plan)

    def _mix(self) -> None:
        """Meet plans in which some layers are as in the fastest plan that fits, the others as in faster ones."""
        fitting = [plan for plan in self.met if self._fits(plan)]
        if not fitting:
            return
        lean = min(fitting, key=lambda plan: plan.step_seconds)
        faster = [plan for plan in self.met if not self._fits(plan) and plan.step_seconds < lean.step_seconds]
        if not faster:
            return
        fast = min(faster, key=lambda plan: plan.memory.peak)
        mix = LayerMix(self.context, lean, fast)
        # More layers as in the lean plan hold less: bisection finds the fewest that fit.
        low, high = 0, len(mix.layers)
        while high - low > 1 and len(mix.layers) >= _MIN_LAYERS and not self.context.is_past_deadline:
            count = (low + high) // 2
            plan = mix.plan(count)
            self._meet(plan)
            low, high = (low, count) if self._fits(plan) else (count, high)


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
            for name in plan.estimate.context.graph.recomputed
            if is_lean(name) == wanted
        ]
        planner = self.context.planner_with(reruns)
        account = planner.account(self.context.settle(decisions, planner))
        cost = account.total_seconds
        return self.context.evaluate_reruns(reruns, decisions, cost, 0.0, f"{self.lean.method}, layers mixed")
