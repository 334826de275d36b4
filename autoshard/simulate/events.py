"""Replay of the operations of one device on streams: which communication compute hides, and which is exposed."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COMPUTE = "compute"
"""The stream of compute; all other streams are of communication."""


def link_stream(spans_hosts: bool) -> str:
    """Return the stream of collectives on one kind of link."""
    return "between hosts" if spans_hosts else "inside a host"


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel or one collective.

    Attributes:
        name: for reports.
        stream: `COMPUTE`, or a stream of communication, such as a link. A stream runs its operations in order, one at
            a time; streams run concurrently.
        seconds: its duration once it runs.
        needs: indices of the operations, all earlier, that must end before it starts.
        dispatch: seconds of the host to issue it, before it issues the next one.
    """

    name: str
    stream: str
    seconds: float
    needs: tuple[int, ...] = ()
    dispatch: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The start and the end of every operation of a replay.

    Attributes:
        starts, ends: seconds from the beginning, one per operation.
        seconds: from the beginning to the last end.
        exposed: seconds in which the device communicates and does not compute.
        hidden: seconds in which it communicates and computes.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float
    exposed: float
    hidden: float

    def seconds_with_contention(self, contention: float) -> float:
        """Return the seconds if every hidden second of communication delays compute by `contention` seconds."""
        return self.seconds + contention * self.hidden


def replay(operations: Sequence[Operation]) -> Timeline:
    """Run the operations on one device, each as early as its stream, its needs and the host allow.

    The host issues them one after the other and waits for none. The device waits for the host where issuing takes
    longer than running.

    Args:
        operations: in the order in which they are issued; a stream never overtakes itself.

    Returns:
        The timeline. Its `seconds` are at least the longest chain and the busiest stream, the host included, and at
        most the sum of all operations and their dispatch.
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
    # Communication while nothing computes is exposed: the time when any stream is busy, less the compute.
    computing = [operation.stream == COMPUTE for operation in operations]
    intervals = list(zip(starts, ends, strict=True))
    busy = _covered_seconds(intervals)
    compute = _covered_seconds(itertools.compress(intervals, computing))
    communication = _covered_seconds(itertools.compress(intervals, map(operator.not_, computing)))
    # Rounding may make a difference of equal sums negative.
    exposed = max(0.0, busy - compute)
    hidden = max(0.0, communication - exposed)
    return Timeline(tuple(starts), tuple(ends), max(ends, default=0.0), exposed, hidden)


def _covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    covered, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
