"""The choice of layers that the backward half runs again: no layers, all, or as many as the memory limit asks for."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

from autoshard.capture.recomputation import Recomputable, recomputable, recompute_layers
from autoshard.errors import BudgetError
from autoshard.patterns.graph_rules import value_of
from autoshard.planner.budget_search import ShortfallError
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planner import Planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.layout import local_shape

_MAX_BISECTIONS = 3  # numbers of layers that are tried between none and all
_PROVED_GAP = 0.01  # a plan within this gap of its bound is taken: recomputation can hardly be faster


def plan_with_recompute(
    planner: Planner, unlimited: CandidatePlan | None = None, *, explained: bool = True
) -> ShardingPlan:
    """Return the plan of a graph, with layers recomputed as the planner's settings say.

    With `recompute="auto"` and a memory limit, the fastest of these is taken: the plan that keeps the limit without
    recomputation; the one that recomputes the fewest layers, first those that free most memory per second, such that
    nothing else is needed to keep the limit; and, if all layers are not enough, the one that recomputes all and keeps
    the limit by other means.

    Args:
        planner: the planner of the graph.
        unlimited: the plan without the memory limit and without recomputation, if it is known.
        explained: True to find out what would help, if no plan fits; that takes time.

    Raises:
        BudgetError: no plan that was found fits the memory limit; the message names the smallest peak, and what would
            make it smaller.
    """
    try:
        return _plan_with_recompute(planner, unlimited)
    except ShortfallError as shortfall:
        if not explained:
            raise
        raise shortfall.with_remedies() from None


def _plan_with_recompute(planner: Planner, unlimited: CandidatePlan | None) -> ShardingPlan:
    recompute, limit = planner.settings.recompute, planner.settings.memory_limit
    # Without a limit, recomputation only takes time.
    if recompute == "none" or (recompute == "auto" and limit is None):
        return planner.plan(unlimited)
    layers = recomputable(planner.graph)
    if not layers:
        return planner.plan(unlimited)
    if recompute == "full" or limit is None:
        return recomputing_planner(planner, [layer.name for layer in layers]).plan()
    return _RecomputeSearch(planner, layers, limit).run(unlimited)


def recomputing_planner(planner: Planner, layers: Collection[str]) -> Planner:
    """Return a planner of the same step in which the layers of these names run again."""
    start = time.perf_counter()
    graph = recompute_layers(planner.graph, layers)
    recomputing = Planner(graph, planner.mesh, planner.cluster, planner.constraints, planner.settings, like=planner)
    planner.timings["patterns"] = planner.timings.get("patterns", 0.0) + time.perf_counter() - start
    recomputing.timings = planner.timings
    return recomputing


class _RecomputeSearch:
    """Chooses the layers that run again under a memory limit."""

    def __init__(self, planner: Planner, layers: tuple[Recomputable, ...], limit: int) -> None:
        self.planner = planner
        self.layers = layers
        self.limit = limit
        self.plans: list[ShardingPlan] = []
        self.errors: list[BudgetError] = []

    def run(self, unlimited: CandidatePlan | None) -> ShardingPlan:
        self._try(self.planner, unlimited)
        unlimited = self.planner.unlimited
        assert unlimited is not None
        if not self.plans or (unlimited.memory.peak > self.limit and self.plans[0].gap > _PROVED_GAP):
            try:
                self._recompute(unlimited)
            except KeyboardInterrupt:
                if not self.plans:
                    raise
                self.planner.warn_of_interruption(self.plans[0].cost)
        if not self.plans:
            raise min(self.errors, key=lambda error: math.inf if error.peak is None else error.peak)
        return min(self.plans, key=lambda plan: plan.step_seconds)

    def _try(self, planner: Planner, unlimited: CandidatePlan | None) -> None:
        try:
            self.plans.append(planner.plan(unlimited))
        except BudgetError as error:
            self.errors.append(error)

    def _recompute(self, unlimited: CandidatePlan) -> None:
        """Add the plan that recomputes as few layers as keep the limit, or else all of them."""
        ranked = self._rank_layers(unlimited)
        full = recomputing_planner(self.planner, [layer.name for layer in ranked])
        best = full.solve(full.constraints)
        if best.memory.peak > self.limit:
            if not self.plans or full.fastest(best).step_seconds < self.plans[0].step_seconds:
                self._try(full, best)
            return
        planner, high, low, above = full, len(ranked), 0, unlimited.memory.peak
        for _ in range(_MAX_BISECTIONS):
            if high - low <= 1:
                break
            # Layers free about as much each: the number of layers lies between as the limit does between the peaks.
            share = (above - self.limit) / max(above - best.memory.peak, 1)
            count = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
            fewer = recomputing_planner(self.planner, [layer.name for layer in ranked[:count]])
            plan = fewer.solve(fewer.constraints)
            if plan.memory.peak <= self.limit:
                planner, best, high = fewer, plan, count
            else:
                low, above = count, plan.memory.peak
        self._try(planner, best)

    def _rank_layers(self, unlimited: CandidatePlan) -> list[Recomputable]:
        """Return the layers, those first that free most bytes per second of running them again."""
        account = self.planner.account(unlimited.decisions)
        operators = set(account.rules.operators)

        def freed_per_second(layer: Recomputable) -> float:
            freed = 0
            for node in layer.freed:
                value = value_of(node)
                shape = local_shape(value.meta.shape, account.flow.produced_spec(value), self.planner.mesh)
                freed += math.prod(shape) * value.meta.dtype.itemsize
            seconds = sum(account.seconds(node) for node in layer.rerun if node in operators)
            return freed / max(seconds, 1e-12)

        # Rounding lets equal layers keep their order, the earlier one first.
        return sorted(self.layers, key=lambda layer: -round(freed_per_second(layer), -3))
