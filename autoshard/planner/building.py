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
from autoshard.patterns.graph import GraphRules, Use, Value, value_of
from autoshard.patterns.strategy import WHOLE
from autoshard.planner.edge_tables import FORBIDDEN, EdgeTables
from autoshard.planner.hubs import Reuse, rereads
from autoshard.planner.options import Options, OptionTables, SpecList
from autoshard.planner.problem import BuiltProblem, Crossing, Hideable, Hiding, Rent, Variable, Wishes
from autoshard.planner.resting import Resting
from autoshard.planner.task_graphs import Restrictions, restrictions
from autoshard.reshard.loose import LooseResharder
from autoshard.reshard.path import Resharder
from autoshard.solver import Edge, Problem
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec

_SMALL = 64  # a gathered activation so many times smaller than the step's largest tensor is kept, whatever it costs


class ProblemBuilder:
    """Builds the problem of one graph on one mesh, whole or with some mesh axes held fixed."""

    def __init__(
        self, rules: GraphRules, tables: OptionTables, resharder: Resharder | LooseResharder, wishes: Wishes
    ) -> None:
        self.rules = rules
        self.tables = tables
        self.mesh: MeshShape = tables.mesh
        self.resharder = resharder
        self.wishes = wishes
        self.inputs: dict[fx.Node, JointInput] = {source.node: source for source in rules.graph.inputs}
        self.held = {source.name: source.node for source in rules.graph.inputs if source.kind != "tangent"}
        self.position = {node: position for position, node in enumerate(rules.operators)}
        self.edge_tables = EdgeTables(resharder)
        self._lists: dict[tuple[Spec, ...], SpecList] = {}
        self._labels: dict[int, tuple[object, np.ndarray]] = {}
        self._plain: dict[tuple[frozenset[int], Reuse], BuiltProblem] = {}
        self._last: tuple[frozenset[int], Decisions | None, Reuse, BuiltProblem] | None = None

    def forget(self) -> None:
        """Drop the problems that were built; the tables stay."""
        self._plain, self._last = {}, None

    def wishing(self, wishes: Wishes) -> ProblemBuilder:
        """A builder for other wishes that shares the tables made so far; itself for its own."""
        if wishes is self.wishes:
            return self
        other = copy.copy(self)
        other.wishes, other._plain, other._last = wishes, {}, None
        return other

    def alike(self, rules: GraphRules, wishes: Wishes) -> ProblemBuilder:
        """A builder for another graph on the same mesh, at the same prices, that shares the tables made so far."""
        other = ProblemBuilder(rules, self.tables, self.resharder, wishes)
        other.edge_tables, other._lists, other._labels = self.edge_tables, self._lists, self._labels
        return other

    def build(
        self,
        free: frozenset[int],
        current: Decisions | None = None,
        prices: np.ndarray | None = None,
        hiding: Hiding | None = None,
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
        built = self._built(free, current, reuse)
        if hiding is not None:
            built = built.hiding(hiding)
        return built if prices is None else built.priced(prices)

    def _built(self, free: frozenset[int], current: Decisions | None, reuse: Reuse) -> BuiltProblem:
        """The problem at no prices, made once."""
        if current is None:
            if (free, reuse) not in self._plain:
                self._plain[free, reuse] = _Build(self, free, None, reuse).run()
            return self._plain[free, reuse]
        if self._last is None or self._last[0] != free or self._last[1] is not current or self._last[2] != reuse:
            self._last = (free, current, reuse, _Build(self, free, current, reuse).run())
        return self._last[3]

    def listed(self, specs: Sequence[Spec]) -> SpecList:
        """The specs as a shared list."""
        key = tuple(specs)
        if key not in self._lists:
            self._lists[key] = SpecList.of(specs)
        return self._lists[key]

    @cached_property
    def restrictions(self) -> Restrictions:
        """What task graphs ask for."""
        return restrictions(self.rules, self.wishes.task_graphs)

    @property
    def resting(self) -> Resting:
        """How tensors may lie outside the step."""
        return Resting(self.rules, self.tables, self.wishes, self.restrictions)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest tensor of the step."""
        return max(value.meta.bytes for value in self.rules.values())

    def labels(self, variable: Variable) -> np.ndarray:
        """One label per mesh axis for every option, the choice or the placement; made once for equal variables."""
        operator = variable.kind == "operator"
        named: object = variable.options if operator else variable.results[0]
        if id(named) not in self._labels:
            rows = variable.options if operator else _numbered(variable.results[0])
            labels = np.array(rows, dtype=np.int64).reshape(len(rows), self.mesh.ndim)
            self._labels[id(named)] = (named, labels)
        return self._labels[id(named)][1]


@dataclass(frozen=True, slots=True)
class _End:
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
        self.made = {
            output.name: self.builder.position.get(value_of(output.node).node, 0)
            for output in self.rules.graph.outputs
            if output.kind == "gradient" and output.node is not None
        }
        self.open: dict[Value, bool] = {}  # whether it is open how the backward half gets at a value
        self.phases = {node: self.rules.graph.phase(node) for node in self.rules.operators}
        self.variables: list[Variable] = []
        self.edges: list[Edge] = []
        self.hideable: dict[int, Hideable] = {}
        self.crossings: dict[int, Crossing] = {}
        self.edge_rents: dict[int, tuple[Rent, ...]] = {}
        self.tables: dict[tuple[int, str], np.ndarray] = {}
        self.of_node: dict[fx.Node, int] = {}
        self.of_output: dict[str, int] = {}

    def run(self) -> BuiltProblem:
        for source in self.rules.graph.inputs:
            self.of_node[source.node] = self._add(self._rest(source))
        for output in self.rules.graph.outputs:
            if output.kind == "output" and output.node is not None:
                self.of_output[output.name] = self._add(self._output(output))
        for node in self.rules.operators:
            self.of_node[node] = self._add(self._operator(node))
        for value in self.rules.values():
            self._connect(value)
        self._tie_tangents()
        self._tie_draws()
        rents = [variable.rents for variable in self.variables]
        return BuiltProblem(self._problem(), self.variables, self.hideable, self.crossings, rents, self.edge_rents)

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
        pinned = self.rules.pinned(node, self.mesh)
        if pinned is not None:
            options = (tuple([-1] * self.mesh.ndim),)
            return Variable("operator", node.name, options, np.zeros(1), (self.builder.listed((pinned,)),))
        chosen = self._options(node)
        seconds = tables.seconds(call, rule, chosen, self.rules.zeros[node])
        variable = Variable("operator", node.name, chosen.choices, seconds, chosen.results)
        if self.memory_counts and not rule.free:
            variable.usage = self.builder.tables.held(call, chosen)
            variable.life = (self.builder.position[node], self._last_use(node) + 1)
            variable.rents = (Rent(variable.usage, *variable.life),)
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
                apart = self._may_reread(value) and not self._is_view(value)
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
        specs = self._narrowed(self.builder.resting.of_input(source), now)
        listed = self.builder.listed(specs)
        seconds = np.zeros(len(specs))
        variable = Variable("rest", source.node.name, specs, seconds, (listed,))
        if source.kind == "parameter":
            # Equal otherwise, a parameter stays whole: a shard at rest costs the launch of a gather.
            overhead = self.builder.tables.cost.compute(0.0, 0.0, value.meta.dtype)
            seconds += [overhead * len(spec.shard_axes) for spec in specs]
            summed = self.builder.wishes.summed.get(source.name, 0.0)
            if self.memory_counts or summed:
                held = self._bytes(value, listed)
                seconds += held * summed
                if self.memory_counts:
                    self._keep(variable, source, value, held)
        return variable

    def _keep(self, variable: Variable, source: JointInput, value: Value, held: np.ndarray) -> None:
        """Notes what a parameter, its gradient and its optimizer's state hold, for the bytes of every option."""
        variable.life, variable.usage = (0, self.end), held
        if source.name in self.made:
            state = self._state(value, held)
            variable.usage = 2.0 * held + state
            variable.rents = (Rent(held, self.made[source.name], self.end), Rent(held + state, *variable.life))
        else:
            variable.rents = (Rent(held, *variable.life),)

    def _state(self, value: Value, held: np.ndarray) -> np.ndarray:
        """Bytes of the optimizer's state of a parameter, for the bytes of it that a device holds under every option."""
        shape, itemsize = value.meta.shape, value.meta.dtype.itemsize
        optimizer = self.builder.wishes.optimizer
        return np.array([optimizer.state_bytes(shape, (int(one) // itemsize,), itemsize) for one in held], dtype=float)

    def _output(self, output: JointOutput) -> Variable:
        specs = self.builder.resting.of_output(output)
        now = None if self.current is None else self.current.outputs[output.name]
        specs = self._narrowed(specs, now)
        return Variable("output", output.name, specs, np.zeros(len(specs)), (self.builder.listed(specs),))

    # Edges

    def _connect(self, value: Value) -> None:
        """Edges from a value to its uses, through a shared copy where several uses may want it alike."""
        forward, backward = self._targets(value)
        made = self.of_node[value.node]
        source = _End(made, self.variables[made].results[value.result])
        uses = forward + backward
        whole = value.node in self.builder.inputs and not any(spec.shard_axes for spec in source.specs.distinct)
        if self._may_reread(value) and not whole:
            self._reread(value, source, forward, backward)
        elif len({use.variable for use in uses}) > 1:
            self._through(self._hub(value.name, value, uses), value, source, uses)
        else:
            self._edges(value, source, uses)

    def _through(self, hub: _End, value: Value, source: _End, uses: Sequence[_End]) -> None:
        self._edges(value, source, [hub])
        self._edges(value, hub, uses)

    def _may_reread(self, value: Value) -> bool:
        """Whether it is open how the backward half gets at the value: both halves use it, and it is large.

        Inputs of the step that are never sharded have no copies; that is seen where edges are made.
        """
        if self.reuse == "none" or value in self.open:
            return self.open.get(value, False)
        phases = {self.phases[use.node] for use in self.rules.uses.get(value, ())}
        handed = any(output.kind != "gradient" for output in self.rules.outputs_of.get(value, ()))
        self.open[value] = len(phases) == 2 and not handed and self._is_large(value)
        return self.open[value]

    def _is_view(self, value: Value) -> bool:
        """Whether the value holds no memory of its own in the step: an input, or a view."""
        return value.node in self.builder.inputs or self.rules.rules[value.node].free

    def _is_large(self, value: Value) -> bool:
        """Whether copies of the value are worth a choice: those of inputs, parameters above all, always are."""
        if value.node in self.builder.inputs:
            return True
        return self.reuse == "all" and value.meta.bytes * _SMALL >= self.builder.largest

    def _reread(self, value: Value, source: _End, forward: Sequence[_End], backward: Sequence[_End]) -> None:
        """A hub for each half; that of the backward half takes the copy of the other, or makes its own."""
        gradients = [use for use in backward if use.gradient]  # what an optimizer is given is no copy of the value
        backward = [use for use in backward if not use.gradient]
        specs = _specs([*forward, *backward])
        first = self._hub(f"{value.name}@forward", value, forward, specs)
        options = rereads(specs)
        listed = self.builder.listed([option.spec for option in options])
        used = min(use.life[0] for use in backward)
        held = (min(first.life[1], used), max(use.life[1] for use in backward))
        kept = self._bytes(value, listed) * [option.kept for option in options]
        number = self._add(Variable("again", value.name, options, np.zeros(len(options)), (listed,), held, kept))
        self._through(first, value, source, forward)
        again = _End(number, listed, (used, held[1]))
        tables = self.builder.edge_tables.from_where_it_lies(
            value.meta, source.specs, first.specs, self.mesh, own=not self._is_view(value)
        )
        self.edge_rents[len(self.edges)] = (
            Rent(tables.between, held[0], again.life[0]),
            Rent(tables.after, *again.life),
        )
        self.edges.append(Edge(source.variable, number, tables.seconds))
        self.edges.append(Edge(first.variable, number, self.builder.edge_tables.tie(len(specs))))
        self._edges(value, again, backward)
        self._edges(value, source, gradients)

    def _hub(self, key: str, value: Value, uses: Sequence[_End], specs: Sequence[Spec] | None = None) -> _End:
        specs = _specs(uses) if specs is None else specs
        listed = self.builder.listed(specs)
        variable = self._add(Variable("hub", key, specs, np.zeros(len(specs)), (listed,)))
        return _End(variable, listed, (min(use.life[0] for use in uses), max(use.life[1] for use in uses)))

    def _targets(self, value: Value) -> tuple[list[_End], list[_End]]:
        """Where a value is wanted in the forward half, and in the backward half."""
        ends: dict[str, list[_End]] = {"forward": [], "backward": []}
        for use in self.rules.uses.get(value, ()):
            start = self.builder.position[use.node]
            last = self._last_use(use.node) if self.rules.rules[use.node].free else start
            end = _End(self.of_node[use.node], self._operand(use), (start, last + 1), self.rules.restores(use.node))
            ends[self.phases[use.node]].append(end)
        for output in self.rules.outputs_of.get(value, ()):
            user = self._deliver(output)
            start = self.builder.position.get(value.node, -1) + 1
            # A gradient's memory is counted with its parameter.
            life = (start, start if output.kind == "gradient" else self.end)
            end = _End(user, self.variables[user].results[0], life, output.kind == "gradient")
            ends[phase_of(output)].append(end)
        return ends["forward"], ends["backward"]

    def _operand(self, use: Use) -> SpecList:
        pinned = self.rules.pinned(use.node, self.mesh)
        if pinned is not None:
            return self.builder.listed((pinned,))
        return self._options(use.node).operands[use.operand]

    def _options(self, node: fx.Node) -> Options:
        """The strategies that are open to an operator."""
        rule, tables = self.rules.rules[node], self.builder.tables
        restriction = self.builder.restrictions.operators.get(node)
        if self.current is not None:
            start = self.current.choices[node.name]
        elif restriction is not None:
            start = tables.options(rule, restriction=restriction).choices[0]
        else:
            start = (WHOLE,) * self.mesh.ndim
        return tables.restricted(rule, start, self.free, restriction)

    def _narrowed(self, specs: list[Spec], now: Spec | None) -> list[Spec]:
        """The specs that differ from the present one on open axes only; all where none does (they are pinned)."""
        if now is None:
            now = Spec.replicated(self.mesh.ndim)
        fixed = [axis for axis in range(self.mesh.ndim) if axis not in self.free]
        return [spec for spec in specs if spec is now or all(spec[axis] == now[axis] for axis in fixed)] or specs

    def _deliver(self, output: JointOutput) -> int:
        if output.kind == "output":
            return self.of_output[output.name]
        return self.of_node[self.builder.held[output.name]]

    def _edges(self, value: Value, source: _End, targets: Iterable[_End]) -> None:
        for target in targets:
            # A tensor may be handed back where it came from (an unchanged buffer): nothing to pay.
            if source.variable != target.variable:
                self._edge(value, source, target)

    def _edge(self, value: Value, source: _End, target: _End) -> None:
        meta, forbidden = value.meta, self._forbidden(value)
        seconds = self.builder.edge_tables.between(meta, source.specs, target.specs, target.gradient)
        # Equal layers share a table where nothing is added, or the same is.
        key = (id(seconds), forbidden)
        if key not in self.tables:
            self.tables[key] = seconds + FORBIDDEN[forbidden](source.specs, target.specs) if forbidden else seconds
        costs = self.tables[key]
        if costs.size > 1 or costs.any() or source.specs.distinct != target.specs.distinct:
            if target.gradient:
                self.hideable[len(self.edges)] = Hideable("reductions", seconds, target.life[0])
            elif (needed := self._needed(value, target)) is not None:
                self.hideable[len(self.edges)] = Hideable("gathers", seconds, needed)
            self.crossings[len(self.edges)] = Crossing(meta, source.specs, target.specs, target.gradient)
            if self.memory_counts and target.life[0] < target.life[1]:
                copied = self.builder.edge_tables.copied(meta, source.specs, target.specs, self.mesh)
                self.edge_rents[len(self.edges)] = (Rent(copied, *target.life),)
            self.edges.append(Edge(source.variable, target.variable, costs))

    def _needed(self, value: Value, target: _End) -> int | None:
        """The moment at which a parameter, brought to where it is read, is needed; None of what is none."""
        read = self.rules.operators[target.life[0]] if target.life[0] < len(self.rules.operators) else None
        return None if read is None else self.rules.parameter_needs.get((value.node, self.phases[read]))

    def _forbidden(self, value: Value) -> str:
        """In what way reshards of the value are limited, one of `FORBIDDEN`; empty where they are not."""
        if self.rules.restores(value.node):
            return "reduced before"
        return "reduced later" if value in self.rules.unreduced else ""

    def _tie_tangents(self) -> None:
        """The gradient of an output arrives as the output was handed back."""
        for source in self.rules.graph.inputs:
            if source.kind == "tangent" and source.name in self.of_output:
                output, tangent = self.of_output[source.name], self.of_node[source.node]
                same = [
                    [0.0 if a is b else np.inf for b in self.variables[tangent].options]
                    for a in self.variables[output].options
                ]
                if np.any(same):
                    self.edges.append(Edge(output, tangent, np.array(same)))

    def _tie_draws(self) -> None:
        """A random operator that is run again is split as the first time: what a shard draws depends on the split."""
        for node in self.rules.operators:
            first = self.rules.repeats_draw(node)
            if first is not None and self.rules.pinned(node, self.mesh) is None:
                drawn, again = (_splits(self.variables[self.of_node[one]]) for one in (first, node))
                self._tie(first, node, drawn, again)
            first = self.rules.shares_seed(node)
            if first is not None:
                drawn, again = (_splits(self.variables[self.of_node[one]], results=1) for one in (first, node))
                self._tie(first, node, drawn, again)

    def _tie(self, first: fx.Node, second: fx.Node, splits: Sequence[object], others: Sequence[object]) -> None:
        costs = np.array([[0.0 if one == other else np.inf for other in others] for one in splits])
        self.edges.append(Edge(self.of_node[first], self.of_node[second], costs))


def _numbered(specs: SpecList) -> list[list[int]]:
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


def _specs(uses: Sequence[_End]) -> tuple[Spec, ...]:
    """The specs in which a value is wanted, each once."""
    return tuple(dict.fromkeys(spec for use in uses for spec in use.specs.distinct))
