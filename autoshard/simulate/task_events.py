"""Tasks of several ranks, event by event: computations, what passes between ranks, and what both cost each other.

`events.replay` is of one device, whose operations are issued in one order. Here every rank has an order of its own, and
communication slows the computation beside it down while both last, so that what it costs is known on every rank.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.simulate.events import COMPUTE


class Task(NamedTuple):
    """One computation, one transfer between two ranks, or one collective.

    Attributes:
        name: for reports.
        kind: for reports: what it does, in a word.
        stream: `COMPUTE`, or what carries communication. Tasks of one stream of the same ranks run one at a time, in
            their order.
        ranks: that it occupies: the one that computes, or the sender and the receiver.
        seconds: how long it takes where nothing disturbs it.
        needs: indices of the tasks, all earlier, that must end before it starts.
        takes: bytes of memory that its first rank holds from its start on.
        frees: bytes that its first rank no longer holds from its end on.
        label: for pictures: what is written on it.
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
    """When every task ran.

    Attributes:
        starts: seconds from the beginning, one per task.
        ends: likewise.
        seconds: from the beginning to the last end.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float


def replay_tasks(tasks: Sequence[Task], contention: float = 0.0) -> TaskTimes:
    """Run the tasks, each as early as its stream and what it needs allow.

    Args:
        tasks: such that a task needs only earlier ones.
        contention: seconds that a second of communication costs the computation beside it on each of its ranks, as
            in `Cluster.contention`; 1 and more stop it.

    Returns:
        When every task ran. Without contention no task starts later where any takes less time. With it one may: a
        transfer that is earlier may disturb another computation.
    """
    return _Replay(tasks, contention).run()


class _Replay:
    """The state of one replay: what has started, and what it waits for."""

    def __init__(self, tasks: Sequence[Task], contention: float) -> None:
        self.tasks = tasks
        self.slowed_rate = max(0.0, 1.0 - contention)
        self.starts = [0.0] * len(tasks)
        self.ends = [math.inf] * len(tasks)
        self.waits, self.followers = _order(tasks)
        self.events: list[tuple[float, int]] = []  # expected ends; those that are no longer true are passed over
        self.expected = [math.inf] * len(tasks)
        self.computing: dict[int, int] = {}  # rank -> its task
        self.communicating: dict[int, int] = defaultdict(int)  # rank -> number of tasks
        self.left = [task.seconds for task in tasks]  # of work, as of `since`
        self.since = [0.0] * len(tasks)

    def run(self) -> TaskTimes:
        for index, waits in enumerate(self.waits):
            if waits == 0:
                self._start(index, 0.0)
        ended = 0
        while self.events:
            now, index = heapq.heappop(self.events)
            if self.expected[index] != now or self.ends[index] != math.inf:
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
        """One task of communication more or less on its ranks: their computations go on at another rate."""
        for rank in task.ranks if task.seconds > 0 else ():
            rate = self._rate(rank)
            self.communicating[rank] += more
            index = self.computing.get(rank)
            if index is not None and rate != self._rate(rank):
                self.left[index] = max(0.0, self.left[index] - (now - self.since[index]) * rate)
                self.since[index] = now
                self._expect(index, now)

    def _rate(self, rank: int) -> float:
        return self.slowed_rate if self.communicating[rank] else 1.0

    def _expect(self, index: int, now: float) -> None:
        """When a computation will end, as things stand; never, where communication stops it."""
        rate = self._rate(self.tasks[index].ranks[0])
        left = self.left[index]
        self._push(index, now + left / rate if rate else now if left == 0 else math.inf)

    def _push(self, index: int, end: float) -> None:
        self.expected[index] = end
        if end != math.inf:
            heapq.heappush(self.events, (end, index))


def _order(tasks: Sequence[Task]) -> tuple[list[int], list[list[int]]]:
    """For every task how many others must end before it, and which ones wait for it."""
    waits = [0] * len(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    last: dict[tuple[str, tuple[int, ...]], int] = {}
    for index, task in enumerate(tasks):
        assert task.seconds >= 0, f"{task.name} takes {task.seconds} seconds"
        assert all(0 <= need < index for need in task.needs), f"{task.name} needs what comes after it"
        stream = task.stream, tuple(sorted(task.ranks))
        before = {*task.needs, last[stream]} if stream in last else set(task.needs)
        for need in before:
            followers[need].append(index)
        waits[index] = len(before)
        last[stream] = index
    return waits, followers
