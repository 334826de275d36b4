"""Simulation of a pipeline step: its seconds, its bubble, and the memory of every rank over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.pipeline.schedule.tasks import StepTaskGraph
from autoshard.simulate.events import COMPUTE
from autoshard.simulate.task_events import replay_tasks


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated step.

    Attributes:
        graph: its tasks.
        starts: seconds from the beginning, one per task.
        ends: likewise.
        seconds: of the step.
        idle: for every rank the share of the step in which it does not compute.
        memory: for every rank pairs of a moment, in seconds, and the bytes that it holds from then on, in order.
    """

    graph: StepTaskGraph
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    seconds: float
    idle: tuple[float, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        return sum(self.idle) / len(self.idle)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that every rank holds at once."""
        return tuple(max(held for _, held in moments) for moments in self.memory)


def simulate(graph: StepTaskGraph, contention: float = 0.0) -> Simulation:
    """Run the tasks of a step.

    Args:
        graph: the tasks.
        contention: seconds that a second of communication costs the computation beside it: `Cluster.contention`.

    Returns:
        The seconds and bytes of every rank.
    """
    times = replay_tasks(graph.tasks, contention)
    computed = [0.0] * graph.schedule.ranks
    for task, start, end in zip(graph.tasks, times.starts, times.ends, strict=True):
        if task.stream == COMPUTE:
            computed[task.ranks[0]] += end - start
    idle = tuple(1.0 - seconds / times.seconds if times.seconds else 0.0 for seconds in computed)
    return Simulation(graph, times.starts, times.ends, times.seconds, idle, _memory(graph, times.starts, times.ends))


def _memory(
    graph: StepTaskGraph, starts: Sequence[float], ends: Sequence[float]
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Return for every rank the moments at which its memory changes, with the bytes that it holds from then on."""
    moments = [[(0.0, rest)] for rest in graph.rest]
    # The computations of a rank run one after another, in the order of their indices.
    for index, task in enumerate(graph.tasks):
        for moment, more in ((starts[index], task.takes), (ends[index], -task.frees)):
            if more:
                rank_moments = moments[task.ranks[0]]
                rank_moments.append((moment, rank_moments[-1][1] + more))
    return tuple(map(tuple, moments))
