"""The problem of a joint graph, built: one walk makes its variables, another the edges between them (Rhino 4.2)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import fx
from torch.distributed.tensor import Placement

from autoshard.capture.joint import JointInput, JointOutput
from autoshard.patterns.decisions import Decisions, phase_of
from autoshard.patterns.graph_rules import GraphRules, Use, Value, value_of
from autoshard.patterns.strategy import WHOLE
from autoshard.planner.boundary_specs import BoundarySpecs
from autoshard.planner.edge_tables import FORBIDDEN, EdgeTables
from autoshard.planner.planning_problem import (
    BuiltProblem,
    Constraints,
    Hideable,
    LiveRange,
    OverlapDiscount,
    ReshardEdge,
    Variable,
)
from autoshard.planner.regather import Reuse, regather_choices
from autoshard.planner.strategy_tables import OperatorStrategies, SpecList, StrategyTables
from autoshard.planner.task_graph_restrictions import Restrictions, restrictions
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from autoshard.reshard.path import Resharder
from autoshard.solver import Edge, Problem
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec

_SMALL_FACTOR = (
    64  # a gathered activation so many times smaller than the step's largest tensor is kept, whatever it costs
)


class ProblemBuilder:
    """Builds the problem of one graph on one mesh, whole or with some mesh axes held fixed."""

    def __init__(
        self, rules: GraphRules, tables: StrategyTables, resharder: Resharder | LowerBoundResharder, wishes: Constraints
    ) -> None:
        self.rules = rules
        self.tables = tables
        self.mesh: MeshShape = tables.mesh
        self.resharder = resharder
        self.constraints = wishes
        self.inputs: dict[fx.Node, JointInput] = {source.node: source for source in rules.graph.inputs}
        self.input_nodes = {source.name: source.node for source in rules.graph.inputs if source.kind != "tangent"}
        self.position = {node: position for position, node in enumerate(rules.operators)}
        self.edge_tables = EdgeTables(resharder)
        self._lists: dict[tuple[Spec, ...], SpecList] = {}
        self._labels: dict[int, tuple[object, np.ndarray]] = {}
        self._plain: dict[tuple[frozenset[int], Reuse], BuiltProblem] = {}
        self._last: tuple[frozenset[int], Decisions | None, Reuse, BuiltProblem] | None = None

    def forget(self) -> None:
        """Drop the problems that were built; the tables stay."""
        self._plain, self._last = {}, None

    def with_constraints(self, wishes: Constraints) -> ProblemBuilder:
        """A builder for other wishes that shares the tables made so far; itself for its own."""
        if wishes is self.constraints:
            return self
        other = copy.copy(self)
        other.constraints, other._plain, other._last = wishes, {}, None
        return other

    def for_graph(self, rules: GraphRules, wishes: Constraints) -> ProblemBuilder:
        """A builder for another graph on the same mesh, at the same prices, that shares the tables made so far."""
        other = ProblemBuilder(rules, self.tables, self.resharder, wishes)
        other.edge_tables, other._lists, other._labels = self.edge_tables, self._lists, self._labels
        return other

    def build(
        self,
        free: frozenset[int],
        current: Decisions | None = None,
        prices: np.ndarray | None = None,
        hiding: OverlapDiscount | None = None,
        reuse: Reuse = "none",
    ) -> BuiltProblem:
        """The problem in which the mesh axes in `free` are open.

        On the other axes everything stays as in `current`, or, without decisions, whole.

        Args:
            free: indices of the open axes.
            current: the decisions so far.
            prices: of memory, in seconds per byte, at every moment of the step (a moment per operator and one after
                the last). What options and copies hold is then part of their seconds.
            hiding: what collectives of a kind count; all their seconds by default.
            reuse: of what the backward half may keep copies that the forward half made, or make them again (see
                `planner.hubs`). Where memory does not count ("none"), keeping is as good: it can have no prices then,
                and no limit, and nothing is said of what options hold.
        """
        assert prices is None or reuse != "none", "what copies hold is not known where memory does not count"
        built = self._build_unpriced(free, current, reuse)
        if hiding is not None:
            built = built.with_discount(hiding)
        return built if prices is None else built.with_memory_prices(prices)

    def _build_unpriced(self, free: frozenset[int], current: Decisions | None, reuse: Reuse) -> BuiltProblem:
        """The problem at no prices, made once."""
        if current is None:
            if (free, reuse) not in self._plain:
                self._plain[free, reuse] = _Build(self, free, None, reuse).run()
            return self._plain[free, reuse]
        if self._last is None or self._last[0] != free or self._last[1] is not current or self._last[2] != reuse:
            self._last = (free, current, reuse, _Build(self, free, current, reuse).run())
        return self._last[3]

    def intern_specs(self, specs: Sequence[Spec]) -> SpecList:
        """The specs as a shared list."""
        key = tuple(specs)
        if key not in self._lists:
            self._lists[key] = SpecList.of(specs)
        return self._lists[key]

    @cached_property
    def restrictions(self) -> Restrictions:
        """What task graphs ask for."""
        return restrictions(self.rules, self.constraints.task_graphs)

    @property
    def boundary_specs(self) -> BoundarySpecs:
        """How tensors may lie outside the step."""
        return BoundarySpecs(self.rules, self.tables, self.constraints, self.restrictions)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest tensor of the step."""
        return max(value.meta.bytes for value in self.rules.values())

    def labels(self, variable: Variable) -> np.ndarray:
        """One label per mesh axis for every option, the choice or the placement; made once for equal variables."""
        operator = variable.kind == "operator"
        named: object = variable.options if operator else variable.results[0]
        if id(named) not in self._labels:
            rows = variable.options if operator else _placement_ids(variable.results[0])
            labels = np.array(rows, dtype=np.int64).reshape(len(rows), self.mesh.ndim)
            self._labels[id(named)] = (named, labels)
        return self._labels[id(named)][1]


@dataclass(frozen=True, slots=True)
class _EdgeEnd:
    """One end of an edge.

    Attributes:
        variable: its number.
        specs: of the tensor that crosses, under every option.
        life: moments from which and until before which a copy that is made for it is held.
        gradient: whether an optimizer is given what arrives.
    """

    variable: int
    specs: SpecList
    life: tuple[int, int] = (0, 0)
    gradient: bool = False


class _Build:
    """One pass over the graph that makes variables and edges."""

    def __init__(
        self,
        builder: ProblemBuilder,
        free: frozenset[int],
        current: Decisions | None,
        reuse: Reuse,
    ) -> None:
        self.builder = builder
        self.rules = builder.rules
        self.mesh = builder.mesh
        self.current = current
        self.free = free
        self.end = len(self.rules.operators) + 1
        self.reuse = reuse
        self.memory_counts = reuse != "none"
        self.gradient_positions = {
            output.name: self.builder.position.get(value_of(output.node).node, 0)
            for output in self.rules.graph.outputs
            if output.kind == "gradient" and output.node is not None
        }
        self.regatherable: dict[Value, bool] = {}  # whether it is open how the backward half gets at a value
        self.phases = {node: self.rules.graph.phase(node) for node in self.rules.operators}
        self.variables: list[Variable] = []
        self.edges: list[Edge] = []
        self.hideable: dict[int, Hideable] = {}
        self.reshard_edges: dict[int, ReshardEdge] = {}
        self.edge_live_ranges: dict[int, tuple[LiveRange, ...]] = {}
        self.tables: dict[tuple[int, str], np.ndarray] = {}
        self.variable_of_node: dict[fx.Node, int] = {}
        self.variable_of_output: dict[str, int] = {}

    def run(self) -> BuiltProblem:
        for source in self.rules.graph.inputs:
            self.variable_of_node[source.node] = self._add(self._rest(source))
        for output in self.rules.graph.outputs:
            if output.kind == "output" and output.node is not None:
                self.variable_of_output[output.name] = self._add(self._output(output))
        for node in self.rules.operators:
            self.variable_of_node[node] = self._add(self._operator(node))
        for value in self.rules.values():
            self._connect(value)
        self._tie_tangents()
        self._tie_random_operators()
        rents = [variable.live_ranges for variable in self.variables]
        return BuiltProblem(
            self._problem(), self.variables, self.hideable, self.reshard_edges, rents, self.edge_live_ranges
        )

    def _problem(self) -> Problem:
        costs = tuple(np.asarray(variable.seconds, dtype=np.float64) for variable in self.variables)
        components = tuple(map(self.builder.labels, self.variables))
        if not self.memory_counts:
            return Problem(costs, tuple(self.edges), components=components)
        nothing: dict[int, np.ndarray] = {}  # equal vectors are one object, so that they are looked at once

        def usage(variable: Variable) -> np.ndarray:
            size = len(variable.options)
            return nothing.setdefault(size, np.zeros(size)) if variable.usage is None else variable.usage

        usages = tuple(map(usage, self.variables))
        lives = tuple(variable.life for variable in self.variables)
        return Problem(costs, tuple(self.edges), usages, lives, components=components)

    def _add(self, variable: Variable) -> int:
        self.variables.append(variable)
        return len(self.variables) - 1

    # Variables

    def _operator(self, node: fx.Node) -> Variable:
        rule, call, tables = self.rules.rules[node], self.rules.calls[node], self.builder.tables
        pinned = self.rules.pin_spec(node, self.mesh)
        if pinned is not None:
            options = (tuple([-1] * self.mesh.ndim),)
            return Variable("operator", node.name, options, np.zeros(1), (self.builder.intern_specs((pinned,)),))
        chosen = self._options(node)
        seconds = tables.seconds(call, rule, chosen, self.rules.zeros[node])
        variable = Variable("operator", node.name, chosen.choices, seconds, chosen.results)
        if self.memory_counts and not rule.free:
            variable.usage = self.builder.tables.result_bytes(call, chosen)
            variable.life = (self.builder.position[node], self._last_use(node) + 1)
            variable.live_ranges = (LiveRange(variable.usage, *variable.life),)
        return variable

    def _last_use(self, node: fx.Node) -> int:
        """Position of the last operator that reads a result of the node, or a view of it.

        How the backward half gets at a value may be open; then what it holds for that is counted with the choice,
        unless the value is a view, and perhaps one of several: what that looks at is held until it is read last.
        """
        last, waiting = self.builder.position[node], [node]
        while waiting:
            current = waiting.pop()
            for index in range(len(self.rules.calls[current].results)):
                value = Value(current, index)
                apart = self._may_regather(value) and not self._is_view(value)
                for use in self.rules.uses.get(value, ()):
                    if apart and self.phases[use.node] == "backward":
                        continue
                    last = max(last, self.builder.position[use.node])
                    if self.rules.rules[use.node].free:
                        waiting.append(use.node)
        return last

    def _bytes(self, value: Value, specs: SpecList) -> np.ndarray:
        return specs.bytes(value.meta, self.mesh)

    def _rest(self, source: JointInput) -> Variable:
        value = Value(source.node)
        now = None if self.current is None else self.current.rest[source.node.name]
        specs = self._specs_on_free_axes(self.builder.boundary_specs.of_input(source), now)
        listed = self.builder.intern_specs(specs)
        seconds = np.zeros(len(specs))
        variable = Variable("rest", source.node.name, specs, seconds, (listed,))
        if source.kind == "parameter":
            # Equal otherwise, a parameter stays whole: a shard at rest costs the launch of a gather.
            overhead = self.builder.tables.cost.compute(0.0, 0.0, value.meta.dtype)
            seconds += [overhead * len(spec.shard_axes) for spec in specs]
            summed = self.builder.constraints.summed.get(source.name, 0.0)
            if self.memory_counts or summed:
                held = self._bytes(value, listed)
                seconds += held * summed
                if self.memory_counts:
                    self._add_parameter_memory(variable, source, value, held)
        return variable

    def _add_parameter_memory(self, variable: Variable, source: JointInput, value: Value, held: np.ndarray) -> None:
        """Notes what a parameter, its gradient and its optimizer's state hold, for the bytes of every option."""
        variable.life, variable.usage = (0, self.end), held
        if source.name in self.gradient_positions:
            state = self._state(value, held)
            variable.usage = 2.0 * held + state
            variable.live_ranges = (
                LiveRange(held, self.gradient_positions[source.name], self.end),
                LiveRange(held + state, *variable.life),
            )
        else:
            variable.live_ranges = (LiveRange(held, *variable.life),)

    def _state(self, value: Value, held: np.ndarray) -> np.ndarray:
        """Bytes of the optimizer's state of a parameter, for the bytes of it that a device holds under every option."""
        shape, itemsize = value.meta.shape, value.meta.dtype.itemsize
        optimizer = self.builder.constraints.optimizer
        return np.array([optimizer.state_bytes(shape, (int(one) // itemsize,), itemsize) for one in held], dtype=float)

    def _output(self, output: JointOutput) -> Variable:
        specs = self.builder.boundary_specs.of_output(output)
        now = None if self.current is None else self.current.outputs[output.name]
        specs = self._specs_on_free_axes(specs, now)
        return Variable("output", output.name, specs, np.zeros(len(specs)), (self.builder.intern_specs(specs),))

    # Edges

    def _connect(self, value: Value) -> None:
        """Edges from a value to its uses, through a shared copy where several uses may want it alike."""
        forward, backward = self._targets(value)
        made = self.variable_of_node[value.node]
        source = _EdgeEnd(made, self.variables[made].results[value.result])
        uses = forward + backward
        whole = value.node in self.builder.inputs and not any(spec.shard_axes for spec in source.specs.distinct)
        if self._may_regather(value) and not whole:
            self._connect_halves(value, source, forward, backward)
        elif len({use.variable for use in uses}) > 1:
            self._connect_through(self._add_shared_copy(value.name, value, uses), value, source, uses)
        else:
            self._add_edges(value, source, uses)

    def _connect_through(self, hub: _EdgeEnd, value: Value, source: _EdgeEnd, uses: Sequence[_EdgeEnd]) -> None:
        self._add_edges(value, source, [hub])
        self._add_edges(value, hub, uses)

    def _may_regather(self, value: Value) -> bool:
        """Whether it is open how the backward half gets at the value: both halves use it, and it is large.

        Inputs of the step that are never sharded have no copies; that is seen where edges are made.
        """
        if self.reuse == "none" or value in self.regatherable:
            return self.regatherable.get(value, False)
        phases = {self.phases[use.node] for use in self.rules.uses.get(value, ())}
        handed = any(output.kind != "gradient" for output in self.rules.outputs_of.get(value, ()))
        self.regatherable[value] = len(phases) == 2 and not handed and self._is_large(value)
        return self.regatherable[value]

    def _is_view(self, value: Value) -> bool:
        """Whether the value holds no memory of its own in the step: an input, or a view."""
        return value.node in self.builder.inputs or self.rules.rules[value.node].free

    def _is_large(self, value: Value) -> bool:
        """Whether copies of the value are worth a choice: those of inputs, parameters above all, always are."""
        if value.node in self.builder.inputs:
            return True
        return self.reuse == "all" and value.meta.bytes * _SMALL_FACTOR >= self.builder.largest

    def _connect_halves(
        self, value: Value, source: _EdgeEnd, forward: Sequence[_EdgeEnd], backward: Sequence[_EdgeEnd]
    ) -> None:
        """A hub for each half; that of the backward half takes the copy of the other, or makes its own."""
        gradients = [use for use in backward if use.gradient]  # what an optimizer is given is no copy of the value
        backward = [use for use in backward if not use.gradient]
        specs = _specs([*forward, *backward])
        first = self._add_shared_copy(f"{value.name}@forward", value, forward, specs)
        options = regather_choices(specs)
        listed = self.builder.intern_specs([option.spec for option in options])
        used = min(use.life[0] for use in backward)
        held = (min(first.life[1], used), max(use.life[1] for use in backward))
        kept = self._bytes(value, listed) * [option.kept for option in options]
        number = self._add(Variable("again", value.name, options, np.zeros(len(options)), (listed,), held, kept))
        self._connect_through(first, value, source, forward)
        again = _EdgeEnd(number, listed, (used, held[1]))
        tables = self.builder.edge_tables.regather_edge(
            value.meta, source.specs, first.specs, self.mesh, own=not self._is_view(value)
        )
        self.edge_live_ranges[len(self.edges)] = (
            LiveRange(tables.between, held[0], again.life[0]),
            LiveRange(tables.after, *again.life),
        )
        self.edges.append(Edge(source.variable, number, tables.seconds))
        self.edges.append(Edge(first.variable, number, self.builder.edge_tables.tie_costs(len(specs))))
        self._add_edges(value, again, backward)
        self._add_edges(value, source, gradients)

    def _add_shared_copy(
        self, key: str, value: Value, uses: Sequence[_EdgeEnd], specs: Sequence[Spec] | None = None
    ) -> _EdgeEnd:
        specs = _specs(uses) if specs is None else specs
        listed = self.builder.intern_specs(specs)
        variable = self._add(Variable("hub", key, specs, np.zeros(len(specs)), (listed,)))
        return _EdgeEnd(variable, listed, (min(use.life[0] for use in uses), max(use.life[1] for use in uses)))

    def _targets(self, value: Value) -> tuple[list[_EdgeEnd], list[_EdgeEnd]]:
        """Where a value is wanted in the forward half, and in the backward half."""
        ends: dict[str, list[_EdgeEnd]] = {"forward": [], "backward": []}
        for use in self.rules.uses.get(value, ()):
            start = self.builder.position[use.node]
            last = self._last_use(use.node) if self.rules.rules[use.node].free else start
            end = _EdgeEnd(
                self.variable_of_node[use.node],
                self._operand_specs(use),
                (start, last + 1),
                self.rules.restores_dtype(use.node),
            )
            ends[self.phases[use.node]].append(end)
        for output in self.rules.outputs_of.get(value, ()):
            user = self._variable_of_output(output)
            start = self.builder.position.get(value.node, -1) + 1
            # A gradient's memory is counted with its parameter.
            life = (start, start if output.kind == "gradient" else self.end)
            end = _EdgeEnd(user, self.variables[user].results[0], life, output.kind == "gradient")
            ends[phase_of(output)].append(end)
        return ends["forward"], ends["backward"]

    def _operand_specs(self, use: Use) -> SpecList:
        pinned = self.rules.pin_spec(use.node, self.mesh)
        if pinned is not None:
            return self.builder.intern_specs((pinned,))
        return self._options(use.node).operands[use.operand]

    def _options(self, node: fx.Node) -> OperatorStrategies:
        """The strategies that are open to an operator."""
        rule, tables = self.rules.rules[node], self.builder.tables
        restriction = self.builder.restrictions.operators.get(node)
        if self.current is not None:
            start = self.current.choices[node.name]
        elif restriction is not None:
            start = tables.options(rule, restriction=restriction).choices[0]
        else:
            start = (WHOLE,) * self.mesh.ndim
        return tables.options_on_axes(rule, start, self.free, restriction)

    def _specs_on_free_axes(self, specs: list[Spec], now: Spec | None) -> list[Spec]:
        """The specs that differ from the present one on open axes only; all where none does (they are pinned)."""
        if now is None:
            now = Spec.all_replicated(self.mesh.ndim)
        fixed = [axis for axis in range(self.mesh.ndim) if axis not in self.free]
        return [spec for spec in specs if spec is now or all(spec[axis] == now[axis] for axis in fixed)] or specs

    def _variable_of_output(self, output: JointOutput) -> int:
        if output.kind == "output":
            return self.variable_of_output[output.name]
        return self.variable_of_node[self.builder.input_nodes[output.name]]

    def _add_edges(self, value: Value, source: _EdgeEnd, targets: Iterable[_EdgeEnd]) -> None:
        for target in targets:
            # A tensor may be handed back where it came from (an unchanged buffer): nothing to pay.
            if source.variable != target.variable:
                self._add_edge(value, source, target)

    def _add_edge(self, value: Value, source: _EdgeEnd, target: _EdgeEnd) -> None:
        meta, forbidden = value.meta, self._forbidden(value)
        seconds = self.builder.edge_tables.reshard_seconds(meta, source.specs, target.specs, target.gradient)
        # Equal layers share a table where nothing is added, or the same is.
        key = (id(seconds), forbidden)
        if key not in self.tables:
            self.tables[key] = seconds + FORBIDDEN[forbidden](source.specs, target.specs) if forbidden else seconds
        costs = self.tables[key]
        if costs.size > 1 or costs.any() or source.specs.distinct != target.specs.distinct:
            if target.gradient:
                self.hideable[len(self.edges)] = Hideable("reductions", seconds, target.life[0])
            elif (needed := self._gather_position(value, target)) is not None:
                self.hideable[len(self.edges)] = Hideable("gathers", seconds, needed)
            self.reshard_edges[len(self.edges)] = ReshardEdge(meta, source.specs, target.specs, target.gradient)
            if self.memory_counts and target.life[0] < target.life[1]:
                copied = self.builder.edge_tables.copy_bytes(meta, source.specs, target.specs, self.mesh)
                self.edge_live_ranges[len(self.edges)] = (LiveRange(copied, *target.life),)
            self.edges.append(Edge(source.variable, target.variable, costs))

    def _gather_position(self, value: Value, target: _EdgeEnd) -> int | None:
        """The moment at which a parameter, brought to where it is read, is needed; None of what is none."""
        read = self.rules.operators[target.life[0]] if target.life[0] < len(self.rules.operators) else None
        return None if read is None else self.rules.first_parameter_uses.get((value.node, self.phases[read]))

    def _forbidden(self, value: Value) -> str:
        """In what way reshards of the value are limited, one of `FORBIDDEN`; empty where they are not."""
        if self.rules.restores_dtype(value.node):
            return "reduced before"
        return "reduced later" if value in self.rules.unreduced else ""

    def _tie_tangents(self) -> None:
        """The gradient of an output arrives as the output was handed back."""
        for source in self.rules.graph.inputs:
            if source.kind == "tangent" and source.name in self.variable_of_output:
                output, tangent = self.variable_of_output[source.name], self.variable_of_node[source.node]
                same = [
                    [0.0 if a is b else np.inf for b in self.variables[tangent].options]
                    for a in self.variables[output].options
                ]
                if np.any(same):
                    self.edges.append(Edge(output, tangent, np.array(same)))

    def _tie_random_operators(self) -> None:
        """A random operator that is run again is split as the first time: what a shard draws depends on the split."""
        for node in self.rules.operators:
            first = self.rules.original_draw(node)
            if first is not None and self.rules.pin_spec(node, self.mesh) is None:
                drawn, again = (_splits(self.variables[self.variable_of_node[one]]) for one in (first, node))
                self._tie(first, node, drawn, again)
            first = self.rules.first_with_seed(node)
            if first is not None:
                drawn, again = (_splits(self.variables[self.variable_of_node[one]], results=1) for one in (first, node))
                self._tie(first, node, drawn, again)

    def _tie(self, first: fx.Node, second: fx.Node, splits: Sequence[object], others: Sequence[object]) -> None:
        costs = np.array([[0.0 if one == other else np.inf for other in others] for one in splits])
        self.edges.append(Edge(self.variable_of_node[first], self.variable_of_node[second], costs))


def _placement_ids(specs: SpecList) -> list[list[int]]:
    """Placements as numbers, for every entry of the list and mesh axis."""
    labels: dict[Placement, int] = {}
    rows = [[labels.setdefault(placement, len(labels)) for placement in spec] for spec in specs.distinct]
    return [rows[place] for place in specs.index]


def _splits(variable: Variable, results: int | None = None) -> list[tuple[object, ...]]:
    """For every option, what the numbers that an operator draws depend on: axes that split it, specs of its results.

    Of attention, that of the first result: it has the dims of the queries, forward and backward.
    """
    return [
        (tuple(choice >= 0 for choice in choices), *(specs[option] for specs in variable.results[:results]))  # type: ignore[attr-defined]
        for option, choices in enumerate(variable.options)
    ]


def _specs(uses: Sequence[_EdgeEnd]) -> tuple[Spec, ...]:
    """The specs in which a value is wanted, each once."""
    return tuple(dict.fromkeys(spec for use in uses for spec in use.specs.distinct))
