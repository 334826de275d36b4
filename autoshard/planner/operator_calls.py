"""The operators of a captured step on one device: where their strategies come from, and what each call costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autoshard.capture.joint_graph import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.patterns.borrowed import batch_advice
from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.registry import is_borrowed, rule_for
from autoshard.patterns.rule import OpCall
from autoshard.patterns.strategy import WHOLE
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.specs.axes import MeshShape

# Rules are the same for every mesh; prices are those of whole operators.
_MESH = MeshShape.of({"any": 2})


class OperatorCall(NamedTuple):
    """A call of an operator in a step.

    Attributes:
        name: of the operator, such as `"aten.mm.default"`.
        source: of its strategies: `"rule"`, `"borrowed"` from torch's registry, or `"replicated"` where it has none.
        module: path of the module that calls it, `""` for the root.
        seconds: predicted time on one device.
        advice: for the user, if it is replicated; empty where there is none.
    """

    name: str
    source: str
    module: str
    seconds: float
    advice: str


class OperatorSurvey:
    """Lists the operators of captured steps, priced for one device of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._tables = StrategyTables(CostModel(cluster, _MESH))

    def calls(self, graph: JointGraph) -> Iterator[OperatorCall]:
        """Yield the calls of operators in a graph, in its order."""
        rules = GraphRules(graph, _MESH)
        for node in rules.operators:
            call = rules.calls[node]
            name = str(call.op)
            yield OperatorCall(
                name,
                "rule" if graph.pin(node) is not None else _source(call),
                graph.module_path(node),
                self._tables.strategy_seconds(call, rules.rules[node], (WHOLE,)),
                batch_advice(name, rules.batch_rules[name]) if name in rules.batch_rules else "",
            )


def _source(call: OpCall) -> str:
    if rule_for(call) is None:
        return "replicated"
    return "borrowed" if is_borrowed(call.op) else "rule"
