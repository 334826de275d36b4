"""List scheduling: every free rank runs the ready action of the highest priority, within its memory."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from autoshard.pipeline.schedule.actions import Action, ActionKind, Schedule
from autoshard.pipeline.schedule.costs import StageCosts, least_bytes, rest_bytes

NAME = "custom"
"""Name of these schedules."""

_F, _I, _W = ActionKind.FORWARD, ActionKind.INPUT_BACKWARD, ActionKind.WEIGHT_BACKWARD

# Rules for the choice among ready actions: kinds in order of preference, each with 1 to try the rank's first stage
# first, and -1 for its last.
_PRIORITIES = (
    ((_I, -1), (_F, -1), (_W, 1)),  # a backward, which frees memory, then the forward of the latest stage
    ((_I, -1), (_F, 1), (_W, 1)),  # a backward, which frees memory, then the forward that most ranks wait for
    ((_F, 1), (_I, 1), (_W, 1)),  # the action that is furthest from the end of the step
)


def list_schedules(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, memory: Sequence[int]
) -> Iterator[Schedule]:
    """Build schedules in which every free rank runs the most important of its ready actions.

    Backward runs in halves: the half for weights waits for a rank with nothing else to do. Several priorities are
    combined with several limits on the microbatches that a rank may have in flight. The schedules come in the order of
    their estimated seconds; the estimate ignores queues at links.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: of one step.
        memory: bytes of every rank.

    Yields:
        Schedules that stay within the memory; none where not even a single microbatch fits.
    """
    ranks = max(placement) + 1
    most = _max_in_flight(costs, placement, microbatches, memory)
    if min(most) < 1:
        return
    limits = {
        tuple(min(most[rank], limit(rank)) for rank in range(ranks))
        for limit in (
            lambda rank: ranks - rank,  # as 1F1B
            lambda rank: 2 * (ranks - rank) - 1,  # covers the way of a microbatch to the last stage and back
            lambda rank: microbatches,  # no limit
        )
    }
    results = [
        _ListScheduler(costs, placement, microbatches, limit, priority).run()
        for limit, priority in itertools.product(sorted(limits), _PRIORITIES)
    ]
    seen: set[tuple[tuple[Action, ...], ...]] = set()
    for _, orders in sorted(results, key=lambda result: result[0]):
        if orders not in seen:
            seen.add(orders)
            yield Schedule(NAME, microbatches, orders)


def bytes_for_one_microbatch(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int
) -> tuple[int, ...]:
    """Return the bytes of every rank that suffice for a schedule with one microbatch in flight.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: of one step.
    """
    rest, each = _memory_needs(costs, placement, microbatches)
    least = least_bytes(costs, placement, microbatches)  # the optimizer's update may need more
    return tuple(max(held + saved, bound) for held, saved, bound in zip(rest, each, least, strict=True))


def _memory_needs(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int
) -> tuple[list[int], list[int]]:
    """Return the bytes of every rank without microbatches in flight, and the bytes per microbatch in flight."""
    rest = list(rest_bytes(placement, microbatches, costs))
    each, working = [0] * len(rest), [0] * len(rest)
    for stage, rank in enumerate(placement):
        each[rank] += max(costs[stage].saved_bytes, costs[stage].weight_saved_bytes)
        working[rank] = max(working[rank], costs[stage].working_bytes)
    return [held + work for held, work in zip(rest, working, strict=True)], each


def _max_in_flight(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, memory: Sequence[int]
) -> list[int]:
    """Return the most microbatches in flight of every rank, from their first forward to their last backward."""
    rest, each = _memory_needs(costs, placement, microbatches)
    most = []
    for limit, held, saved in zip(memory, rest, each, strict=True):
        possible = min(microbatches, (limit - held) // saved) if saved else microbatches
        most.append(possible if limit >= held else 0)
    return most


class _StageProgress:
    """Progress of one stage: the next microbatch of each kind, and the moments from which microbatches can run.

    Microbatches come in their order, so a list of moments is enough.
    """

    __slots__ = ("arrived", "next")

    def __init__(self) -> None:
        self.next = {_F: 0, _I: 0, _W: 0}
        self.arrived: dict[ActionKind, list[float]] = {_F: [], _I: [], _W: []}

    def ready(self, kind: ActionKind, now: float) -> bool:
        """Return True if the next microbatch of a kind has arrived."""
        arrived, index = self.arrived[kind], self.next[kind]
        return index < len(arrived) and arrived[index] <= now


class _ListScheduler:
    """One run over events: moments at which a rank may have something to run.

    A microbatch is in flight on a rank from its first forward there to its last backward.
    """

    def __init__(
        self,
        costs: Sequence[StageCosts],
        placement: Sequence[int],
        microbatches: int,
        limit: Sequence[int],
        priority: tuple[tuple[ActionKind, int], ...],
    ) -> None:
        self.costs = costs
        self.placement = placement
        self.limit = limit
        self.microbatches = microbatches
        self.stages = [_StageProgress() for _ in placement]
        self.stages[0].arrived[_F] = [0.0] * microbatches
        self.stages_of = held = [
            [stage for stage, at in enumerate(placement) if at == rank] for rank in range(len(limit))
        ]
        self.priorities = [[(kind, stage) for kind, step in priority for stage in stages[::step]] for stages in held]
        self.free = [0.0] * len(limit)
        self.orders: list[list[Action]] = [[] for _ in limit]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(limit))]

    def run(self) -> tuple[float, tuple[tuple[Action, ...], ...]]:
        """Return the estimated seconds of all computations, and the orders."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now:
                for kind, stage in self.priorities[rank]:
                    if self.stages[stage].ready(kind, now) and (kind != _F or self._has_room(rank, stage)):
                        self._run_action(now, rank, stage, kind)
                        break
        # Microbatches start in their order. The oldest is in flight on every rank that it has reached, so memory limits
        # never stop it, and no rank waits for ever.
        assert sum(map(len, self.orders)) == 3 * len(self.stages) * self.microbatches, "ranks wait for one another"
        return max(self.free), tuple(map(tuple, self.orders))

    def _has_room(self, rank: int, stage: int) -> bool:
        """Return True if a rank may run the next forward of a stage without exceeding its limit."""
        stages = self.stages_of[rank]
        if stage != stages[0]:
            return True  # the microbatch is in flight on this rank already
        ended = min(self.stages[index].next[_W] for index in stages)
        return self.stages[stage].next[_F] - ended < self.limit[rank]

    def _run_action(self, now: float, rank: int, stage: int, kind: ActionKind) -> None:
        state, cost = self.stages[stage], self.costs[stage]
        self.orders[rank].append(Action(stage, kind, state.next[kind]))
        state.next[kind] += 1
        end = self.free[rank] = now + cost.seconds(kind)
        heapq.heappush(self.events, (end, rank))
        if kind == _F and stage < len(self.stages) - 1:
            self._add_arrival(stage + 1, _F, rank, end, cost.forward_send_seconds)
        elif kind == _F:
            state.arrived[_I].append(end)
        elif kind == _I:
            state.arrived[_W].append(end)
            if stage > 0:
                self._add_arrival(stage - 1, _I, rank, end, cost.backward_send_seconds)

    def _add_arrival(self, stage: int, kind: ActionKind, sender: int, sent: float, seconds: float) -> None:
        to = self.placement[stage]
        moment = sent if to == sender else sent + seconds
        self.stages[stage].arrived[kind].append(moment)
        heapq.heappush(self.events, (moment, to))
