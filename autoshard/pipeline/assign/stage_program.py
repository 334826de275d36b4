"""The choice of stages as an integer program."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from autoshard.pipeline.assign.stage_bounds import stage_bounds
from autoshard.pipeline.assign.stage_problem import Assignment, StageProblem
from autoshard.solver.linear import LinearProgram, LinearSolution, minimise
from autoshard.solver.problem import Array, IntArray

Goal = Literal["crossing", "memory"]

Term = tuple[int, float]


class StageProgram:
    """The integer program of a problem.

    The paper has an integer B_i for the stage of node i and, by a big M, a 0-1 variable for every edge that crosses.
    Here B_i is a sum of steps: Y_ik = 1 where B_i >= k. Then B_j >= B_i along an edge is Y_jk >= Y_ik for every k, and
    a value crosses boundary k if some reader is behind it and the source is not: C_vk >= Y_uk - Y_ik, as a continuous
    variable and without an M. It counts a value once on every boundary that it is handed over, however many read it
    there, and its relaxation is that of a cut, much tighter than an M's. Of a value that can be recomputed, every stage
    that reads it has it because it is made there, comes from the stage before, which has it, or is recomputed (R_vk).
    Rows bound the seconds and the bytes of every stage; a parameter is at rest once on every stage that reads it.

    Args:
        problem: the graph, the devices and the tolerance.
        goal: what to minimise: `"crossing"`, the objective; `"memory"`, by how much of its memory the fullest stage
            exceeds it, whatever the tolerance.

    Source: Rhino 5.1; unequal devices: Whale 3.3.2.
    """

    def __init__(self, problem: StageProblem, goal: Goal = "crossing") -> None:
        self.problem = problem
        self.goal = goal
        self.program = LinearProgram()
        self.nodes = len(problem.graph.nodes)
        self.stages = problem.stages
        bounds = stage_bounds(problem) if goal == "crossing" else self._any_stage()
        self.is_infeasible = bounds is None
        if bounds is None:
            return
        longest = max((problem.transfer(value, 1) for value in problem.graph.values if self.stages > 1), default=0.0)
        self.scale = 1e3 / longest if longest else 1.0
        self.excess = self._excess()
        self.steps = self._steps(*bounds)
        self.crossing: dict[tuple[int, int], int] = {}
        self.again: dict[tuple[int, int], int] = {}
        self.shared: list[
            tuple[int, int, list[int]]
        ] = []  # variable, stage, and the nodes of which any has to be there
        for place in range(len(problem.graph.values)):
            self._add_value(place)
        for stage in range(self.stages):
            self._add_limits(stage)

    def solve(self, *, time_limit: float, start: Assignment | None = None) -> tuple[Assignment | None, float, bool]:
        """Solve the program.

        Args:
            time_limit: seconds.
            start: a known assignment.

        Returns:
            An assignment (None where none was found), a lower bound of the goal, and whether there is nothing better:
            no assignment at all, where none was found.
        """
        if self.is_infeasible:
            return None, math.inf, True
        hint = None if start is None else self._values(start)
        answer = minimise(self.program, time_limit=time_limit, hint=hint)
        if answer.infeasible:
            return None, math.inf, True
        bound = answer.bound / self.scale if self.goal == "crossing" else answer.bound
        return self._assignment(answer), bound, answer.optimal

    def _excess(self) -> int | None:
        """The variable that the goal of memory minimises."""
        if self.goal == "crossing":
            return None
        return self.program.add_variables(np.ones(1), lower=-1.0, upper=math.inf)[0]

    def _any_stage(self) -> tuple[IntArray, IntArray]:
        return np.zeros(self.nodes, dtype=np.int64), np.full(self.nodes, self.stages - 1, dtype=np.int64)

    def _steps(self, first: IntArray, last: IntArray) -> IntArray:
        """Numbers of the variables Y_ik, k from 1: Y_ik >= Y_i,k+1, and what is known of every node's stage."""
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
        """factor · [B_node = stage], as terms and a constant."""
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
        for user in value.users:
            for stage in range(1, self.stages):
                source, reader = int(self.steps[value.source, stage - 1]), int(self.steps[user, stage - 1])
                self._row([(reader, 1.0), (source, -1.0)], 0.0, math.inf)
        if value.recompute_seconds is None:
            self._add_crossings(place)
        else:
            self._add_choices(place)

    def _add_crossings(self, place: int) -> None:
        """C_vk >= Y_uk - Y_ik for every reader; of an output, which the last stage reads, C_vk >= 1 - Y_ik."""
        value = self.problem.graph.values[place]
        for stage in range(1, self.stages):
            made = [(self.crossing[place, stage], 1.0), (int(self.steps[value.source, stage - 1]), 1.0)]
            if value.output:
                self._row(made, 1.0, math.inf)
                continue
            for user in value.users:
                self._row([*made, (int(self.steps[user, stage - 1]), -1.0)], 0.0, math.inf)

    def _add_choices(self, place: int) -> None:
        """Where the value is read, it is made, received or recomputed; it is received from where it is there."""
        value = self.problem.graph.values[place]
        for stage in range(1, self.stages):
            made, _ = self._at(value.source, stage)
            there = [*made, (self.crossing[place, stage], 1.0), (self.again[place, stage], 1.0)]
            for user in value.users:
                read, _ = self._at(user, stage, -1.0)
                self._row([*there, *read], 0.0, math.inf)
            if value.output and stage == self.stages - 1:
                self._row(there, 1.0, math.inf)
            before, constant = self._at(value.source, stage - 1)
            if stage > 1:
                before += [(self.crossing[place, stage - 1], 1.0), (self.again[place, stage - 1], 1.0)]
            self._row([*before, (self.crossing[place, stage], -1.0)], -constant, math.inf)

    def _add_limits(self, stage: int) -> None:
        """A stage is not empty, and keeps its seconds and its memory."""
        terms, constant = self._total(stage, dict.fromkeys(range(self.nodes), 1.0))
        self._row(terms, 1.0 - constant, math.inf)
        self._add_seconds(stage)
        if math.isfinite(self.problem.devices[stage].memory):
            self._add_memory(stage)

    def _total(self, stage: int, weights: dict[int, float]) -> tuple[list[Term], float]:
        """Sum of the weights of the nodes on a stage."""
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
        for (place, where), name in self.again.items():
            if where == stage:
                terms.append((name, (problem.graph.values[place].recompute_seconds or 0.0) / unit))
        self._row(terms, -math.inf, 1.0 + problem.tolerance - constant)

    def _add_memory(self, stage: int) -> None:
        problem = self.problem
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
        """A variable that is 1 where one of the nodes is on the stage."""
        held = self.program.add_variables(np.zeros(1))[0]
        self.shared.append((held, stage, places))
        for place in places:
            terms, constant = self._at(place, stage, -1.0)
            self._row([(held, 1.0), *terms], -constant, math.inf)
        return held

    def _values(self, start: Assignment) -> Array:
        """The variables of an assignment."""
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

    def _assignment(self, answer: LinearSolution) -> Assignment | None:
        if answer.values is None:
            return None
        stage = tuple(round(answer.values[self.steps[node]].sum()) for node in range(self.nodes))
        again = frozenset(key for key, name in self.again.items() if answer.values[name] > 0.5)
        return Assignment(stage, again)
