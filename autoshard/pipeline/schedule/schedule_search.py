"""The search for the fastest schedule that fits, by simulation, with a verdict on every candidate.

Besides torch's schedules it tries custom ones, which list scheduling builds from the stages' costs.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from autoshard.errors import BudgetError, PipelineError
from autoshard.names import suggestion
from autoshard.options import SCHEDULES as CHOICES
from autoshard.pipeline.schedule.actions import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    ScheduleFamily,
    placement,
    schedule,
)
from autoshard.pipeline.schedule.costs import (
    Simulation,
    StageCosts,
    least_bytes,
    least_seconds,
    rest_bytes,
    simulate,
)
from autoshard.solver.candidate_search import SAME, Candidate, CandidateSearch
from autoshard.units import format_bytes, format_seconds

_F, _I, _W = ActionKind.FORWARD, ActionKind.INPUT_BACKWARD, ActionKind.WEIGHT_BACKWARD

# Rules for choosing among ready actions: kinds in order of preference, each with 1 to prefer the rank's first stage,
# and -1 for its last.
_PRIORITIES = (
    ((_I, -1), (_F, -1), (_W, 1)),  # a backward, which frees memory, then the forward of the latest stage
    ((_I, -1), (_F, 1), (_W, 1)),  # a backward, which frees memory, then the forward that most ranks wait for
    ((_F, 1), (_I, 1), (_W, 1)),  # the action furthest from the end of the step
)


def list_schedules(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, memory: Sequence[float]
) -> Iterator[Schedule]:
    """Build schedules in which every free rank runs its ready action of the highest priority.

    Backward runs in halves: the half for weights runs when a rank has nothing else to do. Several priorities are
    combined with several limits on a rank's microbatches in flight. The schedules are sorted by estimated seconds; the
    estimate ignores queues at links.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: the number per step.
        memory: bytes of every rank.

    Yields:
        Schedules that stay within the memory; none if not even a single microbatch fits.
    """
    ranks = max(placement) + 1
    most = _max_in_flight(costs, placement, microbatches, memory)
    if min(most) < 1:
        return
    limits = {
        tuple(min(most[rank], limit(rank)) for rank in range(ranks))
        for limit in (
            # As 1F1B.
            lambda rank: ranks - rank,
            # Enough for a microbatch to reach the last stage and return.
            lambda rank: 2 * (ranks - rank) - 1,
            # No limit.
            lambda rank: microbatches,
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
            yield Schedule(CUSTOM, microbatches, orders)


def bytes_for_one_microbatch(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int
) -> tuple[int, ...]:
    """Return, for every rank, bytes that suffice for a schedule with one microbatch in flight."""
    rest, each = _memory_needs(costs, placement, microbatches)
    # The optimizer's update may need more than a microbatch does.
    least = least_bytes(costs, placement, microbatches)
    return tuple(max(held + saved, bound) for held, saved, bound in zip(rest, each, least, strict=True))


def _memory_needs(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int
) -> tuple[list[int], list[int]]:
    """Return, for every rank, the bytes without microbatches in flight, and the bytes per microbatch in flight."""
    rest = list(rest_bytes(costs, placement, microbatches))
    each, working = [0] * len(rest), [0] * len(rest)
    for stage, rank in enumerate(placement):
        each[rank] += max(costs[stage].saved_bytes, costs[stage].weight_saved_bytes)
        working[rank] = max(working[rank], costs[stage].working_bytes)
    return [held + work for held, work in zip(rest, working, strict=True)], each


def _max_in_flight(
    costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, memory: Sequence[float]
) -> list[int]:
    """Return every rank's maximum of microbatches in flight, from their first forward to their last backward."""
    rest, each = _memory_needs(costs, placement, microbatches)
    most = []
    for limit, held, saved in zip(memory, rest, each, strict=True):
        possible = min(microbatches, (limit - held) / saved) if saved else microbatches
        most.append(int(possible) if limit >= held else 0)
    return most


class _StageProgress:
    """Progress of one stage: the next microbatch of each kind, and the times from which microbatches can run.

    Microbatches run in order, so a list of times is enough.
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
    """A simulation over events: times at which a rank may have something to run.

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
        # Microbatches start in order. The oldest one is in flight on every rank that it has reached, so memory limits
        # never stop it, and no rank waits forever.
        assert sum(map(len, self.orders)) == 3 * len(self.stages) * self.microbatches, "ranks wait for one another"
        return max(self.free), tuple(map(tuple, self.orders))

    def _has_room(self, rank: int, stage: int) -> bool:
        """Return True if a rank may run a stage's next forward without exceeding its limit."""
        stages = self.stages_of[rank]
        # On a later stage of the rank, the microbatch is already in flight there.
        if stage != stages[0]:
            return True
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


CostsOf = Callable[[int, int], Sequence[StageCosts] | None]
"""Costs of all stages, by numbers of microbatches and of stages per rank; None if the model has no such stages."""

# Candidates for the number of stages per rank.
_VIRTUAL = (1, 2, 3, 4)
# The maximum of microbatches per rank: 1F1B is then idle for less than 1/16 of its compute time.
_MICROBATCHES_PER_RANK = 16

# The name of schedules by `list_schedules`.
CUSTOM = "custom"
# A custom schedule is used if it is faster than torch's by more than this fraction.
_MIN_GAIN = 0.01
# The number of sizes, those with the smallest bounds, for which custom schedules are made.
_CUSTOM_SIZES = 4
# The number of custom schedules per size that are simulated.
_CUSTOM_ORDERS = 3

_REFUSED = "refused"


ESTIMATED = "estimated, not planned"
"""Part of the verdict on a schedule whose seconds and peak are estimates, because its stages were not planned."""


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """A row of the table: a schedule of one size, and its verdict.

    Attributes:
        schedule: the name of the schedule.
        microbatches: the number per step.
        virtual: stages per rank.
        seconds: the length of the step; None if it was not simulated.
        bubble: the fraction of all ranks' time in which they do not compute; None if not simulated.
        peak: bytes of the rank nearest to its memory limit, or furthest above it; None if not simulated.
        verdict: "chosen", or the reason why not.
    """

    schedule: str
    microbatches: int
    virtual: int
    seconds: float | None
    bubble: float | None
    peak: int | None
    verdict: str


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduleOption(Candidate):
    """A schedule of one size that may be simulated.

    Attributes:
        name: the name of the schedule.
        microbatches: the number per step.
        virtual: stages per rank.
        placement: the rank of every stage.
        costs: the costs of every stage.
        least_bytes: a lower bound of every rank's bytes.
        simulation: the simulated step; None before.
    """

    name: str
    microbatches: int
    virtual: int
    placement: tuple[int, ...]
    costs: Sequence[StageCosts]
    least_bytes: tuple[int, ...]
    simulation: Simulation | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Microbatches per step, and stages per rank."""
        return self.microbatches, self.virtual

    @property
    def gain(self) -> float:
        """The fraction by which it must be faster than the best."""
        return _MIN_GAIN if self.name == CUSTOM else 0.0


class ScheduleSearch(CandidateSearch[ScheduleOption]):
    """Best-first search with bounds: candidates whose lower bound exceeds the best step are not simulated.

    Args:
        costs_of: returns the costs of the stages.
        ranks: the number of pipeline ranks.
        memory_limits: bytes of memory of every rank.
        contention: seconds by which one second of communication slows down concurrent compute.
    """

    def __init__(self, costs_of: CostsOf, ranks: int, memory_limits: tuple[float, ...], contention: float) -> None:
        super().__init__()
        # Cached: schedules of one size share its costs, which may need an assignment to stages.
        self._costs_of = functools.cache(costs_of)
        self.ranks = ranks
        self.memory_limits = memory_limits
        self.contention = contention
        self._options: list[ScheduleOption] = []
        self._refused: list[ScheduleCandidate] = []

    def add(self, name: str, microbatches: int, virtual: int) -> None:
        """Add a candidate, or a table row if there is no such schedule."""
        family = SCHEDULES.get(name, ScheduleFamily((1, None), halves=True))
        refusal = family.refusal(self.ranks, virtual, microbatches)
        costs = self._costs_of(microbatches, virtual) if refusal is None else None
        if costs is None:
            why = refusal or f"the model has no {self.ranks * virtual} stages"
            verdict = f"{_REFUSED}: {why}"
            self._refused.append(ScheduleCandidate(name, microbatches, virtual, None, None, None, verdict))
            return
        least = bytes_for_one_microbatch if name == CUSTOM else least_bytes
        # Custom ones are tried round-robin and in a V; these differ from two stages per rank on.
        turns = {False, virtual > 1} if name == CUSTOM else {family.turns}
        for way in [placement(self.ranks, virtual, turn) for turn in sorted(turns)]:
            option = ScheduleOption(
                least_seconds=least_seconds(costs, way, microbatches, family.halves),
                name=name,
                microbatches=microbatches,
                virtual=virtual,
                placement=way,
                costs=costs,
                least_bytes=least(costs, way, microbatches),
            )
            self._options.append(option)

    def run(self) -> None:
        """Simulate the candidates that may be the best, torch's own schedules first."""
        ordered = self._ordered_options()
        # Custom schedules take longest: each simulates several orders, made by list scheduling first.
        customs = [option for option in ordered if option.name == CUSTOM]
        untried = set(customs[_CUSTOM_SIZES:])

        def drop_reason(option: ScheduleOption) -> str | None:
            if option in untried:
                return f"not tried: its bound, {format_seconds(option.least_seconds)}, is not among the least"
            if self._share(option.least_bytes) > 1:
                return self._too_large(option.least_bytes, "at least ")
            if self.cannot_win(option, gain=option.gain, ties=True):
                return f"not simulated: it takes at least {format_seconds(option.least_seconds)}"
            return None

        self.evaluate_each(ordered, drop_reason, self._evaluate)

    def _ordered_options(self) -> list[ScheduleOption]:
        """Return the candidates in the order of simulation: by lower bound, custom schedules last."""
        return sorted(
            self._options,
            key=lambda option: (option.name == CUSTOM, option.least_seconds, option.microbatches, option.virtual),
        )

    def _evaluate(self, option: ScheduleOption) -> None:
        """Simulate a candidate; for a custom schedule, several orders."""
        steps = [self._simulate(order, option) for order in self._schedules(option, self.memory_limits)]
        step = min(steps, key=lambda step: (self._share(step.peaks) > 1, step.seconds))
        option.simulation, option.seconds = step, step.seconds
        if self._share(step.peaks) > 1:
            option.verdict = self._too_large(step.peaks)
        elif self._is_better(step, option.gain):
            self.best = option

    def _is_better(self, step: Simulation, gain: float) -> bool:
        """Return True if a step is faster than the best by the fraction `gain`, or as fast with less memory."""
        if self.best is None:
            return True
        assert self.best.simulation is not None, "the best candidate was simulated"
        limit = self.best.step_seconds * (1 - gain)
        if gain or step.seconds * SAME < limit:
            return step.seconds < limit
        less = self._share(step.peaks) < self._share(self.best.simulation.peaks)
        return less and step.seconds <= limit * SAME

    def _schedules(self, option: ScheduleOption, memory_limits: Sequence[float]) -> Iterator[Schedule]:
        if option.name == CUSTOM:
            orders = list_schedules(option.costs, option.placement, option.microbatches, memory_limits)
            yield from islice(orders, _CUSTOM_ORDERS)
        else:
            yield schedule(option.name, self.ranks, option.microbatches, option.virtual)

    def _simulate(self, order: Schedule, option: ScheduleOption) -> Simulation:
        return simulate(order, option.costs, self.contention)

    def table(self) -> tuple[ScheduleCandidate, ...]:
        """Return all candidates with their verdicts: the fastest first, those that were not simulated last."""
        lines = [*self._refused, *map(self._line, self._ordered_options())]
        lines.sort(key=lambda line: (line.seconds is None, line.verdict.startswith(_REFUSED), line.seconds or 0.0))
        return tuple(lines)

    def _line(self, option: ScheduleOption) -> ScheduleCandidate:
        size, step, verdict = (option.name, option.microbatches, option.virtual), option.simulation, option.verdict
        if step is None:
            return ScheduleCandidate(*size, None, None, None, verdict)
        if option is self.best:
            verdict = "chosen"
        elif not verdict and self.best is not None:
            best = self.best.step_seconds
            if step.seconds * SAME < best:
                gained = 1 - step.seconds / best
                verdict = f"{gained:.1%} faster, which is too little for a schedule that torch has not"
            elif step.seconds <= best * SAME:
                verdict = "as fast, with no less memory"
            else:
                verdict = self.slower_text(option)
        peak = step.peaks[self._tightest(step.peaks)]
        return ScheduleCandidate(*size, step.seconds, step.bubble, peak, verdict)

    def no_schedule_error(self) -> PipelineError | BudgetError:
        """Return the error if nothing was chosen: no schedule for such sizes, or the needs of the leanest one."""
        if not self._options:
            reasons = "; ".join(
                f"{line.schedule} with {line.microbatches} microbatches and {line.virtual} stages per rank: "
                f"{line.verdict.removeprefix(f'{_REFUSED}: ')}"
                for line in self._refused[:4]
            )
            return PipelineError(
                f"there is no schedule for {self.ranks} ranks of such sizes: {reasons}. Ask for other microbatches or "
                f'stages per rank, or for other schedules ("auto" is all of them).'
            )
        leanest: tuple[Schedule, Sequence[int]] | None = None
        # By lower bound, until no other candidate can need less than the leanest.
        for option in sorted(self._options, key=lambda option: self._share(option.least_bytes)):
            least = option.least_bytes
            if leanest is not None and self._share(least) >= self._share(leanest[1]):
                break
            # The first order is estimated the fastest; all stay within the given memory.
            for order in islice(self._schedules(option, least), 1):
                peaks = self._simulate(order, option).peaks
                # A custom schedule is built within a limit known to suffice: less may not be enough.
                needs = tuple(map(max, peaks, least if option.name == CUSTOM else peaks))
                if leanest is None or self._share(needs) < self._share(leanest[1]):
                    leanest = order, needs
        assert leanest is not None, "no candidate made a schedule"
        lean, most = leanest
        return BudgetError(
            f"no schedule fits: the leanest is {lean.name} with {lean.microbatches} microbatches and {lean.virtual} "
            f"stages per rank, where {self._too_large(most)}. Allow that much, use more ranks or recomputation, or "
            f"shard the stages over more devices.",
            most[self._tightest(most)],
        )

    def _tightest(self, peaks: Sequence[int]) -> int:
        """Return the rank nearest to its memory limit, or furthest above it."""
        return max(range(self.ranks), key=lambda rank: peaks[rank] / self.memory_limits[rank])

    def _share(self, peaks: Sequence[int]) -> float:
        rank = self._tightest(peaks)
        return peaks[rank] / self.memory_limits[rank]

    def _too_large(self, peaks: Sequence[int], least: str = "") -> str:
        rank = self._tightest(peaks)
        return f"rank {rank} needs {least}{format_bytes(peaks[rank])} and has {format_bytes(self.memory_limits[rank])}"


def names_to_try(schedules: str | Sequence[str]) -> list[str]:
    """Return the full names of schedules.

    Args:
        schedules: "auto" for all, or one or several of `autoshard.options.SCHEDULES`, in any case.

    Raises:
        PipelineError: there is no such schedule, or none is given.
    """
    known = {name.lower(): name for name in CHOICES if name != "auto"}
    names = [schedules] if isinstance(schedules, str) else list(schedules)
    if names == ["auto"]:
        return list(known.values())
    for name in names:
        if name.lower() not in known:
            raise PipelineError(f"there is no schedule {name!r}. {suggestion(name, list(known.values()))}")
    if not names:
        raise PipelineError('no schedule is named: name one or several, or "auto" for all.')
    return list(dict.fromkeys(known[name.lower()] for name in names))


def microbatches_to_try(microbatches: str | int, batch: int, ranks: int) -> list[int]:
    """Return the numbers of microbatches to try.

    Args:
        microbatches: "auto" for all divisors of the batch up to sixteen per rank, or one number.
        batch: samples of one step.
        ranks: the number of pipeline ranks.

    Raises:
        PipelineError: the number does not divide the batch.
    """
    # All microbatches of a step share one graph, so they have equal sizes.
    divisors = [number for number in range(1, batch + 1) if batch % number == 0]
    if microbatches == "auto" and divisors:
        return [number for number in divisors if number <= _MICROBATCHES_PER_RANK * ranks]
    if isinstance(microbatches, int) and microbatches in divisors:
        return [microbatches]
    wanted = microbatches if isinstance(microbatches, int) else 1
    near = sorted(sorted(divisors, key=lambda number: abs(number - wanted))[:4])
    raise PipelineError(
        f"a batch of {batch} can't be divided into {microbatches!r} microbatches of equal size. Numbers that divide "
        f"it: {', '.join(map(str, near)) or 'none'}."
    )


def virtual_to_try(virtual: str | int) -> tuple[int, ...]:
    """Return the numbers of stages per rank to try: "auto" for one to four, or one number.

    Raises:
        PipelineError: the number is less than 1, or it is another text.
    """
    if virtual == "auto":
        return _VIRTUAL
    if isinstance(virtual, str) or virtual < 1:
        raise PipelineError(f'{virtual!r} stages per rank: give a number from 1 up, or "auto".')
    return (virtual,)
