"""The search for the fastest schedule that fits, by simulation, with a verdict on every candidate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from autoshard.errors import BudgetError, PipelineError
from autoshard.names import suggestion
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

_VIRTUAL = (1, 2, 3, 4)
"""Stages per rank that are tried."""
_MICROBATCHES_PER_RANK = 16
"""The most microbatches per rank that are tried: 1F1B is then idle for less than 1/16 of the time it computes."""

_REFUSED = "refused"
_MIN_GAIN = 0.01
"""A custom schedule is taken where it is faster than torch's by more than this share."""
_SAME = 1 + 1e-9
"""Steps are equally long within this factor: the same sums, rounded in another order."""
_CUSTOM_SIZES = 4
"""Number of sizes, those with the least bounds, for which custom schedules are made."""
_CUSTOM_ORDERS = 3
"""Number of custom schedules per size that are simulated."""


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """One line of the table: a schedule of one size, and its verdict.

    Attributes:
        schedule: its name.
        microbatches: of one step.
        virtual: stages per rank.
        seconds: of the step; None where it was not simulated.
        bubble: share of all ranks' time in which they do not compute; None likewise.
        peak: bytes of the rank that is nearest to its memory, or furthest above it; None likewise.
        verdict: "chosen", or the reason why not.
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
        bound: lower bound of the seconds of its step.
        least: lower bound of the bytes of every rank.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    costs: Sequence[StageCosts]
    bound: float
    least: tuple[int, ...]


class ScheduleSearch:
    """Bounded best-first search: candidates whose lower bound exceeds the best step are not simulated.

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
        self._best_line = -1  # of the table

    def add(self, name: str, microbatches: int, virtual: int) -> None:
        """Add a candidate, or a line of the table where there is no such schedule."""
        family = SCHEDULES.get(name, ScheduleFamily((1, None), halves=True))
        refusal = family.refusal(self.ranks, virtual, microbatches)
        costs = self._costs_of(microbatches, virtual) if refusal is None else None
        if costs is None:
            why = refusal or f"the model has no {self.ranks * virtual} stages"
            self._table.append(ScheduleCandidate(name, microbatches, virtual, None, None, None, f"{_REFUSED}: {why}"))
            return
        least = bytes_for_one_microbatch if name == CUSTOM else least_bytes
        turns = {False, virtual > 1} if name == CUSTOM else {family.turns}  # custom ones: round and round, and in a V
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
        """Simulate the candidates that may be the best, torch's own schedules first."""
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
        """Return all candidates with their verdicts: the fastest first, and those that were not simulated last."""
        lines = [dataclasses.replace(line, verdict=self._verdict(i, line)) for i, line in enumerate(self._table)]
        lines.sort(key=lambda line: (line.seconds is None, line.verdict.startswith(_REFUSED), line.seconds or 0.0))
        return tuple(lines)

    def no_schedule_error(self) -> PipelineError | BudgetError:
        """Return the error where nothing was chosen: no schedule of such sizes, or the needs of the leanest one."""
        if not self._options:
            reasons = "; ".join(
                f"{line.schedule} with {line.microbatches} microbatches and {line.virtual} stages per rank: "
                f"{line.verdict.removeprefix(f'{_REFUSED}: ')}"
                for line in self._table[:4]
            )
            return PipelineError(
                f"there is no schedule for {self.ranks} ranks of such sizes: {reasons}. Ask for other microbatches or "
                f'stages per rank, or for other schedules ("auto" is all of them).'
            )
        leanest: tuple[Schedule, Sequence[int]] | None = None
        # By lower bound, until no further candidate can need less than the leanest.
        for option in sorted(self._options, key=lambda option: self._share(option.least)):
            if leanest is not None and self._share(option.least) >= self._share(leanest[1]):
                break
            for candidate in islice(self._schedules(option, option.least), 1):
                peaks = self._simulate(candidate, option).peaks
                # A custom schedule is built within a limit that is sure to suffice: less is not known to be enough.
                needs = tuple(map(max, peaks, option.least if option.name == CUSTOM else peaks))
                if leanest is None or self._share(needs) < self._share(leanest[1]):
                    leanest = candidate, needs
        assert leanest is not None, "no candidate made a schedule"
        lean, most = leanest
        return BudgetError(
            f"no schedule fits: the leanest is {lean.name} with {lean.microbatches} microbatches and {lean.virtual} "
            f"stages per rank, where {self._too_large(most)}. Allow that much, use more ranks or recomputation, or "
            f"shard the stages over more devices.",
            most[self._tightest(most)],
        )

    def _try(self, option: _ScheduleOption, worth: float) -> None:
        """Simulate a candidate if it can fit and can be faster than the best by the share `worth`."""
        if self._share(option.least) > 1:
            self._drop(option, self._too_large(option.least, "at least "))
        elif self.best is not None and option.bound > self.best.seconds * (1 - worth) * _SAME:
            self._drop(option, f"not simulated: it takes at least {format_seconds(option.bound)}")
        else:
            simulated = [self._simulate(order, option) for order in self._schedules(option, self.memory_limits)]
            self._judge(min(simulated, key=lambda step: (self._share(step.peaks) > 1, step.seconds)), worth)

    def _schedules(self, option: _ScheduleOption, rooms: Sequence[int]) -> Iterator[Schedule]:
        if option.name == CUSTOM:
            orders = list_schedules(option.costs, option.placement, option.microbatches, rooms)
            yield from islice(orders, _CUSTOM_ORDERS)
        else:
            yield schedule(option.name, self.ranks, option.microbatches, len(option.placement) // self.ranks)

    def _simulate(self, order: Schedule, option: _ScheduleOption) -> Simulation:
        return simulate(step_task_graph(order, option.costs), self.contention)

    def _judge(self, simulation: Simulation, worth: float) -> None:
        fits = self._share(simulation.peaks) <= 1
        if fits and self._better(simulation, worth):
            self.best, self._best_line = simulation, len(self._table)
        order, peak = simulation.graph.schedule, simulation.peaks[self._tightest(simulation.peaks)]
        verdict = "" if fits else self._too_large(simulation.peaks)
        size = order.name, order.microbatches, order.virtual
        self._table.append(ScheduleCandidate(*size, simulation.seconds, simulation.bubble, peak, verdict))

    def _better(self, simulation: Simulation, worth: float) -> bool:
        """Return True if it is faster than the best by the share `worth`, or as fast and with less memory."""
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
        """Return the rank that is nearest to its memory, or furthest above it."""
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
        schedules: "auto" for all, or one or several of `SCHEDULES` and "custom", in any case.

    Raises:
        PipelineError: there is no such schedule, or none is named.
    """
    known = {name.lower(): name for name in (*SCHEDULES, CUSTOM)}
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
    """Return numbers of microbatches.

    Args:
        microbatches: "auto" for all divisors of the batch up to sixteen per rank, or one number.
        batch: samples of one step.
        ranks: of the pipeline.

    Raises:
        PipelineError: the number does not divide the batch.
    """
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
    """Return numbers of stages per rank: "auto" for one to four, or one number.

    Raises:
        PipelineError: the number is less than 1, or another text.
    """
    if virtual == "auto":
        return _VIRTUAL
    if isinstance(virtual, str) or virtual < 1:
        raise PipelineError(f'{virtual!r} stages per rank: give a number from 1 up, or "auto".')
    return (virtual,)
