"""Solvers of the assignment of stages: an integer program, and an exact dynamic program over stretches of the order."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from autoshard.pipeline.graph.stage_graph import StageValue
from autoshard.pipeline.graph.stage_problem import Assignment, StageProblem
from autoshard.solver.linear import LinearProgram, minimise
from autoshard.solver.problem import Array, IntArray

Goal = Literal["crossing", "balance", "memory"]
Term = tuple[int, float]

# Part of a stage's share by which a sum may exceed it: sums in another order are rounded otherwise.
_ROUNDING = 1e-9

# Units of seconds in the largest crossing. In whole units, equal cuts are equal in whatever order they are summed.
_UNITS = 2.0**40


class StageProgram:
    """The integer program of an assignment problem.

    The paper has an integer B_i for the stage of node i and, by a big M, a 0-1 variable for every edge that crosses.
    Here B_i is a sum of steps: Y_ik = 1 where B_i >= k. Then B_j >= B_i along an edge is Y_jk >= Y_ik for every k, and
    a value crosses boundary k if some reader is behind it and the source is not: C_vk >= Y_uk - Y_ik, with a continuous
    variable and without an M. A value counts once on every boundary that it crosses, however many nodes read it behind,
    and the relaxation is that of a cut, much tighter than an M's. A value that can be recomputed is on a stage that
    reads it because it is computed there, received from a stage that has it, or recomputed (R_vk). Rows bound the
    seconds and the bytes of every stage; a parameter is at rest once on every stage that reads it.

    Args:
        problem: the graph, the devices and the tolerance.
        goal: `"crossing"` minimises the objective; `"memory"` the excess of the fullest stage over its memory, whatever
            the tolerance.

    Source: Rhino 5.1; unequal devices: Whale 3.3.2.
    """

    def __init__(self, problem: StageProblem, goal: Goal = "crossing") -> None:
        self.problem = problem
        self.goal = goal
        self.program = LinearProgram()
        self.nodes = len(problem.graph.nodes)
        self.stages = problem.stages
        every = np.zeros(self.nodes, dtype=np.int64), np.full(self.nodes, self.stages - 1, dtype=np.int64)
        bounds = stage_bounds(problem) if goal == "crossing" else every
        self.is_infeasible = bounds is None
        if bounds is None:
            return
        longest = max((problem.transfer(value, 1) for value in problem.graph.values if self.stages > 1), default=0.0)
        # Seconds themselves would be below the absolute tolerances of a solver.
        self.scale = 1e3 / longest if longest else 1.0
        self.excess: int | None = None  # the variable that the goal of memory minimises
        if goal == "memory":
            self.excess = self.program.add_variables(np.ones(1), lower=-1.0, upper=math.inf)[0]
        self.steps = self._steps(*bounds)
        self.crossing: dict[tuple[int, int], int] = {}  # C_vk, by value and stage
        self.again: dict[tuple[int, int], int] = {}  # R_vk
        self.shared: list[tuple[int, int, list[int]]] = []  # variable, stage, nodes of which any is there
        for place in range(len(problem.graph.values)):
            self._add_value(place)
        for stage in range(self.stages):
            self._add_limits(stage)

    def solve(self, *, time_limit: float, start: Assignment | None = None) -> tuple[Assignment | None, bool]:
        """Solve the program.

        Args:
            time_limit: seconds.
            start: a known assignment.

        Returns:
            An assignment (None where none was found), and True if it is proved that no assignment is better, or that
            there is none.
        """
        if self.is_infeasible:
            return None, True
        hint = None if start is None else self._values(start)
        answer = minimise(self.program, time_limit=time_limit, hint=hint)
        if answer.values is None:
            return None, answer.infeasible or answer.optimal
        stage = tuple(round(answer.values[self.steps[node]].sum()) for node in range(self.nodes))
        again = frozenset(key for key, name in self.again.items() if answer.values[name] > 0.5)
        return Assignment(stage, again), answer.optimal

    def _steps(self, first: IntArray, last: IntArray) -> IntArray:
        """Return the variables Y_ik, k from 1, with rows Y_ik >= Y_i,k+1 and the bounds of every node's stage."""
        count = self.stages - 1
        start = self.program.add_variables(np.zeros(self.nodes * count), integer=True)
        steps = np.array(start, dtype=np.int64).reshape(self.nodes, count)
        for node in range(self.nodes):
            for stage in range(1, self.stages):
                name = int(steps[node, stage - 1])
                if stage <= first[node]:
                    self.program.lower[name] = 1.0
                if stage > last[node]:
                    self.program.upper[name] = 0.0
                if stage > 1:
                    self.program.add_row([name, name - 1], [1.0, -1.0], -math.inf, 0.0)
        return steps

    def _at(self, node: int, stage: int, factor: float = 1.0) -> tuple[list[Term], float]:
        """Return factor · [B_node = stage] = factor · (Y_node,stage - Y_node,stage+1), as terms and a constant."""
        terms: list[Term] = []
        constant = 0.0
        if stage == 0:
            constant = factor
        else:
            terms.append((int(self.steps[node, stage - 1]), factor))
        if stage + 1 < self.stages:
            terms.append((int(self.steps[node, stage]), -factor))
        return terms, constant

    def _row(self, terms: list[Term], least: float, most: float) -> None:
        """Add a row; terms of one variable are added up."""
        factors: dict[int, float] = {}
        for name, factor in terms:
            factors[name] = factors.get(name, 0.0) + factor
        if factors:
            self.program.add_row(list(factors), list(factors.values()), least, most)

    def _cost(self, seconds: float) -> Array:
        return np.array([self.scale * seconds if self.goal == "crossing" else 0.0])

    def _add_value(self, place: int) -> None:
        value = self.problem.graph.values[place]
        for stage in range(1, self.stages):
            cost = self._cost(self.problem.transfer(value, stage))
            self.crossing[place, stage] = self.program.add_variables(cost)[0]
            if value.recompute_seconds is not None:
                cost = self._cost(self.problem.recompute(value, stage))
                self.again[place, stage] = self.program.add_variables(cost, integer=True)[0]
        # No reader is before the source.
        for user in value.users:
            for stage in range(1, self.stages):
                source, reader = int(self.steps[value.source, stage - 1]), int(self.steps[user, stage - 1])
                self._row([(reader, 1.0), (source, -1.0)], 0.0, math.inf)
        if value.recompute_seconds is None:
            self._add_crossings(place)
        else:
            self._add_choices(place)

    def _add_crossings(self, place: int) -> None:
        """Add C_vk >= Y_uk - Y_ik for every reader; for an output, which the last stage reads, C_vk >= 1 - Y_ik."""
        value = self.problem.graph.values[place]
        for stage in range(1, self.stages):
            uncrossed = [(self.crossing[place, stage], 1.0), (int(self.steps[value.source, stage - 1]), 1.0)]
            if value.output:
                self._row(uncrossed, 1.0, math.inf)
                continue
            for user in value.users:
                self._row([*uncrossed, (int(self.steps[user, stage - 1]), -1.0)], 0.0, math.inf)

    def _add_choices(self, place: int) -> None:
        """Add rows by which a value is computed, received or recomputed on a stage that reads it."""
        value = self.problem.graph.values[place]
        for stage in range(1, self.stages):
            computed, _ = self._at(value.source, stage)
            there = [*computed, (self.crossing[place, stage], 1.0), (self.again[place, stage], 1.0)]
            for user in value.users:
                read, _ = self._at(user, stage, -1.0)
                self._row([*there, *read], 0.0, math.inf)
            if value.output and stage == self.stages - 1:
                self._row(there, 1.0, math.inf)
            # It is received only if the stage before has it.
            before, constant = self._at(value.source, stage - 1)
            if stage > 1:
                before += [(self.crossing[place, stage - 1], 1.0), (self.again[place, stage - 1], 1.0)]
            self._row([*before, (self.crossing[place, stage], -1.0)], -constant, math.inf)

    def _add_limits(self, stage: int) -> None:
        """Add rows by which a stage is not empty, and keeps its seconds and its memory."""
        terms, constant = self._total(stage, dict.fromkeys(range(self.nodes), 1.0))
        self._row(terms, 1.0 - constant, math.inf)
        self._add_seconds(stage)
        if math.isfinite(self.problem.devices[stage].memory):
            self._add_memory(stage)

    def _total(self, stage: int, weights: dict[int, float]) -> tuple[list[Term], float]:
        """Return the sum of the weights of the nodes on a stage, as terms and a constant."""
        terms: list[Term] = []
        constant = 0.0
        for node, weight in weights.items():
            if weight:
                more, fixed = self._at(node, stage, weight)
                terms += more
                constant += fixed
        return terms, constant

    def _add_seconds(self, stage: int) -> None:
        problem = self.problem
        unit = problem.share * problem.devices[stage].speed
        if not unit or self.excess is not None:
            return
        weights = {place: node.seconds / unit for place, node in enumerate(problem.graph.nodes)}
        terms, constant = self._total(stage, weights)
        self._row(terms, 1.0 - problem.tolerance - constant, math.inf)
        # Recomputation counts for more than a share only, as in `StageProblem.imbalance`.
        for (place, where), name in self.again.items():
            if where == stage:
                terms.append((name, (problem.graph.values[place].recompute_seconds or 0.0) / unit))
        self._row(terms, -math.inf, 1.0 + problem.tolerance - constant)

    def _add_memory(self, stage: int) -> None:
        problem = self.problem
        # Rows are in parts of the memory, near 1: solvers scale badly with numbers of bytes.
        unit = problem.devices[stage].memory
        flights = problem.in_flight[stage] / unit
        readers: dict[str, list[int]] = {}
        weights = {place: flights * node.saved_bytes for place, node in enumerate(problem.graph.nodes)}
        for place, node in enumerate(problem.graph.nodes):
            for name in node.at_rest:
                readers.setdefault(name, []).append(place)
        shared: list[Term] = []
        for name, places in readers.items():
            held = problem.graph.at_rest[name] / unit
            if len(places) == 1:
                # Its node's own steps tell where the parameter is: no variable is needed.
                weights[places[0]] += held
            elif held:
                shared.append((self._held_by_any(stage, places), held))
        terms, constant = self._total(stage, weights)
        terms += shared
        terms += [
            (name, flights * problem.graph.values[place].bytes)
            for (place, where), name in self.crossing.items()
            if where == stage
        ]
        if self.excess is not None:
            terms.append((self.excess, -1.0))
        self._row(terms, -math.inf, 1.0 - constant)

    def _held_by_any(self, stage: int, places: list[int]) -> int:
        """Add a variable that is 1 where one of the nodes is on the stage."""
        held = self.program.add_variables(np.zeros(1))[0]
        self.shared.append((held, stage, places))
        for place in places:
            terms, constant = self._at(place, stage, -1.0)
            self._row([(held, 1.0), *terms], -constant, math.inf)
        return held

    def _values(self, start: Assignment) -> Array:
        """Return the variables of an assignment, as a hint to the solver."""
        values = np.zeros(len(self.program.costs))
        for node, stage in enumerate(start.stage):
            values[self.steps[node, :stage]] = 1.0
        for place in range(len(self.problem.graph.values)):
            for stage, again in self.problem.route(start, place):
                values[(self.again if again else self.crossing)[place, stage]] = 1.0
        for name, stage, places in self.shared:
            values[name] = any(start.stage[place] == stage for place in places)
        if self.excess is not None:
            memory = zip(self.problem.memory(self.problem.totals(start)), self.problem.devices, strict=True)
            values[self.excess] = max(held / device.memory for held, device in memory) - 1
        return values


def stage_bounds(problem: StageProblem) -> tuple[IntArray, IntArray] | None:
    """Return the first and the last stage that every node can be on; None if a node fits nowhere.

    A node runs behind its ancestors: if these and the node have more seconds than stages 0 to k take within the
    tolerance, it is behind stage k. The same holds from the end, with its descendants.

    Source: Rhino 5.2, with the capacities of the stages in place of the paper's perfectly balanced stages and an
    epsilon, so that no assignment within the tolerance is lost.
    """
    graph = problem.graph
    seconds = np.array([node.seconds for node in graph.nodes])
    reach = np.eye(len(graph.nodes), dtype=bool)  # [i, j]: j depends on i
    for value in sorted(graph.values, key=lambda value: -value.source):
        for user in value.users:
            reach[value.source] |= reach[user]
    capacity = np.array([problem.capacity(stage) for stage in range(problem.stages)])
    slack = _ROUNDING * capacity.sum()
    before, behind = seconds @ reach, reach @ seconds
    first = np.searchsorted(np.cumsum(capacity) + slack, before)
    last = problem.stages - 1 - np.searchsorted(np.cumsum(capacity[::-1]) + slack, behind)
    return None if (first > last).any() else (first, last)


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
                start = 0
                if goal == "crossing":
                    # Earlier starts have more work than the stage may take.
                    least = self.work[end] - problem.capacity(stage) * (1 + _ROUNDING)
                    start = min(int(np.searchsorted(self.work, least)), end - 1)
                starts = slice(start, end)
                if not np.isfinite(worst[stage, starts]).any():
                    continue
                used = self._memory(stage, starts, rest)
                last = used if goal == "memory" else self._imbalances(stage, starts, used, goal)
                most = np.maximum(worst[stage, starts], last)
                sums = crossing[stage, starts] + self.crossing[stage, starts]
                if goal == "crossing":
                    place = _least_sum(most, sums)
                else:
                    place = int(np.where(most == most.min(), sums, np.iinfo(np.int64).max).argmin())
                crossing[stage + 1, end], worst[stage + 1, end] = sums[place], most[place]
                best_start[stage + 1, end] = starts.start + place
        if not math.isfinite(worst[problem.stages, self.count]):
            return None
        return self._assignment(best_start)

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
        # Carried over from end to end, since a parameter's bytes change only the stretches behind its last reader.
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
