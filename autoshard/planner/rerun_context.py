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

import numpy as np

from autoshard.capture.recomputation import RECOMPUTES, recompute_layers, rerunnable
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.strategy import ABSENT
from autoshard.planner.planner import Planner
from autoshard.planner.planning_context import CandidatePlan


class RerunContext(Planner):
    """Solves the problem in which operators may run again.

    Args:
        planner: the planner of the graph in which none does; its tables are shared.
    """

    def __init__(self, planner: Planner) -> None:
        self.without = planner
        graph = recompute_layers(planner.graph, rerunnable(planner.graph))
        constraints = replace(planner.constraints, optional_reruns=True)
        super().__init__(
            graph, planner.mesh, planner.cluster, constraints, planner.settings, planner.progress, like=planner
        )
        self.deadline, self.timings = planner.deadline, planner.timings
        # Second operators, by the name of the first.
        self.reruns = {node.meta[RECOMPUTES]: node for node in self.rules.operators if RECOMPUTES in node.meta}
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
