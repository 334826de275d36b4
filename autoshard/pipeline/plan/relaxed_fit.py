"""Stages that do not fit: what planning them again is told, so that they may."""

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
"""Different limits of stages that are alike, at most."""


@dataclass(frozen=True, slots=True)
class RelaxedFit:
    """Planned stages, and the memory that there is for them.

    Attributes:
        planned: the stages.
        costs: of these.
        flights: for every stage, how many microbatches are under way in it.
        microbatches: of one step.
        memories: bytes of a device of every pipeline rank.
        halves: the part of what a microbatch may keep more between the halves of backward that there is to be room for.
    """

    planned: Sequence[PlannedStage]
    costs: Sequence[StageCosts]
    flights: Sequence[int]
    microbatches: int
    memories: Sequence[float]
    halves: float = 0.0

    def limit_budgets(self, rooms: Sequence[StageBudget]) -> list[StageBudget]:
        """The rooms, with limits for the stages of ranks that have too little memory.

        Stages of a rank share its memory as they need it. Of that goes what is received for all microbatches, and what
        else a pipeline's step holds beside what the stage's plan counts.
        """
        at = placement(len(self.memories), len(self.costs) // len(self.memories))
        received = rest_bytes(at, self.microbatches, [replace(cost, rest_bytes=0) for cost in self.costs])
        needs = [_needed_bytes(cost, count, self.halves) for cost, count in zip(self.costs, self.flights, strict=True)]
        given = list(rooms)
        for stage, rank in enumerate(at):
            need = sum(one for one, where in zip(needs, at, strict=True) if where == rank)
            room = self.memories[rank] - received[rank]
            if need > room:
                further = (self.flights[stage] - rooms[stage].under_way) * self.costs[stage].saved_bytes
                more = needs[stage] - self.planned[stage].plan.memory.peak - further
                limit = math.floor(needs[stage] / need * room) - more
                given[stage] = replace(rooms[stage], limit=limit, under_way=self.flights[stage])
        return given


def _needed_bytes(cost: StageCosts, flights: int, halves: float) -> int:
    """Bytes of a stage with some microbatches under way."""
    kept = cost.saved_bytes + math.ceil(halves * max(cost.weight_saved_bytes - cost.saved_bytes, 0))
    return cost.rest_bytes + max(flights * kept + cost.working_bytes, cost.application_bytes)


Relaxation = Callable[[RelaxedFit, Sequence[StageBudget]], Sequence[StageBudget]]
"""From what was planned in some rooms to the rooms to try next."""


def relaxations(recompute: str) -> list[Relaxation]:
    """Ways to make stages leaner, to be tried in turn where nothing fits.

    A limit with room for twice the microbatches under way, which schedules without bubbles have, nothing run again, or
    for as many more as can be; lower limits, with part or all of what these may keep between the halves of backward;
    a limit; all layers run again; gradients that are reduced with every microbatch where that makes them smaller, so
    that none is kept whole; and a limit with all that.

    Args:
        recompute: what the user allows to be run again, as `autoshard.plan` takes it.

    Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", 2.2: with about twice the memory there is no bubble.
    """

    def limit_with_headroom(halves: float) -> Relaxation:
        def relax(fitted: RelaxedFit, rooms: Sequence[StageBudget]) -> Sequence[StageBudget]:
            twice = [min(2 * count, fitted.microbatches) for count in fitted.flights]
            lean = replace(fitted, flights=twice, halves=halves).limit_budgets(rooms)
            return _change_limited(rooms, lean, lambda room: replace(room, or_leanest=True), possible=True)

        return relax

    def limit(fitted: RelaxedFit, rooms: Sequence[StageBudget]) -> Sequence[StageBudget]:
        lean = fitted.limit_budgets(rooms)
        return _change_limited(
            rooms, lean, lambda room: replace(room, recompute=_recompute_mode(room, recompute)), possible=True
        )

    def recompute_layers(fitted: RelaxedFit, rooms: Sequence[StageBudget]) -> Sequence[StageBudget]:
        return _change_limited(rooms, fitted.limit_budgets(rooms), lambda room: _without_limit(room, recompute="full"))

    def reduce_per_microbatch(fitted: RelaxedFit, rooms: Sequence[StageBudget]) -> Sequence[StageBudget]:
        if fitted.microbatches == 1:
            return rooms
        return _change_limited(
            rooms, fitted.limit_budgets(rooms), lambda room: _without_limit(room, reduced="microbatch")
        )

    first = [limit_with_headroom(0.0), limit_with_headroom(0.5), limit_with_headroom(1.0), limit]
    return (
        [*first, recompute_layers, reduce_per_microbatch, limit]
        if recompute == "auto"
        else [*first, reduce_per_microbatch, limit]
    )


def _change_limited(
    rooms: Sequence[StageBudget],
    limited: Sequence[StageBudget],
    change: Callable[[StageBudget], StageBudget],
    *,
    possible: bool = False,
) -> list[StageBudget]:
    """The rooms, with a change to those of stages that have to be limited; if told, where any limit is left at all."""

    def needs_change(room: StageBudget, less: StageBudget) -> bool:
        return less != room and less.limit is not None and (less.limit > 0 or not possible)

    return [change(less) if needs_change(room, less) else room for room, less in zip(rooms, limited, strict=True)]


def _without_limit(room: StageBudget, **changes: Any) -> StageBudget:
    return replace(room, limit=None, under_way=1, **changes)


def merge_limits(rooms: Sequence[StageBudget], texts: Sequence[Hashable]) -> list[StageBudget]:
    """Rooms in which stages that are alike have no more than a few limits: those that are near have the least of them.

    A pipeline is as fast as its slowest stage, which most often has the least room: what others could do with more of
    it is of little use, and every other limit takes another plan.

    Args:
        rooms: of all stages.
        texts: equal ones of stages that are alike.
    """
    given = list(rooms)
    groups: dict[Hashable, list[int]] = {}
    for stage, (room, text) in enumerate(zip(rooms, texts, strict=True)):
        if room.limit is not None:
            groups.setdefault((text, _without_limit(room)), []).append(stage)
    for stages in groups.values():
        stages.sort(key=lambda stage: (rooms[stage].limit or 0) / rooms[stage].under_way)
        size = math.ceil(len(stages) / _LIMITS)
        for near in (stages[first : first + size] for first in range(0, len(stages), size)):
            limit = min(rooms[stage].limit or 0 for stage in near)
            under_way = max(rooms[stage].under_way for stage in near)
            for stage in near:
                given[stage] = replace(rooms[stage], limit=limit, under_way=under_way)
    return given


def _recompute_mode(room: StageBudget, recompute: str) -> str:
    """What a stage with a limit may run again: all of its layers where that was asked for before."""
    return "full" if room.recompute == "full" else recompute
