"""Stages as stretches of the nodes in their order: an exact dynamic program over the places of the cuts."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from autoshard.pipeline.assign.stage_problem import Assignment, StageProblem
from autoshard.pipeline.graph.stage_graph import StageValue
from autoshard.solver.problem import Array, IntArray

Goal = Literal["crossing", "balance", "memory"]

_UNITS = 2.0**40
"""Units of seconds in the largest crossing. In whole units, equal cuts are equal in whatever order they are summed."""

_ROUNDING = 1e-9
"""Part of a stage's share by which a sum may exceed it."""


def is_linear(problem: StageProblem) -> bool:
    """Return True if every assignment consists of stretches of the order: every node needs the one before it."""
    graph = problem.graph
    linked = {value.source for value in graph.values if value.source + 1 in value.users}
    # Boundaries decide about recomputation one by one here, but a value may pay off on a stage that only hands it on.
    recomputable = any(value.recompute_seconds is not None for value in graph.values)
    return len(linked) == len(graph.nodes) - 1 and not recomputable


def cut_order(problem: StageProblem, goal: Goal = "crossing") -> Assignment | None:
    """Return the best assignment in which every stage is a stretch of the nodes in their order.

    Args:
        problem: the graph, the devices and the tolerance.
        goal: `"crossing"`: the smallest objective within balance and memory, and of these the best balance;
            `"balance"`: the best balance within the memory, whatever the tolerance; `"memory"`: the least excess of the
            fullest stage over its memory, whatever the balance.

    Returns:
        The assignment, or None if there is none. It is exact, but for values that can be recomputed: each boundary
        takes the cheaper way for itself.
    """
    return _CutTable(problem).best(goal)


class _CutTable:
    """Tables over cut places: place p is before node p, and a stretch (p, q) has the nodes p to q - 1."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        graph = problem.graph
        self.count = len(graph.nodes)
        self.work = np.concatenate([[0.0], np.cumsum([node.seconds for node in graph.nodes])])
        self.saved = np.concatenate([[0.0], np.cumsum([node.saved_bytes for node in graph.nodes])])
        shape = (problem.stages, self.count + 1)
        self.crossing = np.zeros(shape, dtype=np.int64)  # units of seconds, by stage and the place of its start
        self.recompute_seconds = np.zeros(shape)  # on a device of speed 1
        self.received = np.zeros(shape)  # bytes
        largest = max((problem.transfer(value, 1) for value in graph.values if problem.stages > 1), default=0.0)
        self.unit = largest / _UNITS or 1.0
        for value in graph.values:
            for stage in range(1, problem.stages):
                self._add(value, stage)

    def _add(self, value: StageValue, stage: int) -> None:
        """Add a value to every place between its source and its last reader, where a stage may start."""
        places = slice(value.source + 1, (self.count - 1 if value.output else max(value.users)) + 1)
        transfer, recompute = self.problem.transfer(value, stage), self.problem.recompute(value, stage)
        self.crossing[stage, places] += round(min(transfer, recompute) / self.unit)
        if recompute < transfer:
            self.recompute_seconds[stage, places] += value.recompute_seconds or 0.0
        else:
            self.received[stage, places] += value.bytes

    def best(self, goal: Goal) -> Assignment | None:
        """Return the best cuts: by crossing and then balance, or by balance or memory and then crossing."""
        problem, size = self.problem, self.count + 1
        # By number of stages and end of the last one: the best value of these stages, and the start of the last.
        crossing = np.zeros((problem.stages + 1, size), dtype=np.int64)
        worst = np.full((problem.stages + 1, size), math.inf)  # imbalance, or used part of the memory
        worst[0, 0] = 0.0
        best_start: IntArray = np.zeros((problem.stages + 1, size), dtype=np.int64)
        for end in range(1, size):
            rest = self._at_rest(end)
            for stage in range(problem.stages):
                starts = slice(self._earliest(stage, end) if goal == "crossing" else 0, end)
                if not np.isfinite(worst[stage, starts]).any():
                    continue
                used = self._memory(stage, starts, rest)
                last = used if goal == "memory" else self._imbalances(stage, starts, used, goal)
                most = np.maximum(worst[stage, starts], last)
                sums = crossing[stage, starts] + self.crossing[stage, starts]
                place = _least_sum(most, sums) if goal == "crossing" else _least_worst(most, sums)
                crossing[stage + 1, end], worst[stage + 1, end] = sums[place], most[place]
                best_start[stage + 1, end] = starts.start + place
        if not math.isfinite(worst[problem.stages, self.count]):
            return None
        return self._assignment(best_start)

    def _earliest(self, stage: int, end: int) -> int:
        """Return the first place from which a stage reaches `end` within the tolerance."""
        least = self.work[end] - self.problem.capacity(stage) * (1 + _ROUNDING)
        return min(int(np.searchsorted(self.work, least)), end - 1)

    def _memory(self, stage: int, starts: slice, rest: Array) -> Array:
        """Return the part of a stage's memory that stretches from `starts` to their end use."""
        saved = self.saved[starts.stop] - self.saved[starts] + self.received[stage, starts]
        held: Array = rest[starts] + self.problem.in_flight[stage] * saved
        return held / self.problem.devices[stage].memory

    def _imbalances(self, stage: int, starts: slice, used: Array, goal: Goal) -> Array:
        """Return the imbalance of stretches from `starts` to their end; infinite outside the balance or memory."""
        problem = self.problem
        work = self.work[starts.stop] - self.work[starts]
        share = problem.share * problem.devices[stage].speed
        if share:
            under = np.zeros(len(work)) if problem.less else 1 - work / share
            imbalances = np.maximum((work + self.recompute_seconds[stage, starts]) / share - 1, under)
        else:
            imbalances = np.zeros(len(work))
        if goal == "crossing":
            imbalances[imbalances > problem.tolerance + _ROUNDING] = math.inf
        imbalances[used > 1] = math.inf
        return imbalances

    def _at_rest(self, end: int) -> Array:
        """Return the bytes at rest of every stretch up to `end`; to be called for every end in turn."""
        if end == 1:
            self._rest = np.zeros(self.count + 1)
            self._last: dict[str, int] = {}
        for name in self.problem.graph.nodes[end - 1].at_rest:
            # A stretch that reaches back to the last reader of the parameter has counted it already.
            self._rest[self._last.get(name, -1) + 1 : end] += self.problem.graph.at_rest[name]
            self._last[name] = end - 1
        return self._rest[:end]

    def _assignment(self, best_start: IntArray) -> Assignment:
        stage_of = [0] * self.count
        end = self.count
        for stage in reversed(range(self.problem.stages)):
            start = int(best_start[stage + 1, end])
            stage_of[start:end] = [stage] * (end - start)
            end = start
        return Assignment(tuple(stage_of), self.problem.cheaper_recomputations())


def _least_sum(worst: Array, sums: IntArray) -> int:
    """Return the place of the smallest sum among the possible ones, and of these the best balanced."""
    possible = np.isfinite(worst)
    if not possible.any():
        return 0
    least = sums[possible].min()
    return int(np.where(possible & (sums == least), worst, math.inf).argmin())


def _least_worst(worst: Array, sums: IntArray) -> int:
    """Return the place of the least imbalance or memory, and of these the smallest sum."""
    return int(np.where(worst == worst.min(), sums, np.iinfo(np.int64).max).argmin())
