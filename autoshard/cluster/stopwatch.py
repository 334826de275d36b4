"""Seconds of work that all processes do at once, so that they contend for shared hardware as in a step."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Seconds that a timing lasts at least: many time slices where processes share a processor.
_WINDOW = 5e-2
# A timing counts as this many medians at most: where one lasted longer, something else ran.
_OUTLIER_FACTOR = 3.0
# Calls of which the shortest estimates the seconds of one.
_TRIES = 3
# Copies of the data of a piece of work.
_COPIES = 8
# Bytes that the copies take together.
_COPY_BYTES = 2**26


class Rotation:
    """Work on several copies of its data in turn, so that memory is as cold as in a step: few operands are cached.

    The last results are kept, so that the allocator hands out new memory.

    Args:
        make: returns the work on a new copy of its data.
        bytes: read and written by a copy.
    """

    def __init__(self, make: Callable[[], Callable[[], Any]], bytes: float) -> None:
        copies = max(1, min(_COPIES, int(_COPY_BYTES // bytes)))
        self._works = itertools.cycle([make() for _ in range(copies)])
        self._kept: deque[Any] = deque(maxlen=copies)

    def __call__(self) -> None:
        self._kept.append(next(self._works)())


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Timings that all processes make together and agree on.

    Attributes:
        device: that the work runs on.
        repeats: number of timings, whose mean counts.
        patience: seconds of one call above which larger calls are not tried.
        clock: returns seconds since some moment; wall time by default.
    """

    device: torch.device
    repeats: int
    patience: float
    clock: Callable[[], float] = time.perf_counter

    def mean_of_ranks(self, values: Sequence[float]) -> list[float]:
        """Return the mean over all processes of each value; equal on all of them."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [value / dist.get_world_size() for value in tensor.tolist()]

    def rough_seconds(self, work: Callable[[], object]) -> float:
        """Return an estimate of the seconds of one call, the shortest of a few; the same number on all processes."""
        dist.barrier()
        return self.mean_of_ranks([min(self._time_calls(work, 1) for _ in range(_TRIES))])[0]

    def mean_seconds(self, works: Sequence[Callable[[], object]], calls: Sequence[float]) -> list[float]:
        """Return the seconds of one call of each piece of work; the same numbers on all processes.

        A timing begins when all processes are there, and ends when the last is done, like the stretch between two
        collectives of a step.

        Args:
            works: run by every process at the same time.
            calls: estimated seconds of a call; the same on all processes, which then make equally many calls.
        """
        counts = [max(1, round(_WINDOW / seconds)) for seconds in calls]
        timings = torch.zeros(len(works), self.repeats, dtype=torch.float64)
        # All work is timed in turn: a disturbance of the machine falls on a few timings of each piece, and not on all
        # timings of one.
        for turn in range(self.repeats):
            for place, (work, count) in enumerate(zip(works, counts, strict=True)):
                dist.barrier()
                timings[place, turn] = self._time_calls(work, count) / count
        timings = timings.to(self.device)
        # A collective waits for the last rank: a step takes as long as its slowest device.
        dist.all_reduce(timings, dist.ReduceOp.MAX)
        # The mean, not the median: times of processes that share a processor vary with the order of their time slices,
        # and it is means that add up to the time of a step.
        return [robust_mean(row) for row in timings.tolist()]

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
    """Return the mean of timings, each of which counts as three medians at most."""
    most = _OUTLIER_FACTOR * statistics.median(timings)
    return statistics.mean(min(timing, most) for timing in timings)
