"""Which layers the backward half runs again: none, all, or as many as the memory limit asks for."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

from autoshard.capture.recomputation import Recomputable, recomputable, recompute_layers
from autoshard.errors import BudgetError
from autoshard.patterns.graph_rules import value_of
from autoshard.planner.budget_error import ShortfallError
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.planner import Planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.layout import local_shape

_MAX_BISECTIONS = 3  # numbers of layers that are tried between none and all
_PROVED_GAP = 0.01  # a plan that can be no more than this from the best, recomputation or not, is taken


def plan_with_recompute(
    planner: Planner, unlimited: CandidatePlan | None = None, *, explained: bool = True
) -> ShardingPlan:
    """The plan of a graph, in which layers are recomputed as the planner's settings say.

    Where a memory limit leaves a choice, the fastest of these is taken: the plan that keeps the limit without
    recomputation; the one that recomputes the fewest layers, those first that free most memory per second, such that
    the limit is kept by that alone; and, where all layers are not enough, the one that recomputes all and keeps the
    limit by what else there is.

    Args:
        planner: of the graph.
        unlimited: what was found without the memory limit and without recomputation, if that was looked for before.
        explained: whether, where nothing fits, it is worth the time to find out what would help.

    Raises:
        BudgetError: no plan that was found fits the memory limit; the message names the smallest that does, and what
            would make it smaller.
    """
    try:
        return _plan_with_recompute(planner, unlimited)
    except ShortfallError as shortfall:
        if not explained:
            raise
        raise shortfall.with_remedies() from None


def _plan_with_recompute(planner: Planner, unlimited: CandidatePlan | None) -> ShardingPlan:
    wanted, limit = planner.settings.recompute, planner.settings.memory_limit
    if wanted == "none" or (wanted == "auto" and limit is None):
        return planner.plan(unlimited)
    layers = recomputable(planner.graph)
    if not layers:
        return planner.plan(unlimited)
    if wanted == "full" or limit is None:
        return recomputing_planner(planner, [layer.name for layer in layers]).plan()
    return _RecomputeSearch(planner, layers, limit).run(unlimited)


def recomputing_planner(planner: Planner, layers: Collection[str]) -> Planner:
    """A planner of the same step in which these layers are run again; `layers` are their names."""
    start = time.perf_counter()
    graph = recompute_layers(planner.graph, layers)
    other = Planner(graph, planner.mesh, planner.cluster, planner.constraints, planner.settings, like=planner)
    planner.timings["patterns"] = planner.timings.get("patterns", 0.0) + time.perf_counter() - start
    other.timings = planner.timings
    return other


class _RecomputeSearch:
    """Chooses what to recompute under a memory limit."""

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
            self._recompute_unless_stopped(unlimited)
        if not self.plans:
            raise min(self.errors, key=lambda error: math.inf if error.peak is None else error.peak)
        return min(self.plans, key=lambda plan: plan.step_seconds)

    def _try(self, planner: Planner, found: CandidatePlan | None = None) -> None:
        try:
            self.plans.append(planner.plan(found))
        except BudgetError as error:
            self.errors.append(error)

    def _recompute_unless_stopped(self, unlimited: CandidatePlan) -> None:
        try:
            self._recompute(unlimited)
        except KeyboardInterrupt:
            if not self.plans:
                raise
            self.planner.warn_of_interruption(self.plans[0].cost)

    def _recompute(self, unlimited: CandidatePlan) -> None:
        """Adds the plan that recomputes as few layers as keep the limit, or else all of them."""
        ranked = self._rank_layers(unlimited)
        everything = recomputing_planner(self.planner, [layer.name for layer in ranked])
        best = everything.solve(everything.constraints)
        if best.memory.peak > self.limit:
            if not self.plans or everything.fastest(best).step_seconds < self.plans[0].step_seconds:
                self._try(everything, best)
            return
        planner, high, low, above = everything, len(ranked), 0, unlimited.memory.peak
        for _ in range(_MAX_BISECTIONS):
            if high - low <= 1:
                break
            # Layers free about as much each: where the limit lies between two peaks, so does their number.
            share = (above - self.limit) / max(above - best.memory.peak, 1)
            count = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
            fewer = recomputing_planner(self.planner, [layer.name for layer in ranked[:count]])
            found = fewer.solve(fewer.constraints)
            if found.memory.peak <= self.limit:
                planner, best, high = fewer, found, count
            else:
                low, above = count, found.memory.peak
        self._try(planner, best)

    def _rank_layers(self, unlimited: CandidatePlan) -> list[Recomputable]:
        """The layers, first those that free most bytes per second of running them again; the earlier of equal ones."""
        account = self.planner.account(unlimited.decisions)

        def worth(layer: Recomputable) -> float:
            freed = 0
            for node in layer.freed:
                value = value_of(node)
                shape = local_shape(value.meta.shape, account.flow.produced_spec(value), self.planner.mesh)
                freed += math.prod(shape) * value.meta.dtype.itemsize
            seconds = sum(account.seconds(node) for node in layer.rerun if node in account.position)
            return freed / max(seconds, 1e-12)

        return sorted(self.layers, key=lambda layer: -round(worth(layer), -3))
