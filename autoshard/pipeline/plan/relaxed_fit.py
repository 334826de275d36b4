"""Budgets with less memory for stages that do not fit: limits, recomputation, and earlier reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.pipeline.plan.planned_stage import PlannedStage
from autoshard.pipeline.plan.stage_plans import StageBudget
from autoshard.pipeline.schedule.costs import StageCosts, rest_bytes
from autoshard.pipeline.schedule.schedules import placement

_LIMITS = 4
"""The most limits among stages that are alike."""


@dataclass(frozen=True, slots=True)
class RelaxedFit:
    """Planned stages, and the memory that there is for them.

    Attributes:
        planned: the stages.
        costs: of the stages.
        flights: the number of microbatches under way in every stage.
        microbatches: of one step.
        memories: bytes of a device of every pipeline rank.
        halves: between the halves of its backward a microbatch may keep more bytes than before; the part of these
            bytes that limits leave room for.
    """

    planned: Sequence[PlannedStage]
    costs: Sequence[StageCosts]
    flights: Sequence[int]
    microbatches: int
    memories: Sequence[float]
    halves: float = 0.0

    def limit_budgets(self, budgets: Sequence[StageBudget]) -> list[StageBudget]:
        """Return the budgets, with limits for the stages of ranks that have too little memory."""
        ranks = placement(len(self.memories), len(self.costs) // len(self.memories))
        received = rest_bytes(ranks, self.microbatches, [replace(cost, rest_bytes=0) for cost in self.costs])
        needs = [_needed_bytes(cost, count, self.halves) for cost, count in zip(self.costs, self.flights, strict=True)]
        limited = list(budgets)
        for stage, rank in enumerate(ranks):
            rank_need = sum(need for need, holder in zip(needs, ranks, strict=True) if holder == rank)
            room = self.memories[rank] - received[rank]
            if rank_need > room:
                # The stages of a rank share its memory in proportion to their needs. The limit is one of the bytes
                # that the stage's plan counts, so it is less by what else a pipeline's step holds.
                further = (self.flights[stage] - budgets[stage].under_way) * self.costs[stage].saved_bytes
                beside = needs[stage] - self.planned[stage].plan.memory.peak - further
                limit = math.floor(needs[stage] / rank_need * room) - beside
                limited[stage] = replace(budgets[stage], limit=limit, under_way=self.flights[stage])
        return limited


def _needed_bytes(cost: StageCosts, flights: int, halves: float) -> int:
    """Return the bytes of a stage with some microbatches under way."""
    kept = cost.saved_bytes + math.ceil(halves * max(cost.weight_saved_bytes - cost.saved_bytes, 0))
    return cost.rest_bytes + max(flights * kept + cost.working_bytes, cost.application_bytes)


Relaxation = Callable[[RelaxedFit, Sequence[StageBudget]], Sequence[StageBudget]]
"""Returns the budgets to try after those that some stages were planned in."""


def relaxations(recompute: str) -> list[Relaxation]:
    """Return ways to make stages leaner, in the order in which to try them where nothing fits.

    * A limit with room for twice the microbatches under way, which schedules without bubbles have, or for as many as
      possible. Nothing is recomputed.
    * Lower limits, with room for half or all of what these microbatches keep between the halves of backward.
    * A limit for the microbatches under way in a 1F1B schedule.
    * All layers recomputed.
    * Gradients reduced with every microbatch where that makes them smaller, so that none is kept whole.
    * A limit together with these.

    Args:
        recompute: what the user allows to recompute, as `autoshard.plan` takes it.

    Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", 2.2: with about twice the memory there is no bubble.
    """

    def limit_with_headroom(halves: float) -> Relaxation:
        def relax(fit: RelaxedFit, budgets: Sequence[StageBudget]) -> Sequence[StageBudget]:
            twice = [min(2 * count, fit.microbatches) for count in fit.flights]
            limited = replace(fit, flights=twice, halves=halves).limit_budgets(budgets)
            return _change_limited(budgets, limited, lambda budget: replace(budget, or_leanest=True), possible=True)

        return relax

    def limit(fit: RelaxedFit, budgets: Sequence[StageBudget]) -> Sequence[StageBudget]:
        def allow_recompute(budget: StageBudget) -> StageBudget:
            # A stage whose layers are all recomputed already stays so.
            return budget if budget.recompute == "full" else replace(budget, recompute=recompute)

        return _change_limited(budgets, fit.limit_budgets(budgets), allow_recompute, possible=True)

    def recompute_layers(fit: RelaxedFit, budgets: Sequence[StageBudget]) -> Sequence[StageBudget]:
        limited = fit.limit_budgets(budgets)
        return _change_limited(budgets, limited, lambda budget: _without_limit(budget, recompute="full"))

    def reduce_per_microbatch(fit: RelaxedFit, budgets: Sequence[StageBudget]) -> Sequence[StageBudget]:
        if fit.microbatches == 1:
            return budgets
        limited = fit.limit_budgets(budgets)
        return _change_limited(budgets, limited, lambda budget: _without_limit(budget, reduced="microbatch"))

    first = [limit_with_headroom(0.0), limit_with_headroom(0.5), limit_with_headroom(1.0), limit]
    return [*first, *([recompute_layers] if recompute == "auto" else []), reduce_per_microbatch, limit]


def _change_limited(
    budgets: Sequence[StageBudget],
    limited: Sequence[StageBudget],
    change: Callable[[StageBudget], StageBudget],
    *,
    possible: bool = False,
) -> list[StageBudget]:
    """Return the budgets, with a change to the limited ones of stages that have to be limited.

    Args:
        budgets: of all stages.
        limited: the same with limits.
        change: of a limited budget.
        possible: True to leave stages alone whose limit is not above 0.
    """

    def is_changed(budget: StageBudget, less: StageBudget) -> bool:
        return less != budget and less.limit is not None and (less.limit > 0 or not possible)

    return [change(less) if is_changed(budget, less) else budget for budget, less in zip(budgets, limited, strict=True)]


def _without_limit(budget: StageBudget, **changes: Any) -> StageBudget:
    return replace(budget, limit=None, under_way=1, **changes)


def merge_limits(budgets: Sequence[StageBudget], texts: Sequence[Hashable]) -> list[StageBudget]:
    """Return budgets in which stages that are alike have few different limits.

    Args:
        budgets: of all stages.
        texts: one per stage, equal for stages that are alike.
    """
    merged = list(budgets)
    groups: dict[Hashable, list[int]] = {}
    for stage, (budget, text) in enumerate(zip(budgets, texts, strict=True)):
        if budget.limit is not None:
            groups.setdefault((text, _without_limit(budget)), []).append(stage)
    # Stages with similar limits all get the least of these. Every limit takes another plan, and a pipeline is as fast
    # as its slowest stage, which most often has the least memory: more of it in other stages gains little.
    for stages in groups.values():
        stages.sort(key=lambda stage: (budgets[stage].limit or 0) / budgets[stage].under_way)
        size = math.ceil(len(stages) / _LIMITS)
        for near in (stages[first : first + size] for first in range(0, len(stages), size)):
            limit = min(budgets[stage].limit or 0 for stage in near)
            under_way = max(budgets[stage].under_way for stage in near)
            for stage in near:
                merged[stage] = replace(budgets[stage], limit=limit, under_way=under_way)
    return merged
