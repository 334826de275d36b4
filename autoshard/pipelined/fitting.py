"""Stages that do not fit: what planning them again is told, so that they may."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.pipeline.costs import StageCosts, rest_bytes
from autoshard.pipeline.schedules import placement
from autoshard.pipelined.costs import PlannedStage
from autoshard.pipelined.stage_plans import Room


@dataclass(frozen=True, slots=True)
class Fitted:
    """Planned stages, and the memory that there is for them.

    Attributes:
        planned: the stages.
        costs: of these.
        flights: for every stage, how many microbatches are under way in it.
        microbatches: of one step.
        memories: bytes of a device of every pipeline rank.
    """

    planned: Sequence[PlannedStage]
    costs: Sequence[StageCosts]
    flights: Sequence[int]
    microbatches: int
    memories: Sequence[float]

    @property
    def limits(self) -> dict[int, int]:
        """For every stage of a rank that has too little memory, the limit of its step with one microbatch.

        Stages of a rank share its memory as they need it. Of that goes what further microbatches under way keep, what
        is received for all of them, and what else a pipeline's step holds beside that of the stage alone.
        """
        at = placement(len(self.memories), len(self.costs) // len(self.memories))
        received = rest_bytes(at, self.microbatches, [replace(cost, rest_bytes=0) for cost in self.costs])
        needs = [_need(cost, count) for cost, count in zip(self.costs, self.flights, strict=True)]
        limits = {}
        for stage, rank in enumerate(at):
            need = sum(one for one, where in zip(needs, at, strict=True) if where == rank)
            room = self.memories[rank] - received[rank]
            if need > room:
                more = needs[stage] - self.planned[stage].plan.memory.peak
                limits[stage] = math.floor(needs[stage] / need * room) - more
        return limits


def _need(cost: StageCosts, flights: int) -> int:
    """Bytes of a stage with some microbatches under way."""
    return cost.rest_bytes + max(flights * cost.saved_bytes + cost.working_bytes, cost.application_bytes)


Rung = Callable[[Fitted, Sequence[Room]], Sequence[Room]]
"""From what was planned in some rooms to the rooms to try next."""


def rungs(recompute: str) -> list[Rung]:
    """Ways to make stages leaner, to be tried in turn where nothing fits.

    A limit; all layers run again; gradients that are reduced with every microbatch where that makes them smaller, so
    that none is kept whole; and a limit with all that.

    Args:
        recompute: what the user allows to be run again, as `autoshard.plan` takes it.
    """

    def limited(fitted: Fitted, rooms: Sequence[Room]) -> Sequence[Room]:
        limits = fitted.limits
        return [
            replace(room, limit=limits[stage], recompute=_allowed(room, recompute))
            if limits.get(stage, 0) > 0
            else room
            for stage, room in enumerate(rooms)
        ]

    def recomputed(fitted: Fitted, rooms: Sequence[Room]) -> Sequence[Room]:
        limits = fitted.limits
        return [
            replace(room, limit=None, recompute="full") if stage in limits else room for stage, room in enumerate(rooms)
        ]

    def reduced(fitted: Fitted, rooms: Sequence[Room]) -> Sequence[Room]:
        limits = fitted.limits if fitted.microbatches > 1 else {}
        return [
            replace(room, limit=None, reduced="microbatch") if stage in limits else room
            for stage, room in enumerate(rooms)
        ]

    return [limited, recomputed, reduced, limited] if recompute == "auto" else [limited, reduced, limited]


def _allowed(room: Room, recompute: str) -> str:
    """What a stage with a limit may run again: all of its layers where that was asked for before."""
    return "full" if room.recompute == "full" else recompute
