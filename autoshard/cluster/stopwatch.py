"""Seconds of work that all processes do at once, so that what they share is shared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_WINDOW = 5e-2
"""Seconds that one timing lasts at least: many turns of processes that share a processor, as a step has them."""

_OUTLIER_FACTOR = 3.0
"""Medians that a timing counts as at most: where one lasted longer, something else ran."""

_TRIES = 3  # calls of which the shortest says how long one takes, roughly


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times work on this process and tells what all processes measured.

    Attributes:
        device: that the work runs on.
        repeats: timings of which the mean counts.
        patience: seconds of one call from which on larger ones are not tried.
        clock: seconds since some moment; those of the wall by default.
    """

    device: torch.device
    repeats: int
    patience: float
    clock: Callable[[], float] = time.perf_counter

    def mean_of_ranks(self, values: Sequence[float]) -> list[float]:
        """The mean over all processes, of each value; equal on all of them."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [value / dist.get_world_size() for value in tensor.tolist()]

    def rough_seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one call, roughly: the shortest of a few; the same number on all processes."""
        dist.barrier()
        return self.mean_of_ranks([min(self._time_calls(work, 1) for _ in range(_TRIES))])[0]

    def mean_seconds(self, works: Sequence[Callable[[], object]], calls: Sequence[float]) -> list[float]:
        """Seconds of one call of each piece of work; the same numbers on all processes.

        All are timed in turn, again and again: a disturbance of the machine falls on a few timings of each, and not on
        all timings of one. A timing begins when all processes are there, and ends when the last is done, as what is
        between two collectives of a step does: of processes that share a processor, the first to be done wait. What
        such processes take depends on whose turn it is; of that the mean counts, since it is means that add up to the
        time of a step.

        Args:
            works: what every process runs at the same time.
            calls: seconds of a call, roughly; the same on all processes, which then make equally many.
        """
        counts = [max(1, round(_WINDOW / seconds)) for seconds in calls]
        timings = torch.zeros(len(works), self.repeats, dtype=torch.float64)
        for turn in range(self.repeats):
            for place, (work, count) in enumerate(zip(works, counts, strict=True)):
                dist.barrier()
                timings[place, turn] = self._time_calls(work, count) / count
        timings = timings.to(self.device)
        dist.all_reduce(timings, dist.ReduceOp.MAX)
        return [robust_mean(own) for own in timings.tolist()]

    def _time_calls(self, work: Callable[[], object], calls: int) -> float:
        self._synchronize()
        start = self.clock()
        for _ in range(calls):
            work()
        self._synchronize()
        return self.clock() - start

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def robust_mean(timings: Sequence[float]) -> float:
    """The mean of timings, of which none counts as more than three medians."""
    most = _OUTLIER_FACTOR * statistics.median(timings)
    return statistics.mean(min(one, most) for one in timings)
