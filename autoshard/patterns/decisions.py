"""The decisions for a joint graph, as data, and the specs of every tensor that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autoshard.capture.joint import JointGraph, JointOutput
from autoshard.errors import PlanError, reason_of
from autoshard.patterns.graph_rules import GraphRules, Value
from autoshard.patterns.rule import Rule
from autoshard.patterns.strategy import Choices, operand_spec, result_spec
from autoshard.size import Sizes
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import dim_of
from autoshard.specs.spec import Spec, block_of, is_shard, split_factor_of


@dataclass(frozen=True, slots=True)
class Decisions:
    """A strategy or spec for everything that a joint graph does not fix.

    Attributes:
        choices: operator node -> its strategy, one choice per mesh axis.
        rest: placeholder node -> the spec of the tensor before the step.
        outputs: output name -> the spec in which it is returned.
        hubs: value, with `@forward` or `@backward` where the phases differ -> the spec of the copy that its uses
            share, so that one reshard serves them all.
        hosted: placeholder nodes of the parameters that are updated on the host, with their optimizer state there.
    """

    choices: dict[str, Choices] = field(default_factory=dict)
    rest: dict[str, Spec] = field(default_factory=dict)
    outputs: dict[str, Spec] = field(default_factory=dict)
    hubs: dict[str, Spec] = field(default_factory=dict)
    hosted: frozenset[str] = frozenset()

    def to_data(self) -> dict[str, Any]:
        """The decisions as JSON data."""
        specs = {
            kind: {name: str(spec) for name, spec in table.items()}
            for kind, table in (("rest", self.rest), ("outputs", self.outputs), ("hubs", self.hubs))
        }
        hosted = {"hosted": sorted(self.hosted)} if self.hosted else {}
        return {"choices": {name: list(choices) for name, choices in self.choices.items()}, **specs, **hosted}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Decisions:
        """The decisions that `to_data` wrote.

        Raises:
            PlanError: the data is of another form.
        """
        try:
            tables = {
                kind: {name: Spec.parse(text) for name, text in data[kind].items()}
                for kind in ("rest", "outputs", "hubs")
            }
            choices = {name: _choices(name, choices) for name, choices in data["choices"].items()}
            return Decisions(choices, **tables, hosted=frozenset(data.get("hosted", ())))
        except ValueError as error:
            raise PlanError(
                f"the plan's decisions cannot be read ({reason_of(error)}): was the file edited?"
            ) from error
        except (KeyError, TypeError, AttributeError) as error:
            # Python's message about a missing key or a wrong type tells a user nothing.
            raise PlanError("the plan's decisions cannot be read: was the file edited?") from error


def _choices(name: str, choices: Any) -> Choices:
    """Choices from JSON; `ValueError` unless they are a list of integers."""
    if not isinstance(choices, list) or any(type(choice) is not int for choice in choices):
        raise ValueError(f"the choices of {name} are {choices!r}, and have to be a list of whole numbers")
    return tuple(choices)


def phase_of(output: JointOutput) -> str:
    """The phase in which an output of the joint graph is made."""
    return "backward" if output.kind == "gradient" else "forward"


class StrategySpecs:
    """The specs of operands and results under strategies, cached for all operators with one rule and choice."""

    def __init__(self, mesh: MeshShape) -> None:
        self._mesh = mesh
        # By identity of rules, which layers share; the values keep the rules alive.
        self._known: dict[tuple[int, Choices], tuple[Rule, _SpecsOfOperator]] = {}

    def of(self, rule: Rule, choices: Choices) -> _SpecsOfOperator:
        """Return the specs of all operands of an operator, and those of all of its results."""
        known = self._known.get((id(rule), choices))
        if known is None:
            operands = (operand_spec(rule, choices, self._mesh, index) for index in range(len(rule.operands)))
            results = (result_spec(rule, choices, self._mesh, index) for index in range(len(rule.results)))
            known = self._known[id(rule), choices] = rule, (tuple(operands), tuple(results))
        return known[1]


_SpecsOfOperator = tuple[tuple[Spec, ...], tuple[Spec, ...]]


class Flow:
    """The specs in which every tensor of a joint graph is produced and consumed under some decisions.

    Args:
        rules: the graph and its rules.
        decisions: the decisions.
        mesh: the mesh axes.
        specs: the specs of strategies on this mesh, which flows of graphs with equal layers may share.
    """

    def __init__(
        self, rules: GraphRules, decisions: Decisions, mesh: MeshShape, specs: StrategySpecs | None = None
    ) -> None:
        self.rules = rules
        self.decisions = decisions
        self.mesh = mesh
        self._sources = {source.node: source for source in rules.graph.inputs}
        self._input_nodes = {source.name: source.node.name for source in rules.graph.inputs if source.kind != "tangent"}
        self._strategy_specs = specs or StrategySpecs(mesh)
        self._specs: dict[fx.Node, _SpecsOfOperator] = {}  # by operator

    @property
    def graph(self) -> JointGraph:
        return self.rules.graph

    def at(self, sizes: Sizes) -> Flow:
        """The same decisions with dynamic sizes taken at `sizes`, representative of all sizes of a program.

        Strategies are in terms of factors, which are the same at all sizes. The spec of a shared copy is that of the
        tensor's producer, or of its first user, with an equal spec at the example's sizes. Where there is none and the
        spec does more than split dims into contiguous shards, there is no shared copy, and every user reshards.
        """
        if self.graph.dynamic is None:
            return self
        generic = Flow(self.rules.at(sizes), self.decisions, self.mesh)
        hubs: dict[str, Spec] = {}
        for value in self.rules.values():
            for key in (value.name, f"{value.name}@forward", f"{value.name}@backward"):
                if key in self.decisions.hubs:
                    spec = self._generic_hub_spec(value, self.decisions.hubs[key], generic)
                    hubs |= {} if spec is None else {key: spec}
        generic.decisions = replace(self.decisions, hubs=hubs)
        return generic

    def _generic_hub_spec(self, value: Value, spec: Spec, generic: Flow) -> Spec | None:
        pairs = [(self.produced_spec(value), generic.produced_spec(value))]
        pairs += [
            (self.consumed_spec(use.node, use.operand), generic.consumed_spec(use.node, use.operand))
            for use in self.rules.uses.get(value, ())
        ]
        plain = all(split_factor_of(placement) == 1 and block_of(placement) is None for placement in spec)
        dims = [dim_of(placement, len(value.meta.shape)) for placement in spec if is_shard(placement)]
        alike = (general for example, general in pairs if str(example) == str(spec))
        return next(alike, spec if plain and len(dims) == len(set(dims)) else None)

    def produced_spec(self, value: Value) -> Spec:
        """The spec in which a tensor is produced, or held before the step."""
        return self._specs_of(value.node)[1][value.result]

    def consumed_spec(self, node: fx.Node, operand: int) -> Spec:
        """The spec in which an operator takes an operand."""
        return self._specs_of(node)[0][operand]

    def consumed_specs(self, node: fx.Node) -> tuple[Spec, ...]:
        """The specs in which an operator takes its operands."""
        return self._specs_of(node)[0]

    def _specs_of(self, node: fx.Node) -> _SpecsOfOperator:
        specs = self._specs.get(node)
        if specs is None:
            if node in self._sources:
                specs = (), (self.decisions.rest[node.name],)
            elif (pinned := self.rules.pin_spec(node, self.mesh)) is not None:
                specs = (pinned,), (pinned,)
            else:
                specs = self._strategy_specs.of(self.rules.rules[node], self.decisions.choices[node.name])
            self._specs[node] = specs
        return specs

    def output_spec(self, output: JointOutput) -> Spec:
        """The spec in which the step returns an output."""
        if output.kind == "output":
            return self.decisions.outputs[output.name]
        return self.decisions.rest[self._input_nodes[output.name]]

    def hub(self, value: Value, phase: str) -> tuple[str, Spec] | None:
        """Key and spec of the copy that the uses of a value in a phase share, if there is one."""
        hubs, name = self.decisions.hubs, value.name
        for key in (name, f"{name}@{phase}"):
            if key in hubs:
                return key, hubs[key]
        return None

    def reshards(self, value: Value, phase: str, target: Spec) -> list[tuple[str, Spec, Spec]]:
        """The reshards from the spec in which a value is produced to `target`: (key of the copy, from, to).

        Reshards with equal keys are one, whose result serves every use.
        """
        node, index = value
        spec, hub = self._specs_of(node)[1][index], self.hub(value, phase)
        if target is spec and (hub is None or hub[1] is spec):
            return []
        # The key names the phase where forward and backward have separate copies.
        key, shared = (value.name, spec) if hub is None else hub
        reshards = []
        if shared is not spec:
            key = f"{key} {shared}"
            reshards.append((key, spec, shared))
        if target is not shared:
            reshards.append((f"{key} -> {target}", shared, target))
        return reshards
