"""Replay of one device's operations on streams: what communication is hidden behind compute, and what is not."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COMPUTE = "compute"
"""The stream that computes; every other one communicates."""


def link_stream(spans_hosts: bool) -> str:
    """The stream of collectives on one kind of link."""
    return "between hosts" if spans_hosts else "inside a host"


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel or one collective.

    Attributes:
        name: for reports.
        stream: `COMPUTE`, or what carries communication, such as a link; each runs its operations one at a time, in
            their order, and at the same time as the others.
        seconds: how long it takes once it runs.
        needs: indices of the operations, all earlier, that must end before it starts.
        dispatch: seconds for which the host is busy with it before it can issue the next.
    """

    name: str
    stream: str
    seconds: float
    needs: tuple[int, ...] = ()
    dispatch: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every operation of a replay ran.

    Attributes:
        starts: seconds from the beginning, one per operation.
        ends: likewise.
        seconds: from the beginning to the last end.
        exposed: seconds in which the device communicated and did not compute.
        hidden: seconds in which it communicated and computed.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float
    exposed: float
    hidden: float

    def seconds_with_contention(self, contention: float) -> float:
        """Seconds where every hidden second of communication takes `contention` seconds from the compute beside it."""
        return self.seconds + contention * self.hidden


def replay(operations: Sequence[Operation]) -> Timeline:
    """Run the operations on one device, each as early as its stream, what it needs and the host that issues it allow.

    The host issues them one after the other and waits for none: where calls take it longer than the device, the device
    waits for the host.

    Args:
        operations: in the order in which they are issued; a stream never overtakes itself.

    Returns:
        The timeline. Its `seconds` lie between the larger of the longest chain and the busiest stream, the host
        included, and the sum of all operations and their dispatch.
    """
    free: dict[str, float] = {}
    issued = 0.0
    starts: list[float] = []
    ends: list[float] = []
    for index, operation in enumerate(operations):
        assert all(0 <= need < index for need in operation.needs), f"{operation.name} needs what is issued after it"
        assert operation.seconds >= 0, f"{operation.name} takes {operation.seconds} seconds"
        issued += operation.dispatch
        start = max(free.get(operation.stream, 0.0), *(ends[need] for need in operation.needs), issued)
        starts.append(start)
        ends.append(start + operation.seconds)
        free[operation.stream] = ends[-1]
    computing = [operation.stream == COMPUTE for operation in operations]
    intervals = list(zip(starts, ends, strict=True))
    busy = _covered_seconds(intervals)
    compute = _covered_seconds(itertools.compress(intervals, computing))
    communication = _covered_seconds(itertools.compress(intervals, map(operator.not_, computing)))
    exposed = max(0.0, busy - compute)
    hidden = max(0.0, communication - exposed)
    return Timeline(tuple(starts), tuple(ends), max(ends, default=0.0), exposed, hidden)


def _covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the intervals."""
    covered, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
