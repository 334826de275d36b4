"""The search for the fastest schedule that fits: what is simulated, what need not be, and what is said of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from autoshard.errors import BudgetError, PipelineError
from autoshard.pipeline.schedule.actions import Schedule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.list_schedule import NAME as CUSTOM
from autoshard.pipeline.schedule.list_schedule import bytes_for_one_microbatch, list_schedules
from autoshard.pipeline.schedule.schedule_bounds import least_bytes, least_seconds
from autoshard.pipeline.schedule.schedules import SCHEDULES, ScheduleFamily, placement, schedule
from autoshard.pipeline.schedule.simulation import Simulation, simulate
from autoshard.pipeline.schedule.tasks import step_task_graph
from autoshard.units import format_bytes, format_seconds

CostsOf = Callable[[int, int], Sequence[StageCosts] | None]
"""Costs of all stages for a number of microbatches and of stages per rank; None where the model has no such stages."""

_REFUSED = "refused"
_MIN_GAIN = 0.01
"""A schedule of our own is taken where it is faster than torch's by more than this share."""
_SAME = 1 + 1e-9
"""Steps that differ by less are equally long: the same sums, rounded in another order."""
_CUSTOM_SIZES = 4
"""For how many sizes schedules of our own are made: those that can be the fastest, by their bounds."""
_CUSTOM_ORDERS = 3
"""How many of the orders that are made for one size are simulated."""


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """One line of the table: a schedule of one size, and why it was taken or not.

    Attributes:
        schedule: its name.
        microbatches: of one step.
        virtual: stages per rank.
        seconds: of the step; None where it was not simulated.
        bubble: share of all ranks' time in which they do not compute; None likewise.
        peak: bytes of the rank that is nearest to its memory, or furthest above it; None likewise.
        verdict: "chosen", or why not.
    """

    schedule: str
    microbatches: int
    virtual: int
    seconds: float | None
    bubble: float | None
    peak: int | None
    verdict: str


@dataclass(frozen=True, slots=True)
class _ScheduleOption:
    """A candidate that may be simulated.

    Attributes:
        bound: seconds that its step takes at least.
        least: for every rank, bytes that it holds at least.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    costs: Sequence[StageCosts]
    bound: float
    least: tuple[int, ...]


class ScheduleSearch:
    """What is left to look at, the best that fits, and the table.

    Args:
        costs_of: costs of the stages.
        ranks: of the pipeline.
        rooms: bytes of memory of every rank.
        contention: seconds that a second of communication costs the computation beside it.
    """

    def __init__(self, costs_of: CostsOf, ranks: int, rooms: tuple[int, ...], contention: float) -> None:
        self.costs_of = costs_of
        self.ranks = ranks
        self.memory_limits = rooms
        self.contention = contention
        self.best: Simulation | None = None
        self._costs: dict[tuple[int, int], Sequence[StageCosts] | None] = {}
        self._options: list[_ScheduleOption] = []
        self._table: list[ScheduleCandidate] = []
        self._best_line = -1  # of the table: the best one's

    def add(self, name: str, microbatches: int, virtual: int) -> None:
        """One more candidate; a line of the table at once where there is no such schedule."""
        family = SCHEDULES.get(name, ScheduleFamily((1, None), halves=True))
        refusal = family.refusal(self.ranks, virtual, microbatches)
        costs = self._costs_of(microbatches, virtual) if refusal is None else None
        if costs is None:
            why = refusal or f"the model has no {self.ranks * virtual} stages"
            self._table.append(ScheduleCandidate(name, microbatches, virtual, None, None, None, f"{_REFUSED}: {why}"))
            return
        least = bytes_for_one_microbatch if name == CUSTOM else least_bytes
        turns = {False, virtual > 1} if name == CUSTOM else {family.turns}
        for way in [placement(self.ranks, virtual, turn) for turn in sorted(turns)]:
            bound = least_seconds(costs, way, microbatches, family.halves)
            self._options.append(
                _ScheduleOption(name, microbatches, way, costs, bound, least(costs, way, microbatches))
            )

    def _costs_of(self, microbatches: int, virtual: int) -> Sequence[StageCosts] | None:
        size = microbatches, virtual
        if size not in self._costs:
            self._costs[size] = self.costs_of(*size)
        return self._costs[size]

    def run(self) -> None:
        """Simulate what may be the best, torch's own schedules first."""
        by_bound = sorted(self._options, key=lambda option: (option.bound, option.microbatches, len(option.placement)))
        for option in by_bound:
            if option.name != CUSTOM:
                self._try(option, 0.0)
        customs = [option for option in by_bound if option.name == CUSTOM]
        for option in customs[:_CUSTOM_SIZES]:
            self._try(option, _MIN_GAIN)
        for option in customs[_CUSTOM_SIZES:]:
            self._drop(option, f"not tried: its bound, {format_seconds(option.bound)}, is not among the least")

    def table(self) -> tuple[ScheduleCandidate, ...]:
        """All candidates, each with its verdict: the fastest first, and what was not simulated last."""
        said = [dataclasses.replace(line, verdict=self._verdict(i, line)) for i, line in enumerate(self._table)]
        said.sort(key=lambda line: (line.seconds is None, line.verdict.startswith(_REFUSED), line.seconds or 0.0))
        return tuple(said)

    def no_schedule_error(self) -> PipelineError | BudgetError:
        """Why nothing could be chosen: no schedule of such sizes, or what the leanest one needs."""
        if not self._options:
            said = "; ".join(
                f"{line.schedule} with {line.microbatches} microbatches and {line.virtual} stages per rank: "
                f"{line.verdict.removeprefix(f'{_REFUSED}: ')}"
                for line in self._table[:4]
            )
            return PipelineError(
                f"there is no schedule for {self.ranks} ranks of such sizes: {said}. Ask for other microbatches or "
                f'stages per rank, or for other schedules ("auto" is all of them).'
            )
        leanest: tuple[Schedule, Sequence[int]] | None = None
        for option in sorted(self._options, key=lambda option: self._share(option.least)):
            if leanest is not None and self._share(option.least) >= self._share(leanest[1]):
                break
            for made in islice(self._schedules(option, option.least), 1):
                peaks = self._simulate(made, option).peaks
                # orders of our own are made within what is sure to be enough for them
                needs = tuple(map(max, peaks, option.least if option.name == CUSTOM else peaks))
                if leanest is None or self._share(needs) < self._share(leanest[1]):
                    leanest = made, needs
        assert leanest is not None, "no candidate made a schedule"
        made, most = leanest
        return BudgetError(
            f"no schedule fits: the leanest is {made.name} with {made.microbatches} microbatches and {made.virtual} "
            f"stages per rank, where {self._too_large(most)}. Allow that much, use more ranks or recomputation, or "
            f"shard the stages over more devices.",
            most[self._tightest(most)],
        )

    def _try(self, option: _ScheduleOption, worth: float) -> None:
        """Simulate a candidate where it can fit and can be faster than the best by a share of it."""
        if self._share(option.least) > 1:
            self._drop(option, self._too_large(option.least, "at least "))
        elif self.best is not None and option.bound > self.best.seconds * (1 - worth) * _SAME:
            self._drop(option, f"not simulated: it takes at least {format_seconds(option.bound)}")
        else:
            simulated = [self._simulate(made, option) for made in self._schedules(option, self.memory_limits)]
            self._judge(min(simulated, key=lambda one: (self._share(one.peaks) > 1, one.seconds)), worth)

    def _schedules(self, option: _ScheduleOption, rooms: Sequence[int]) -> Iterator[Schedule]:
        if option.name == CUSTOM:
            orders = list_schedules(option.costs, option.placement, option.microbatches, rooms)
            yield from islice(orders, _CUSTOM_ORDERS)
        else:
            yield schedule(option.name, self.ranks, option.microbatches, len(option.placement) // self.ranks)

    def _simulate(self, made: Schedule, option: _ScheduleOption) -> Simulation:
        return simulate(step_task_graph(made, option.costs), self.contention)

    def _judge(self, simulation: Simulation, worth: float) -> None:
        fits = self._share(simulation.peaks) <= 1
        if fits and self._better(simulation, worth):
            self.best, self._best_line = simulation, len(self._table)
        made, peak = simulation.graph.schedule, simulation.peaks[self._tightest(simulation.peaks)]
        verdict = "" if fits else self._too_large(simulation.peaks)
        size = made.name, made.microbatches, made.virtual
        self._table.append(ScheduleCandidate(*size, simulation.seconds, simulation.bubble, peak, verdict))

    def _better(self, simulation: Simulation, worth: float) -> bool:
        """Whether it is faster than the best by a share of it, or as fast and with less memory."""
        if self.best is None:
            return True
        limit = self.best.seconds * (1 - worth)
        if worth or simulation.seconds * _SAME < limit:
            return simulation.seconds < limit
        less = self._share(simulation.peaks) < self._share(self.best.peaks)
        return less and simulation.seconds <= limit * _SAME

    def _drop(self, option: _ScheduleOption, why: str) -> None:
        virtual = len(option.placement) // self.ranks
        self._table.append(ScheduleCandidate(option.name, option.microbatches, virtual, None, None, None, why))

    def _verdict(self, index: int, line: ScheduleCandidate) -> str:
        if line.verdict or line.seconds is None or self.best is None:
            return line.verdict
        if index == self._best_line:
            return "chosen"
        best = self.best.seconds
        if line.seconds * _SAME < best:
            return f"{1 - line.seconds / best:.1%} faster, which is too little for a schedule that torch has not"
        if line.seconds <= best * _SAME:
            return "as fast, with no less memory"
        return f"{line.seconds / best - 1:.1%} slower"

    def _tightest(self, peaks: Sequence[int]) -> int:
        """The rank that is nearest to its memory, or furthest above it."""
        return max(range(self.ranks), key=lambda rank: peaks[rank] / self.memory_limits[rank])

    def _share(self, peaks: Sequence[int]) -> float:
        rank = self._tightest(peaks)
        return peaks[rank] / self.memory_limits[rank]

    def _too_large(self, peaks: Sequence[int], least: str = "") -> str:
        rank = self._tightest(peaks)
        return f"rank {rank} needs {least}{format_bytes(peaks[rank])} and has {format_bytes(self.memory_limits[rank])}"
