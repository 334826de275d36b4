"""The pass over a joint graph that makes the variables and edges of its problem (Rhino 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from torch import fx

from autoshard.capture.host_copies import TO_HOST
from autoshard.capture.joint import JointInput
from autoshard.capture.recomputation import RECOMPUTES
from autoshard.patterns.decisions import Decisions, phase_of
from autoshard.patterns.graph_rules import Use, Value, value_of
from autoshard.patterns.strategy import ABSENT, WHOLE, Choices
from autoshard.planner.host_updates import HostUpdate
from autoshard.planner.planning_problem import (
    BuiltProblem,
    Hideable,
    HostedRest,
    LiveRange,
    ReshardEdge,
    Variable,
)
from autoshard.planner.problem_tables import ProblemTables
from autoshard.planner.regather import MADE_ONCE, Origin, Reuse, regather_choices
from autoshard.planner.strategy_tables import FORBIDDEN, OperatorStrategies, SpecList
from autoshard.planner.value_lifetimes import NEVER, CertainLifetimes, Life, ValueLifetimes
from autoshard.solver import Edge, Problem
from autoshard.specs.layout import local_shape as spec_shape
from autoshard.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class _EdgeEnd:
    """One end of an edge.

    Attributes:
        variable: number of the variable.
        specs: the specs of the tensor under every option.
        life: first moment and end of a copy for this end.
        gradient: True if an optimizer gets the copy.
        optional: True if the variable has one more option: to be absent.
        returned: True if the step returns the copy or the tensor itself, and so holds it after its last use.
    """

    variable: int
    specs: SpecList
    life: Life = (0, 0)
    gradient: bool = False
    optional: bool = False
    returned: bool = False


class ProblemPass:
    """One pass over the graph that makes variables and edges.

    Args:
        tables: the tables shared with other passes.
        free, current, reuse: as for `ProblemBuilder.build`.
    """

    def __init__(
        self,
        tables: ProblemTables,
        free: frozenset[int],
        current: Decisions | None,
        reuse: Reuse,
    ) -> None:
        self.shared = tables
        self.rules = tables.rules
        self.mesh = tables.mesh
        self.current = current
        self.free = free
        self.memory_counts = reuse != "none"
        # Operator of the forward half -> the operator that may recompute it.
        self.reruns: dict[fx.Node, fx.Node] = {}
        if tables.constraints.optional_reruns:
            by_name = {node.name: node for node in self.rules.operators}
            optional = tables.constraints.optional_reruns
            again = {node.meta[RECOMPUTES]: node for node in by_name.values() if RECOMPUTES in node.meta}
            self.reruns = {by_name[name]: node for name, node in again.items() if name in optional}
        self.optional = frozenset(self.reruns.values())
        # Kernels of a compiled program may compute pieces of a tensor where they read them.
        self.fused = tables.constraints.bounding and tables.tables.cost.cluster.device.compiled
        self.lifetimes = (
            CertainLifetimes(self.rules, reuse, self.reruns, self.fused)
            if tables.constraints.bounding
            else ValueLifetimes(self.rules, reuse, self.reruns)
        )
        self.end = self.lifetimes.last
        self.positions, self.phases = self.lifetimes.positions, self.lifetimes.phases
        self.input_nodes = {source.name: source.node for source in self.rules.graph.inputs if source.kind != "tangent"}
        # A gradient is first held by its operator.
        self.gradient_starts = {
            name: self.lifetimes.end(value_of(node)) for name, node in self.rules.graph.gradients.items()
        }
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
        for name, node in self.rules.graph.tensor_outputs.items():
            self.variable_of_output[name] = self._add(self._output(name, node))
        for node in self.rules.operators:
            self.variable_of_node[node] = self._add(self._operator(node))
        for value in self.rules.values():
            if value.node not in self.optional:
                self._connect(value)
        self._tie_tangents()
        self._tie_random_operators()
        live_ranges = [variable.live_ranges for variable in self.variables]
        return BuiltProblem(
            self._problem(), self.variables, self.hideable, self.reshard_edges, live_ranges, self.edge_live_ranges
        )

    def _problem(self) -> Problem:
        costs = tuple(np.asarray(variable.seconds, dtype=np.float64) for variable in self.variables)
        components = tuple(map(self.shared.labels, self.variables))
        if not self.memory_counts:
            return Problem(costs, tuple(self.edges), components=components)
        # The solver processes an array once, so equal ones are one object.
        zeros: dict[int, np.ndarray] = {}

        def usage(variable: Variable) -> np.ndarray:
            size = len(variable.options)
            return zeros.setdefault(size, np.zeros(size)) if variable.usage is None else variable.usage

        usages = tuple(map(usage, self.variables))
        lives = tuple(variable.life for variable in self.variables)
        return Problem(costs, tuple(self.edges), usages, lives, components=components)

    def _add(self, variable: Variable) -> int:
        self.variables.append(variable)
        return len(self.variables) - 1

    # Variables

    def _operator(self, node: fx.Node) -> Variable:
        rule, call, tables = self.rules.rules[node], self.rules.calls[node], self.shared.tables
        pinned = self.rules.pin_spec(node, self.mesh)
        if pinned is not None:
            choices = (tuple([-1] * self.mesh.ndim),)
            variable = Variable("operator", node.name, choices, np.zeros(1), (self.shared.intern_specs((pinned,)),))
            return self.shared.with_absence(variable) if node in self.optional else variable
        options = self._options(node)
        seconds = tables.seconds(call, rule, options, self.rules.zeros[node])
        variable = Variable("operator", node.name, options.choices, seconds, options.results)
        if node in self.optional:
            variable = self.shared.with_absence(variable)
        # Values on the host take no device memory.
        if self.memory_counts and not rule.free and node.target is not TO_HOST:
            results = tables.result_bytes(call, options)
            if node in self.optional:
                results = tuple(map(self.shared.with_zero, results))
            values = [Value(node, index) for index in range(len(results))]
            lives = [self.lifetimes.life(value) if self.lifetimes.is_held(value) else NEVER for value in values]
            variable.live_ranges = tuple(
                LiveRange(held, *life)
                for held, life in zip(results, lives, strict=True)
                if life[0] < life[1] and held.any()
            )
            if variable.live_ranges:
                # `usage` has one life for a variable.
                variable.usage = self.shared.sum_of([live.bytes for live in variable.live_ranges])
                variable.life = min(life[0] for life in lives), max(life[1] for life in lives)
        return variable

    def _rest(self, source: JointInput) -> Variable:
        value = Value(source.node)
        now = None if self.current is None else self.current.rest[source.node.name]
        specs = self._specs_on_free_axes(self.shared.boundary_specs.of_input(source), now)
        options: list[Spec | HostedRest] = [*specs]
        if source.kind == "parameter" and source.name in self.gradient_starts:
            constraints = self.shared.constraints
            if source.name in constraints.hosted:
                options = [HostedRest(spec) for spec in specs]
            elif constraints.may_host:
                options, specs = [*specs, *map(HostedRest, specs)], [*specs, *specs]
        spec_list = self.shared.intern_specs(specs)
        seconds = np.zeros(len(specs))
        variable = Variable("rest", source.node.name, options, seconds, (spec_list,))
        if source.kind == "parameter":
            # At equal cost a parameter is replicated: a shard at rest costs the launch of a gather.
            overhead = self.shared.tables.cost.compute(0.0, 0.0, value.meta.dtype)
            seconds += [overhead * len(spec.shard_axes) for spec in specs]
            seconds += self._host_seconds(variable, value)
            summed = self.shared.constraints.summed.get(source.name, 0.0)
            if self.memory_counts or summed:
                held = spec_list.bytes(value.meta, self.mesh)
                seconds += held * summed
                if self.memory_counts:
                    self._add_parameter_memory(variable, source, value, held)
        elif source.kind != "tangent" and self.memory_counts:
            variable.life, variable.usage = (0, self.end), spec_list.bytes(value.meta, self.mesh)
            variable.live_ranges = (LiveRange(variable.usage, *variable.life),)
        return variable

    def _add_parameter_memory(self, variable: Variable, source: JointInput, value: Value, held: np.ndarray) -> None:
        """Set the memory of a parameter, its gradient and its optimizer state; `held` is the parameter's per option."""
        variable.life, variable.usage = (0, self.end), held
        variable.live_ranges = (LiveRange(held, *variable.life),)
        if source.name in self.gradient_starts:
            optimizer, itemsize = self.shared.constraints.optimizer, value.meta.dtype.itemsize
            state = np.array(
                [
                    0 if isinstance(option, HostedRest) else optimizer.state_bytes(value.meta.shape, local, itemsize)
                    for option, size in zip(variable.options, held, strict=True)
                    for local in [(int(size) // itemsize,)]
                ],
                dtype=float,
            )
            # `usage` has one life for a variable: a gradient counts as if held from the start.
            variable.usage = 2.0 * held + state
            variable.live_ranges = (
                LiveRange(held, self.gradient_starts[source.name], self.end),
                LiveRange(held + state, *variable.life),
            )

    def _host_seconds(self, variable: Variable, value: Value) -> np.ndarray:
        """Return the seconds of the update on the host for every option of a parameter."""
        optimizer, cost = self.shared.constraints.optimizer, self.shared.tables.cost
        shape, itemsize, known = value.meta.shape, value.meta.dtype.itemsize, dict[Spec, float]()
        for option in variable.options:
            if isinstance(option, HostedRest) and option.spec not in known:
                local = spec_shape(shape, option.spec, self.mesh)
                known[option.spec] = HostUpdate.of(optimizer, cost, shape, local, itemsize).seconds
        return np.array([known[at.spec] if isinstance(at, HostedRest) else 0.0 for at in variable.options])

    def _output(self, name: str, node: fx.Node) -> Variable:
        specs = self.shared.boundary_specs.of_output(name, node)
        now = None if self.current is None else self.current.outputs[name]
        specs = self._specs_on_free_axes(specs, now)
        return Variable("output", name, specs, np.zeros(len(specs)), (self.shared.intern_specs(specs),))

    # Edges

    def _connect(self, value: Value) -> None:
        """Add edges from a value to its uses, through a shared copy if several uses may want the same spec."""
        again = self.reruns.get(value.node)
        rerun = None if again is None else Value(again, value.result)
        forward, backward = self._targets(value)
        if rerun is not None:
            # The backward uses that always read the value, and those that may read the recomputed one.
            before, after = self._targets(rerun)
            forward, backward = forward + before, backward + after
        producer = self.variable_of_node[value.node]
        # Inputs of the step are always held.
        life = (0, self.end) if value.node in self.lifetimes.inputs else self.lifetimes.life(value)
        source = _EdgeEnd(producer, self.variables[producer].results[value.result], life)
        uses = forward + backward
        # An input that is never sharded has no copies.
        whole = value.node in self.lifetimes.inputs and not any(spec.shard_axes for spec in source.specs.distinct)
        if backward and rerun is not None:
            self._connect_halves(value, source, forward, backward, rerun)
        elif self.lifetimes.may_regather(value) and not whole:
            self._connect_halves(value, source, forward, backward)
        elif len({use.variable for use in uses}) > 1:
            self._connect_through(self._add_hub(value.name, uses, _specs(uses)), value, source, uses)
        else:
            self._add_edges(value, source, uses)

    def _connect_through(self, hub: _EdgeEnd, value: Value, source: _EdgeEnd, uses: Sequence[_EdgeEnd]) -> None:
        self._add_edges(value, source, [hub])
        # If both have the same spec, the hub's copy is the tensor itself.
        hub = replace(hub, life=(hub.life[0], max(hub.life[1], source.life[1])))
        self._add_edges(value, hub, uses)

    def _connect_halves(
        self,
        value: Value,
        source: _EdgeEnd,
        forward: Sequence[_EdgeEnd],
        backward: Sequence[_EdgeEnd],
        rerun: Value | None = None,
    ) -> None:
        """Add one hub per half; that of the backward half has the origin of its value.

        Args:
            value: the value.
            source: its operator, or the tensor at rest.
            forward, backward: its uses in each half.
            rerun: the recomputed value, if an operator of the backward half may recompute it.
        """
        gradients = [use for use in backward if use.gradient]  # the optimizer's gradient does not use the hub
        backward = [use for use in backward if not use.gradient]
        specs = _specs([*forward, *backward])
        origins: tuple[Origin, ...] = MADE_ONCE
        if rerun is not None:
            # Small copies are kept, not gathered again. Without a forward use there is no copy to keep.
            if not forward:
                origins = ("gathered",)
            elif not self.lifetimes.may_keep_copy(value):
                origins = ("kept",)
            origins = (*origins, "rerun")
        moves = None
        if value.name in self.shared.constraints.movable:
            origins = (*origins, "moved")
            cost, price = self.shared.tables.cost, self.shared.constraints.copy_price
            moves = self.shared.edge_tables.move_seconds(value.meta, source.specs, cost, price)
        if all(use.optional for use in backward):
            origins = (*origins, "absent")
        options = regather_choices(specs, origins)
        spec_list, copies = (
            self.shared.intern_specs([option.spec for option in options]),
            self.shared.intern_specs(specs),
        )
        first = self._add_hub(f"{value.name}@forward", forward, specs) if forward else None
        start = max(self.lifetimes.hub_start(value), 0 if first is None else first.life[1])
        first_use, end = _span(backward)
        held = (min(start, first_use), end)
        kept = spec_list.bytes(value.meta, self.mesh) * [option.kept for option in options]
        number = self._add(Variable("regather", value.name, options, np.zeros(len(options)), (spec_list,), held, kept))
        if first is not None:
            self._connect_through(first, value, source, forward)
        tables = self.shared.edge_tables
        allocated = self.lifetimes.is_counted_by_hub(value, first_use)
        edge = tables.regather_edge(
            value.meta, source.specs, copies, self.mesh, origins, allocated=allocated, moves=moves, fused=self.fused
        )
        self.edge_live_ranges[len(self.edges)] = (
            LiveRange(edge.between, held[0], first_use),
            LiveRange(edge.after, first_use, end),
        )
        self.edges.append(Edge(source.variable, number, edge.seconds))
        if first is not None and "kept" in origins:
            self.edges.append(Edge(first.variable, number, tables.tie_costs(len(specs), origins)))
        if rerun is not None:
            made = self._made_specs(rerun)
            seconds, copied = tables.rerun_edge(value.meta, made, copies, self.mesh, origins, fused=self.fused)
            self.edge_live_ranges[len(self.edges)] = (LiveRange(copied, first_use, end),)
            self.edges.append(Edge(self.variable_of_node[rerun.node], number, seconds))
        hub = _EdgeEnd(number, spec_list, (first_use, end), optional="absent" in origins)
        self._add_edges(value, hub, backward)
        self._add_edges(value, source, gradients)

    def _made_specs(self, value: Value) -> SpecList:
        """Return the specs of a result under every strategy of its operator but absence."""
        pinned = self.rules.pin_spec(value.node, self.mesh)
        if pinned is not None:
            return self.shared.intern_specs((pinned,))
        return self._options(value.node).results[value.result]

    def _add_hub(self, key: str, uses: Sequence[_EdgeEnd], specs: Sequence[Spec]) -> _EdgeEnd:
        spec_list = self.shared.intern_specs(specs)
        variable = self._add(Variable("hub", key, specs, np.zeros(len(specs)), (spec_list,)))
        return _EdgeEnd(variable, spec_list, _span(uses))

    def _targets(self, value: Value) -> tuple[list[_EdgeEnd], list[_EdgeEnd]]:
        """Return the uses of a value in the forward half, and those in the backward half."""
        ends: dict[str, list[_EdgeEnd]] = {"forward": [], "backward": []}
        for use in self.rules.uses.get(value, ()):
            start, optional = self.positions[use.node], use.node in self.optional
            life = (start, start if use.node in self.lifetimes.uncertain else self.lifetimes.end_of_copy(use.node))
            end = _EdgeEnd(
                self.variable_of_node[use.node],
                self._operand_specs(use),
                life,
                self.rules.restores_dtype(use.node),
                optional,
            )
            ends[self.phases[use.node]].append(end)
        for output in self.rules.outputs_of.get(value, ()):
            # A gradient, and the new value of a buffer, has the spec of the parameter or buffer at rest.
            user = (
                self.variable_of_output[output.name]
                if output.kind == "output"
                else self.variable_of_node[self.input_nodes[output.name]]
            )
            # An output is resharded as soon as it is computed, and held to the end of the step.
            start = self.positions.get(value.node, -1) + 1
            # A gradient's memory is counted with its parameter.
            gradient = output.kind == "gradient"
            life = (start, start if gradient else self.lifetimes.end_of_output(output))
            end = _EdgeEnd(user, self.variables[user].results[0], life, gradient, returned=not gradient)
            ends[phase_of(output)].append(end)
        return ends["forward"], ends["backward"]

    def _operand_specs(self, use: Use) -> SpecList:
        pinned = self.rules.pin_spec(use.node, self.mesh)
        if pinned is not None:
            return self.shared.intern_specs((pinned,))
        return self._options(use.node).operands[use.operand]

    def _options(self, node: fx.Node) -> OperatorStrategies:
        """Return the strategies that an operator may have."""
        rule, tables = self.rules.rules[node], self.shared.tables
        restricted = self.shared.restrictions.operators.get(node, ())
        if self.current is not None:
            start = self.current.choices[node.name]
            if start == (ABSENT,) * self.mesh.ndim:  # fixed axes are then as in the first run
                start = self.current.choices[node.meta[RECOMPUTES]]
        elif restricted:
            start = tables.options(rule, restricted=restricted).choices[0]
        else:
            start = (WHOLE,) * self.mesh.ndim
        fixed = tuple(None if axis in self.free else choice for axis, choice in enumerate(start))
        return tables.options(rule, fixed, restricted)

    def _specs_on_free_axes(self, specs: list[Spec], now: Spec | None) -> list[Spec]:
        """Return the specs that differ from the current one only on free axes; all specs if there are none (pins)."""
        if now is None:
            now = Spec.all_replicated(self.mesh.ndim)
        fixed = [axis for axis in range(self.mesh.ndim) if axis not in self.free]
        return [spec for spec in specs if spec is now or all(spec[axis] == now[axis] for axis in fixed)] or specs

    def _add_edges(self, value: Value, source: _EdgeEnd, targets: Iterable[_EdgeEnd]) -> None:
        for target in targets:
            # An output may be an input itself (an unchanged buffer), which costs nothing.
            if source.variable != target.variable:
                self._add_edge(value, source, target)

    def _add_edge(self, value: Value, source: _EdgeEnd, target: _EdgeEnd) -> None:
        meta, tables, forbidden = value.meta, self.shared.edge_tables, ""
        # The precision policy decides in which dtype a gradient is reduced.
        if self.rules.restores_dtype(value.node):
            forbidden = "reduced before"
        elif value in self.rules.unreduced:
            forbidden = "reduced later"
        seconds = tables.reshard_seconds(meta, source.specs, target.specs, target.gradient)
        # Equal layers share a table if nothing is added to it, or the same.
        key = (id(seconds), forbidden)
        if key not in self.tables:
            self.tables[key] = seconds + FORBIDDEN[forbidden](source.specs, target.specs) if forbidden else seconds
        costs = self.tables[key]
        if source.optional or target.optional:
            absence = {"source": source.optional, "target": target.optional}
            costs = tables.with_absence(costs, **absence, forbidden=np.inf)
            seconds = tables.with_absence(seconds, **absence, forbidden=0.0)
        held_on = self._held_on(value, source, target)
        # An edge between single equal specs costs nothing.
        if costs.size > 1 or costs.any() or source.specs.distinct != target.specs.distinct or held_on:
            number = len(self.edges)
            if target.gradient:
                self.hideable[number] = Hideable("reductions", seconds, target.life[0])
            elif (needed := self._gather_moment(value, target)) is not None:
                self.hideable[number] = Hideable("gathers", seconds, needed)
            if not (source.optional or target.optional):
                self.reshard_edges[number] = ReshardEdge(meta, source.specs, target.specs, target.gradient)
            if self.memory_counts and target.life[0] < target.life[1]:
                copied = tables.copy_bytes(meta, source.specs, target.specs, self.mesh, self.fused)
                if source.optional or target.optional:
                    copied = tables.with_absence(copied, **absence, forbidden=0.0)
                self.edge_live_ranges[number] = (LiveRange(copied, *target.life), *held_on)
                is_last = source.life[1] - 1 == target.life[0] and self.lifetimes.is_held(value)
                if self.shared.constraints.bounding and is_last:
                    # A tensor that is resharded for its last use is free when that use begins.
                    freed = source.specs.bytes(meta, self.mesh)[:, None] * (copied > 0)
                    self.edge_live_ranges[number] += (LiveRange(-freed, target.life[0], source.life[1]),)
            self.edges.append(Edge(source.variable, target.variable, costs))

    def _held_on(self, value: Value, source: _EdgeEnd, target: _EdgeEnd) -> tuple[LiveRange, ...]:
        """Return the memory of a value while only a view or an output that shares its memory holds it."""
        if not self.memory_counts or source.optional or target.optional or not self.lifetimes.is_held(value):
            return ()
        start, end = self.lifetimes.continuation(value)
        start, end = max(start, source.life[1]), min(end, target.life[1])
        if start >= end:
            return ()
        copied = self.shared.edge_tables.copy_bytes(value.meta, source.specs, target.specs, self.mesh)
        return (LiveRange(target.specs.bytes(value.meta, self.mesh) - copied, start, end),)

    def _gather_moment(self, value: Value, target: _EdgeEnd) -> int | None:
        """Return the moment at which a parameter gathered for a use is needed; None for other values."""
        if target.life[0] >= len(self.rules.operators):
            return None
        phase = self.phases[self.rules.operators[target.life[0]]]
        return self.rules.first_parameter_uses.get((value.node, phase))

    # Ties

    def _tie_tangents(self) -> None:
        """Give the gradient of an output the spec of the output."""
        for source in self.rules.graph.inputs:
            if source.kind == "tangent" and source.name in self.variable_of_output:
                output, tangent = self.variable_of_output[source.name], self.variable_of_node[source.node]
                outputs, tangents = self.variables[output].options, self.variables[tangent].options
                costs = np.array([[0.0 if a is b else np.inf for b in tangents] for a in outputs])
                if costs.any():
                    self.edges.append(Edge(output, tangent, costs))

    def _tie_random_operators(self) -> None:
        """Split a recomputed random operator as in its first run: the random numbers of a shard depend on the split."""
        for node in self.rules.operators:
            first = self.rules.original_draw(node)
            if first is not None and self.rules.pin_spec(node, self.mesh) is None:
                self._tie(first, node)
            first = self.rules.first_with_seed(node)
            if first is not None:
                # The first result of attention has the dims of the queries, forward and backward.
                self._tie(first, node, results=1)

    def _tie(self, first: fx.Node, second: fx.Node, results: int | None = None) -> None:
        numbers = self.variable_of_node[first], self.variable_of_node[second]
        rows, columns = (_splits(self.variables[number], results) for number in numbers)
        # An absent operator draws nothing.
        costs = np.array(
            [[0.0 if row == column or None in (row, column) else np.inf for column in columns] for row in rows]
        )
        self.edges.append(Edge(*numbers, costs))


def _splits(variable: Variable, results: int | None = None) -> list[tuple[object, ...] | None]:
    """Return for every option what random numbers depend on: the axes that split the operator, and results' specs.

    None stands for the option to be absent.
    """
    rows: list[tuple[object, ...] | None] = []
    for option, choices in enumerate(cast(Sequence[Choices], variable.options)):
        of_results = (specs[option] for specs in variable.results[:results])
        rows.append(None if ABSENT in choices else (tuple(choice >= 0 for choice in choices), *of_results))
    return rows


def _span(uses: Sequence[_EdgeEnd]) -> Life:
    """Return the interval of moments at which a copy for some uses is certainly held."""
    # The memory of a returned value is counted on the edge to the output.
    counted = [use.life for use in uses if use.life[0] < use.life[1] and not use.returned]
    start = min(life[0] for life in counted or [use.life for use in uses])
    return start, max((end for _, end in counted), default=start)


def _specs(uses: Sequence[_EdgeEnd]) -> tuple[Spec, ...]:
    """Return the distinct specs in which a value is used."""
    return tuple(dict.fromkeys(spec for use in uses for spec in use.specs.distinct))
