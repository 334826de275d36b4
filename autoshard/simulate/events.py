"""Replay of one device's operations on two streams: what communication is hidden behind compute, and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stream = Literal["compute", "communication"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel or one collective.

    Attributes:
        name: for reports.
        stream: `"compute"` or `"communication"`; each runs its operations one at a time, in their order.
        seconds: how long it takes once it runs.
        needs: indices of the operations, all earlier, that must end before it starts.
    """

    name: str
    stream: Stream
    seconds: float
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every operation of a replay ran.

    Attributes:
        starts: seconds from the beginning, one per operation.
        ends: likewise.
        seconds: from the beginning to the last end.
        exposed: seconds in which the device communicated and did not compute.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float
    exposed: float


def replay(operations: Sequence[Operation]) -> Timeline:
    """Run the operations on one device, each as early as its stream and what it needs allow.

    Args:
        operations: in the order in which they are issued; a stream never overtakes itself.

    Returns:
        The timeline. Its `seconds` lie between the larger of the longest chain and the busier stream, and the sum of
        all operations.
    """
    free: dict[Stream, float] = {"compute": 0.0, "communication": 0.0}
    starts: list[float] = []
    ends: list[float] = []
    for index, operation in enumerate(operations):
        assert all(0 <= need < index for need in operation.needs), f"{operation.name} needs what is issued after it"
        assert operation.seconds >= 0, f"{operation.name} takes {operation.seconds} seconds"
        start = max(free[operation.stream], *(ends[need] for need in operation.needs), 0.0)
        starts.append(start)
        ends.append(start + operation.seconds)
        free[operation.stream] = ends[-1]
    return Timeline(tuple(starts), tuple(ends), max(ends, default=0.0), _exposed(operations, starts, ends))


def _exposed(operations: Sequence[Operation], starts: Sequence[float], ends: Sequence[float]) -> float:
    """Seconds of communication less those during which compute ran too."""
    computing = _busy(operations, starts, ends, "compute")
    communicating = _busy(operations, starts, ends, "communication")
    return max(0.0, sum(end - start for start, end in communicating) - _overlap(computing, communicating))


def _busy(
    operations: Sequence[Operation], starts: Sequence[float], ends: Sequence[float], stream: Stream
) -> list[tuple[float, float]]:
    """Intervals in which a stream is busy; they follow one another, since a stream runs in order."""
    rows = zip(operations, starts, ends, strict=True)
    return [(start, end) for operation, start, end in rows if operation.stream == stream]


def _overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Length of what two lists of intervals, each in order and free of overlap, have in common."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        shared += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return shared
