"""The choice of a schedule, its microbatches and its stages per rank: by simulation, within every rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.errors import BudgetError, PipelineError
from autoshard.names import suggestion
from autoshard.pipeline.schedule.actions import Schedule
from autoshard.pipeline.schedule.list_schedule import NAME as CUSTOM
from autoshard.pipeline.schedule.schedule_search import CostsOf, ScheduleCandidate, ScheduleSearch
from autoshard.pipeline.schedule.schedules import SCHEDULES
from autoshard.pipeline.schedule.simulation import Simulation

_VIRTUAL = (1, 2, 3, 4)
"""Stages per rank that are tried."""
_MICROBATCHES_PER_RANK = 16
"""The most microbatches per rank that are tried: 1F1B is then idle for less than 1/16 of the time it computes."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """What `choose` decided.

    Attributes:
        simulation: of the step.
        table: all that there was to choose from, the fastest first.
    """

    simulation: Simulation
    table: tuple[ScheduleCandidate, ...]

    @property
    def schedule(self) -> Schedule:
        """The orders of all ranks."""
        return self.simulation.graph.schedule

    @property
    def microbatches(self) -> int:
        """Microbatches of one step."""
        return self.schedule.microbatches

    @property
    def virtual(self) -> int:
        """Stages per rank."""
        return self.schedule.virtual


def choose(
    costs_of: CostsOf,
    ranks: int,
    memory: int | Sequence[int],
    *,
    batch: int,
    schedules: str | Sequence[str] = "auto",
    microbatches: str | int = "auto",
    virtual: str | int = "auto",
    contention: float = 0.0,
) -> ScheduleChoice:
    """The fastest schedule that fits, by simulation.

    Candidates that can't be faster than the best one found, by a lower bound (what the busiest rank computes, when it
    can begin, and the way of one microbatch), are not simulated. Of equally fast ones that with less memory is taken.
    A schedule of our own is taken where it is faster than all of torch's by more than a hundredth, or where none of
    those fits.

    Args:
        costs_of: costs of the stages, in their order, for a number of microbatches and of stages per rank.
        ranks: of the pipeline.
        memory: bytes of every rank; or of each, in a list.
        batch: what is divided into microbatches, such as the number of sequences of one step.
        schedules: "auto" for all, or one name or several of `SCHEDULES` and "custom", for schedules of our own.
        microbatches: "auto" for all divisors of the batch up to sixteen per rank, or one number.
        virtual: stages per rank: "auto" for one to four, or one number.
        contention: seconds that a second of communication costs the computation beside it: `Cluster.contention`.

    Returns:
        The choice, and the table of all candidates.

    Raises:
        PipelineError: a name or a number is none that there can be, or no schedule is made for such sizes.
        BudgetError: nothing fits; the message names what needs least.
    """
    search = ScheduleSearch(costs_of, ranks, _memory_limits(memory, ranks), contention)
    sizes = [(m, v) for m in microbatches_to_try(microbatches, batch, ranks) for v in virtual_to_try(virtual)]
    for name in names_to_try(schedules):
        for m, v in sizes:
            search.add(name, m, v)
    search.run()
    if search.best is None:
        raise search.no_schedule_error()
    return ScheduleChoice(search.best, search.table())


def _memory_limits(memory: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    rooms = (memory,) * ranks if isinstance(memory, int) else tuple(memory)
    if ranks < 1 or len(rooms) != ranks:
        raise PipelineError(
            f"a pipeline of {ranks} ranks with {len(rooms)} amounts of memory: it needs at least one rank, and one "
            f"amount for all or one each."
        )
    if min(rooms) < 1:
        raise BudgetError(f"a rank with {min(rooms)} bytes of memory holds nothing: each needs at least one byte.")
    return rooms


def names_to_try(schedules: str | Sequence[str]) -> list[str]:
    """Full names of the schedules that were asked for, as for `choose`."""
    known = {name.lower(): name for name in (*SCHEDULES, CUSTOM)}
    asked = [schedules] if isinstance(schedules, str) else list(schedules)
    if asked == ["auto"]:
        return list(known.values())
    for name in asked:
        if name.lower() not in known:
            raise PipelineError(f"there is no schedule {name!r}. {suggestion(name, list(known.values()))}")
    if not asked:
        raise PipelineError('no schedule is named: name one or several, or "auto" for all.')
    return list(dict.fromkeys(known[name.lower()] for name in asked))


def microbatches_to_try(microbatches: str | int, batch: int, ranks: int) -> list[int]:
    """Numbers of microbatches that were asked for and divide the batch, as for `choose`."""
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
    """Numbers of stages per rank that were asked for, as for `choose`."""
    if virtual == "auto":
        return _VIRTUAL
    if isinstance(virtual, str) or virtual < 1:
        raise PipelineError(f'{virtual!r} stages per rank: give a number from 1 up, or "auto".')
    return (virtual,)
