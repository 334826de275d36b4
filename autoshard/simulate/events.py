"""Replay of operations and tasks, event by event.

`replay` is for one device, which issues its operations in one order on streams: it shows which communication compute
hides. `replay_tasks` is for several ranks, each with its own order; communication slows down concurrent computation
on its ranks.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"
"""The stream of compute; all other streams are of communication."""

TO_HOST_STREAM = "to the host"
FROM_HOST_STREAM = "from the host"
_COPY_STREAMS = (TO_HOST_STREAM, FROM_HOST_STREAM)
"""The streams of copies over the link to the host. Separate copy engines run them, without slowing compute down."""


def link_stream(spans_hosts: bool) -> str:
    """Return the stream of collectives on one kind of link."""
    return "between hosts" if spans_hosts else "inside a host"


class Operation(NamedTuple):
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
        exposed: seconds in which the device communicates or copies, and does not compute.
        hidden: seconds in which it communicates with other devices and computes.
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
    for index, (name, stream, seconds, needs, dispatch) in enumerate(operations):
        assert seconds >= 0, f"{name} takes {seconds} seconds"
        issued += dispatch
        start = free.get(stream, 0.0)
        for need in needs:
            assert 0 <= need < index, f"{name} needs what is issued after it"
            if ends[need] > start:
                start = ends[need]
        if issued > start:
            start = issued
        end = start + seconds
        starts.append(start)
        ends.append(end)
        free[stream] = end
    # Communication while nothing computes is exposed: the time when any stream is busy, less the compute.
    computing = [operation.stream == COMPUTE for operation in operations]
    intervals = list(zip(starts, ends, strict=True))
    busy = covered_seconds(intervals)
    compute = covered_seconds(itertools.compress(intervals, computing))
    copying = [operation.stream in _COPY_STREAMS for operation in operations]
    communicating = [not (computes or copies) for computes, copies in zip(computing, copying, strict=True)]
    communication = covered_seconds(itertools.compress(intervals, communicating))
    either = busy if not any(copying) else covered_seconds(itertools.compress(intervals, map(operator.not_, copying)))
    # Rounding may make a difference of equal sums negative.
    exposed = max(0.0, busy - compute)
    hidden = max(0.0, communication - max(0.0, either - compute))
    return Timeline(tuple(starts), tuple(ends), max(ends, default=0.0), exposed, hidden)


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    covered, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - (start if start > reached else reached)
            reached = end
    return covered


class Task(NamedTuple):
    """One computation, one transfer between two ranks, or one collective.

    Attributes:
        name: for reports.
        kind: for reports, one word for its action.
        stream: `COMPUTE`, or a stream of communication. Tasks on one stream of the same ranks run in order, one at a
            time.
        ranks: the rank that computes, or the sender and the receiver, or the ranks of the collective.
        seconds: its duration without contention.
        needs: indices of the tasks, all earlier, that must end before it starts.
        takes: bytes that its first rank allocates at its start.
        frees: bytes that its first rank frees at its end.
        label: its text in pictures.
    """

    name: str
    kind: str
    stream: str
    ranks: tuple[int, ...]
    seconds: float
    needs: tuple[int, ...] = ()
    takes: int = 0
    frees: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """The start and the end of every task.

    Attributes:
        starts, ends: seconds from the beginning, one per task.
        seconds: from the beginning to the last end.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float


def replay_tasks(tasks: Sequence[Task], contention: float = 0.0) -> TaskTimes:
    """Run the tasks, each as early as its stream and its needs allow.

    Args:
        tasks: in an order in which a task needs only earlier ones.
        contention: seconds by which a second of communication delays the concurrent computation on each of its ranks,
            as in `Cluster.contention`; 1 and more stop it.

    Returns:
        The times. Without contention, a shorter task delays no task. With contention it may: a transfer that runs
        earlier may slow down another computation.
    """
    return _Replay(tasks, contention).run()


class _Replay:
    """The state of one replay."""

    def __init__(self, tasks: Sequence[Task], contention: float) -> None:
        self.tasks = tasks
        self.slowed_rate = max(0.0, 1.0 - contention)
        self.starts = [0.0] * len(tasks)
        self.ends = [math.inf] * len(tasks)
        self.waits, self.followers = _order(tasks)
        # A heap of expected ends, including outdated entries.
        self.events: list[tuple[float, int]] = []
        # The end that is valid now.
        self.expected = [math.inf] * len(tasks)
        # Rank -> its task.
        self.computing: dict[int, int] = {}
        # Rank -> number of its transfers.
        self.communicating: dict[int, int] = defaultdict(int)
        # Seconds of work left at `since`.
        self.left = [task.seconds for task in tasks]
        self.since = [0.0] * len(tasks)

    def run(self) -> TaskTimes:
        for index, waits in enumerate(self.waits):
            if waits == 0:
                self._start(index, 0.0)
        ended = 0
        while self.events:
            now, index = heapq.heappop(self.events)
            if self.expected[index] != now or self.ends[index] != math.inf:
                # Contention has moved this end since it was pushed.
                continue
            self._end(index, now)
            ended += 1
        assert ended == len(self.tasks), "tasks wait for one another"
        return TaskTimes(tuple(self.starts), tuple(self.ends), max(self.ends, default=0.0))

    def _start(self, index: int, now: float) -> None:
        task = self.tasks[index]
        self.starts[index] = self.since[index] = now
        if task.stream == COMPUTE:
            self.computing[task.ranks[0]] = index
            self._expect(index, now)
        else:
            self._communicate(task, now, 1)
            self._push(index, now + task.seconds)

    def _end(self, index: int, now: float) -> None:
        task = self.tasks[index]
        self.ends[index] = now
        if task.stream == COMPUTE:
            del self.computing[task.ranks[0]]
        else:
            self._communicate(task, now, -1)
        for follower in self.followers[index]:
            self.waits[follower] -= 1
            if self.waits[follower] == 0:
                self._start(follower, now)

    def _communicate(self, task: Task, now: float, more: int) -> None:
        """Add `more` (1 or -1) transfers on the task's ranks, and change the rate of their computations."""
        # A transfer of zero seconds slows nothing down.
        for rank in task.ranks if task.seconds > 0 else ():
            rate = self._rate(rank)
            self.communicating[rank] += more
            index = self.computing.get(rank)
            if index is not None and rate != self._rate(rank):
                # Settle the work done at the old rate, then expect the end at the new one.
                self.left[index] = max(0.0, self.left[index] - (now - self.since[index]) * rate)
                self.since[index] = now
                self._expect(index, now)

    def _rate(self, rank: int) -> float:
        return self.slowed_rate if self.communicating[rank] else 1.0

    def _expect(self, index: int, now: float) -> None:
        """Push the end of a computation at its current rate; infinity where communication stops it."""
        rate = self._rate(self.tasks[index].ranks[0])
        left = self.left[index]
        self._push(index, now + left / rate if rate else now if left == 0 else math.inf)

    def _push(self, index: int, end: float) -> None:
        self.expected[index] = end
        if end != math.inf:
            heapq.heappush(self.events, (end, index))


def _order(tasks: Sequence[Task]) -> tuple[list[int], list[list[int]]]:
    """Return, for every task, the number of tasks that must end before it, and the tasks that wait for it."""
    waits = [0] * len(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    last: dict[tuple[str, tuple[int, ...]], int] = {}
    for index, task in enumerate(tasks):
        assert task.seconds >= 0, f"{task.name} takes {task.seconds} seconds"
        assert all(0 <= need < index for need in task.needs), f"{task.name} needs what comes after it"
        stream = task.stream, tuple(sorted(task.ranks))
        # The stream's previous task is one more need: a stream runs one task at a time. A set counts it once.
        before = {*task.needs, last[stream]} if stream in last else set(task.needs)
        for need in before:
            followers[need].append(index)
        waits[index] = len(before)
        last[stream] = index
    return waits, followers
