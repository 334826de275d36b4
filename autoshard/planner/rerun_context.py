"""The problem in which every operator of a layer may run again, and the plans that its solutions stand for.

Whether an operator runs again is decided together with how all operators are split. The graph of this problem has all
operators that can run again twice: the second one, in the backward half, may be absent. The hub of a value in the
backward half takes the value from the forward half, kept or gathered again, or from the operator that runs again; or
nothing reads it there. What a solution costs and holds is that of the graph in which only the chosen operators run
again, so that every prediction is that of a program that can run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

import numpy as np

from autoshard.capture.recomputation import RECOMPUTES, recompute_layers, rerunnable
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.graph_rules import Value
from autoshard.patterns.strategy import ABSENT
from autoshard.planner.planner import Planner
from autoshard.planner.planning_context import CandidatePlan


class RerunContext(Planner):
    """Solves the problem in which operators may run again, at prices of memory.

    Args:
        planner: the planner of the graph in which none does; its tables are shared.
        names: the operators that may run again; by default all that can.
    """

    proposes = True  # plans are judged by their accounts, and many are made

    def __init__(self, planner: Planner, names: Collection[str] | None = None) -> None:
        self.without = planner
        names = rerunnable(planner.graph) if names is None else names
        graph = recompute_layers(planner.graph, names)
        constraints = replace(planner.constraints, optional_reruns=bool(names))
        super().__init__(
            graph, planner.mesh, planner.cluster, constraints, planner.settings, planner.progress, like=planner
        )
        self.deadline, self.timings = planner.deadline, planner.timings
        # Second operators, by the name of the first.
        again = {node.meta[RECOMPUTES]: node for node in self.rules.operators if RECOMPUTES in node.meta}
        self.reruns = again if names else {}
        self._settled: dict[frozenset[str], Planner] = {frozenset(): planner}

    def evaluate(self, decisions: Decisions, cost: float, lower_bound: float, method: str) -> CandidatePlan:
        """Return the plan in which the operators run again that these decisions of the whole problem choose."""
        return self.evaluate_reruns(self._names_to_rerun(decisions), decisions, cost, lower_bound, method)

    def evaluate_reruns(
        self, names: Collection[str], decisions: Decisions, cost: float, lower_bound: float, method: str
    ) -> CandidatePlan:
        """Return the plan in which the operators of these names run again.

        Args:
            names: the names of the operators.
            decisions: decisions for at least all that the plan's graph has.
            cost, lower_bound, method: as in `CandidatePlan`.
        """
        planner = self.planner_with(names)
        return planner.evaluate(self.settle(decisions, planner), cost, lower_bound, method)

    @cached_property
    def forward_places(self) -> dict[str, int]:
        """The place in the forward half of every operator, and of every input of the step, by its name.

        An operator of the backward half has the place of the first operator of the forward half whose gradient it, or
        what it reads, needs; one that runs again that of the first run; an input that of its first reader. Those that
        depend on inputs alone have none.
        """
        places: dict[str, int] = {}
        last_use: dict[Value, int] = {}
        rules = self.without.rules
        # Operators of the forward half come first.
        for place, node in enumerate(rules.operators):
            if self.graph.phase(node) == "forward":
                places[node.name] = place
                if node.name in self.reruns:
                    places[self.reruns[node.name].name] = place
                last_use |= dict.fromkeys(rules.operands[node], place)
                continue
            # What all layers read, such as rotary frequencies, is made in front of the first: its last use counts.
            read = [
                last_use.get(value, places.get(value.node.name))
                for value in rules.operands[node]
                if self.graph.phase(value.node) == "backward" or value.node.op == "call_function"
            ]
            known = [each for each in read if each is not None]
            if known:
                places[node.name] = min(known)
        for source in rules.graph.inputs:
            uses = rules.uses.get(Value(source.node), ())
            known = [places[use.node.name] for use in uses if use.node.name in places]
            if known:
                places[source.node.name] = min(known)
        return places

    @cached_property
    def whole_layers(self) -> CandidatePlan:
        """The cheapest plan in which all operators run again that can."""
        planner = self.planner_with(self.reruns)
        return planner.solve(planner.constraints)

    def settle(self, decisions: Decisions, planner: Planner) -> Decisions:
        """Return the decisions for a planner's graph among those for more than that."""
        operators = {node.name for node in planner.rules.operators}
        values = {value.name for value in planner.rules.values()}
        return Decisions(
            {name: choices for name, choices in decisions.choices.items() if name in operators},
            decisions.rest,
            decisions.outputs,
            {key: spec for key, spec in decisions.hubs.items() if key.partition("@")[0] in values},
        )

    def planner_with(self, names: Collection[str]) -> Planner:
        """Return the planner of the graph in which the operators of these names run again."""
        key = frozenset(names)
        if key not in self._settled:
            with self.time_phase("patterns"):
                graph = recompute_layers(self.without.graph, key)
                like = self.without
                planner = Planner(graph, like.mesh, like.cluster, like.constraints, like.settings, like=like)
            planner.deadline, planner.timings = self.deadline, self.timings
            self._settled[key] = planner
        return self._settled[key]

    def names_of(self, plan: CandidatePlan) -> list[str]:
        """Return the names that `evaluate_reruns` takes for a plan."""
        given = self.without.graph.recomputed
        return [name for name in plan.estimate.context.graph.recomputed if name not in given]

    def moments_of(self, plan: CandidatePlan) -> np.ndarray:
        """Return the bytes that a plan holds at every moment of the whole problem.

        At the moment of an operator that the plan lacks it holds what it holds at the next one that it has.
        """
        rules = plan.estimate.context.rules
        position = {node.name: place for place, node in enumerate(rules.operators)}
        held, places = plan.held_bytes, np.empty(len(self.rules.operators) + 1, dtype=np.intp)
        places[-1] = len(held) - 1
        for moment in range(len(self.rules.operators) - 1, -1, -1):
            places[moment] = position.get(self.rules.operators[moment].name, places[moment + 1])
        return held[places]

    def _names_to_rerun(self, decisions: Decisions) -> set[str]:
        """Return the names of the operators whose second run is not absent, and has a reader."""
        read = {key.partition("@")[0].partition(":")[0] for key in decisions.hubs}
        return {
            name
            for name, node in self.reruns.items()
            if ABSENT not in decisions.choices[node.name] and node.name in read
        }
