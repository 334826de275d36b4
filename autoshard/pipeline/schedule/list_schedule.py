"""Schedules of our own: what is ready is run by priority, within the memory of every rank (list scheduling)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from autoshard.pipeline.schedule.actions import Action, ActionKind, Schedule
from autoshard.pipeline.schedule.costs import StageCosts, rest_bytes
from autoshard.pipeline.schedule.schedule_bounds import least_bytes

NAME = "custom"
"""What these schedules are called."""

_F, _I, _W = ActionKind.FORWARD, ActionKind.INPUT_BACKWARD, ActionKind.WEIGHT_BACKWARD

_PRIORITIES = (
    ((_I, -1), (_F, -1), (_W, 1)),  # what frees memory, then the forward that is furthest on
    ((_I, -1), (_F, 1), (_W, 1)),  # what frees memory, then the forward that feeds most ranks
    ((_F, 1), (_I, 1), (_W, 1)),  # what has the longest way to the end of the step
)
"""Ways to choose among what is ready: the kinds in turn, each with 1 for its first stage first and -1 for its last."""


def list_schedules(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, memory: Sequence[int]
) -> Iterator[Schedule]:
    """Orders in which every rank, whenever it is free, runs what matters most of what is ready.

    Backward runs in halves: that for weights waits for a rank with nothing else to do. Several priorities are tried,
    with several limits on how many microbatches a rank may have under way; the orders come with the quickest first, by
    an estimate that knows links without queues.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: of one step.
        memory: bytes of every rank.

    Yields:
        Schedules that stay within the memory; none where not even one microbatch at a time does.
    """
    ranks = max(placement) + 1
    most = _most_in_flight(costs, placement, microbatches, memory)
    if min(most) < 1:
        return
    limits = {  # as 1F1B; enough for the way of a microbatch there and back; none
        tuple(min(most[rank], limit(rank)) for rank in range(ranks))
        for limit in (lambda rank: ranks - rank, lambda rank: 2 * (ranks - rank) - 1, lambda rank: microbatches)
    }
    found = [
        _ListScheduler(costs, placement, microbatches, limit, priority).run()
        for limit, priority in itertools.product(sorted(limits), _PRIORITIES)
    ]
    seen: set[tuple[tuple[Action, ...], ...]] = set()
    for _, orders in sorted(found, key=lambda one: one[0]):
        if orders not in seen:
            seen.add(orders)
            yield Schedule(NAME, microbatches, orders)


def bytes_for_one_microbatch(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int
) -> tuple[int, ...]:
    """Bytes of every rank with which there is an order: one microbatch at a time is under way there.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: of one step.
    """
    rest, each = _memory_needs(costs, placement, microbatches)
    least = least_bytes(costs, placement, microbatches)  # the optimizer's update may need more
    return tuple(max(held + one, enough) for held, one, enough in zip(rest, each, least, strict=True))


def _memory_needs(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int
) -> tuple[list[int], list[int]]:
    """For every rank the bytes that it needs whatever is under way, and those of one microbatch."""
    rest = list(rest_bytes(placement, microbatches, costs))
    each, working = [0] * len(rest), [0] * len(rest)
    for stage, rank in enumerate(placement):
        each[rank] += max(costs[stage].saved_bytes, costs[stage].weight_saved_bytes)
        working[rank] = max(working[rank], costs[stage].working_bytes)
    return [held + work for held, work in zip(rest, working, strict=True)], each


def _most_in_flight(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, memory: Sequence[int]
) -> list[int]:
    """How many microbatches every rank can have under way, from its first forward of each to its last backward."""
    rest, each = _memory_needs(costs, placement, microbatches)
    most = []
    for room, held, one in zip(memory, rest, each, strict=True):
        possible = min(microbatches, (room - held) // one) if one else microbatches
        most.append(possible if room >= held else 0)
    return most


class _StageProgress:
    """How far a stage is.

    Microbatches come in their order, so that a list says since when each can be run forward, and each backward; the
    next one of each kind is counted.
    """

    __slots__ = ("arrived", "next")

    def __init__(self) -> None:
        self.next = {_F: 0, _I: 0, _W: 0}
        self.arrived: dict[ActionKind, list[float]] = {_F: [], _I: [], _W: []}

    def ready(self, kind: ActionKind, now: float) -> bool:
        """Whether the next microbatch of a kind is there."""
        arrived, index = self.arrived[kind], self.next[kind]
        return index < len(arrived) and arrived[index] <= now


class _ListScheduler:
    """One run: events are moments at which a rank may have something to run.

    A microbatch counts as under way on a rank from its first forward there to its last backward. Microbatches start in
    their order, so that the oldest one is under way wherever it has come to, and no rank waits for memory for ever.
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
        self.priorities = [[(kind, stage) for kind, step in priority for stage in mine[::step]] for mine in held]
        self.free = [0.0] * len(limit)
        self.orders: list[list[Action]] = [[] for _ in limit]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(limit))]

    def run(self) -> tuple[float, tuple[tuple[Action, ...], ...]]:
        """The estimated seconds of all computations, and the orders."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now:
                for kind, stage in self.priorities[rank]:
                    if self.stages[stage].ready(kind, now) and (kind != _F or self._has_room(rank, stage)):
                        self._run_action(now, rank, stage, kind)
                        break
        assert sum(map(len, self.orders)) == 3 * len(self.stages) * self.microbatches, "ranks wait for one another"
        return max(self.free), tuple(map(tuple, self.orders))

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether a rank may run the next forward of a stage: only its first stage brings it microbatches."""
        mine = self.stages_of[rank]
        if stage != mine[0]:
            return True
        ended = min(self.stages[one].next[_W] for one in mine)
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
