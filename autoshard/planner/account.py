"""What a step does under some decisions: its operations in order, and its collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autoshard.capture.joint import JointOutput
from autoshard.patterns.decisions import Flow, phase_of
from autoshard.patterns.graph_rules import Use, Value, uncast
from autoshard.patterns.strategy import describe
from autoshard.planner.planning_problem import HideableKind
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.plans.contents import Collective, Decision
from autoshard.reshard.path import Path, Resharder
from autoshard.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class StepReshard:
    """One reshard of the step.

    Attributes:
        key: the copy that it makes.
        source: key of the value or copy that it reads.
        value: what it is a copy of.
        path: the collectives; at least one.
        position: number of the operator that asks for it, or before which it is done.
        phase: `"forward"` or `"backward"`.
        module: path of the module that it belongs to.
        gradient: whether it hands a gradient to its optimizer, and is reduced together with others.
    """

    key: str
    source: str
    value: Value
    path: Path
    position: int
    phase: str
    module: str
    gradient: bool


@dataclass(frozen=True, slots=True)
class _ValueUse:
    """A value that is wanted as `target` by an operator, or by an output of the step; `node` says where.

    `gradient` says whether the user is an optimizer, or the cast of what it is given.
    """

    user: Use | JointOutput
    node: fx.Node
    value: Value
    phase: str
    target: Spec
    position: int
    gradient: bool

    def is_gradient(self, spec: Spec) -> bool:
        """Whether a copy as `spec` is what an optimizer is given, but for a cast."""
        return self.gradient and spec is self.target


class StepAccount:
    """The step that some decisions stand for, walked once in program order.

    Args:
        flow: the graph and the decisions.
        tables: prices of strategies.
        resharder: finds the reshards.

    Attributes:
        position: of every operator in the program.
        legs: the reshards, in the order in which they are asked for; every copy is made once.
        last_use: key of a value or copy -> last position at which it is read.
        read: operand of an operator -> key of the value or copy that it reads.
        handed: output of the step -> key of the value or copy that it is.
    """

    def __init__(self, flow: Flow, tables: StrategyTables, resharder: Resharder) -> None:
        self.flow = flow
        self.rules = flow.rules
        self.mesh = flow.mesh
        self.tables = tables
        self.resharder = resharder
        self.position = {node: position for position, node in enumerate(self.rules.operators)}
        self.reshards: list[StepReshard] = []
        self.last_use: dict[str, int] = {}
        self.operand_keys: dict[Use, str] = {}
        self.output_keys: dict[JointOutput, str] = {}
        self._walk()

    def _walk(self) -> None:
        held: dict[str, str] = {}  # key of a copy -> key of the tensor that it is
        for want in self._uses():
            key = want.value.name
            for copy, source, spec in self.flow.reshards(want.value, want.phase, want.target):
                self._note_use(key, want.position)
                if copy not in held:
                    gradient = want.is_gradient(spec)
                    resharder = self.resharder.gradients if gradient else self.resharder
                    path = resharder.path(want.value.meta.shape, want.value.meta.dtype.itemsize, source, spec)
                    held[copy] = copy if path.steps else key
                    if path.steps:
                        module = self._module(want.node)
                        self.reshards.append(
                            StepReshard(copy, key, want.value, path, want.position, want.phase, module, gradient)
                        )
                key = held[copy]
            self._note_use(key, want.position)
            if isinstance(want.user, Use):
                self.operand_keys[want.user] = key
            else:
                self.output_keys[want.user] = key
                if want.user.kind != "gradient":
                    self._note_use(key, len(self.rules.operators))  # the caller holds it during the backward half

    def _note_use(self, key: str, position: int) -> None:
        self.last_use[key] = max(self.last_use.get(key, 0), position)

    def _module(self, node: fx.Node) -> str:
        return "" if node.op == "placeholder" else self.flow.graph.module_path(node)

    def _uses(self) -> Iterator[_ValueUse]:
        """Every use in program order; what the step hands back is brought to its place as soon as it is made."""
        for source in self.flow.graph.inputs:
            yield from self._output_uses(Value(source.node), 0)
        for node in self.rules.operators:
            position, phase = self.position[node], self.flow.graph.phase(node)
            gradient = self.rules.restores_dtype(node)
            for operand, value in enumerate(self.rules.operands[node]):
                target = self.flow.consumed_spec(node, operand)
                yield _ValueUse(Use(node, operand), node, value, phase, target, position, gradient)
            for index in range(len(self.rules.calls[node].results)):
                yield from self._output_uses(Value(node, index), position + 1)

    def _output_uses(self, value: Value, position: int) -> Iterator[_ValueUse]:
        for output in self.rules.outputs_of.get(value, ()):
            delivered, gradient = self.flow.output_spec(output), output.kind == "gradient"
            yield _ValueUse(output, value.node, value, phase_of(output), delivered, position, gradient)

    # Collectives

    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of the step, equal ones counted."""
        cost, counts = self.tables.cost, Counter[tuple[str, int, int, str, str, bool]]()
        for leg in self.reshards:
            for step in leg.path.steps:
                if step.kind not in LOCAL_STEPS:
                    counts[step.kind, step.axis, step.bytes, leg.module, leg.phase, leg.gradient] += 1
        for node in self.rules.operators:
            if not self._is_pinned(node):
                module, phase = self.flow.graph.module_path(node), self.flow.graph.phase(node)
                for kind, axis, size in self.tables.exchanges(self.rules.rules[node], self._choices(node)):
                    counts[kind, axis, size, module, phase, False] += 1
        return tuple(
            Collective(
                kind,
                self.mesh.names[axis],
                size,
                count,
                module,
                phase,
                (cost.gradient_collective if gradient else cost.collective)(kind, size, axis),
            )
            for (kind, axis, size, module, phase, gradient), count in counts.items()
        )

    def hideable(self, kind: HideableKind) -> Iterator[tuple[float, int]]:
        """Seconds of the reshards of a kind that compute may hide, and the moment of each, as of `Hideable`."""
        needs = self.rules.first_parameter_uses
        for leg in self.reshards:
            if kind == "reductions" and leg.gradient:
                yield leg.path.seconds, leg.position
            needed = needs.get((leg.value.node, leg.phase))
            if kind == "gathers" and not leg.gradient and needed is not None:
                yield leg.path.seconds, needed

    def gathered_parameters(self) -> Iterator[tuple[str, str]]:
        """The parameters, under all their names, that the step gathers: `"again"` where both halves do, or `"once"`."""
        phases: dict[fx.Node, set[str]] = defaultdict(set)
        for leg in self.reshards:
            if not leg.gradient and any(step.kind == "all_gather" for step in leg.path.steps):
                phases[uncast(leg.value.node)].add(leg.phase)
        for source in self.flow.graph.inputs:
            if source.kind == "parameter" and source.node in phases:
                how = "again" if len(phases[source.node]) > 1 else "once"
                yield from ((name, how) for name in self.flow.graph.aliases[source.name])

    def _is_pinned(self, node: fx.Node) -> bool:
        return self.rules.pin_spec(node, self.mesh) is not None

    def _choices(self, node: fx.Node) -> tuple[int, ...]:
        return self.flow.decisions.choices[node.name]

    def decisions(self) -> Iterator[Decision]:
        """The choice made for every operator, for people."""
        graph = self.flow.graph
        for node in self.rules.operators:
            pinned = self.rules.pin_spec(node, self.mesh)
            op = self.rules.calls[node].op
            text = f"pinned to {pinned}"
            if pinned is None:
                text = describe(self.rules.rules[node], self._choices(node), self.mesh)
            name = f"{op.namespace}.{op.overloadpacket.__name__}"
            yield Decision(node.name, name, graph.module_path(node), graph.phase(node), text, self.seconds(node))

    def seconds(self, node: fx.Node) -> float:
        """Seconds of an operator: its compute, and the collectives inside its local program."""
        if self._is_pinned(node):
            return 0.0
        call, rule = self.rules.calls[node], self.rules.rules[node]
        return self.tables.strategy_seconds(call, rule, self._choices(node), self.rules.zeros[node])


LOCAL_STEPS = ("slice", "make_partial")
