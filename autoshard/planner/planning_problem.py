"""A joint graph as an optimisation problem: variables, their options, and the seconds between them (Rhino 4.2).

Every operator, tensor at rest and shared copy is a node of the problem; its strategies are its options. An edge holds
the seconds to reshard a tensor from each option of its producer to each option of its user. `ProblemBuilder` builds the
problem; then prices of memory, and discounts of collectives that compute hides, are applied to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from autoshard.capture.marks import Primitive
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.options.placements import Pins
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.rule import TensorMeta
from autoshard.patterns.strategy import Choices
from autoshard.planner.regather import RegatherChoice, choices_from_hubs, hubs_from_choices
from autoshard.planner.strategy_tables import SpecList
from autoshard.solver import Edge, Problem
from autoshard.solver.problem import Blend, Part, blend
from autoshard.specs.axes import SharedAxis
from autoshard.specs.spec import Spec

HideableKind = Literal["reductions", "gathers"]
VariableKind = Literal["operator", "rest", "output", "hub", "regather"]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints of a plan, from the user and from the memory limit.

    Attributes:
        pinned: name of a parameter, buffer or input -> a placement per axis, None where the planner decides.
        placed: True if parameters are pinned as an earlier call placed them, not by the user.
        forced: parameters that must not be replicated (Rhino 4.4).
        planned_outputs: True if outputs are returned in the plan's specs, not gathered.
        outputs: name of an output -> the spec in which it is returned.
        row_axes: mesh axes over which outputs with the batch are split, unless `outputs` names them.
        local_inputs: True if inputs arrive as shards.
        optimizer: the memory of the optimizer.
        shared: the mesh axis whose ranks have shares of the batch, if there is one.
        task_graphs: primitive -> its mesh axes, for all primitives that mark nodes of the graph.
        summed: parameter whose gradient is also summed with those of devices outside the mesh -> the seconds of that
            per byte of the gradient on a device.
        optional_reruns: names of operators of the forward half that the backward half may recompute, or not.
        movable: names of values that may be moved to the host between the halves.
        copy_price: the price of a second of their copies, which compute may hide, in seconds of the step.
        hosted: parameters whose optimizer state is on the host.
        may_host: True if the optimizer state of other parameters may be there too.
        bounding: True to count only memory that every program holds, for a bound of all plans.
    """

    pinned: Mapping[str, Pins] = field(default_factory=dict)
    placed: bool = False
    forced: frozenset[str] = frozenset()
    planned_outputs: bool = False
    outputs: Mapping[str, Spec] = field(default_factory=dict)
    row_axes: tuple[int, ...] = ()
    local_inputs: bool = False
    optimizer: OptimizerMemory = field(default_factory=OptimizerMemory)
    shared: SharedAxis | None = None
    task_graphs: Mapping[Primitive, tuple[int, ...]] = field(default_factory=dict)
    summed: Mapping[str, float] = field(default_factory=dict)
    optional_reruns: frozenset[str] = frozenset()
    movable: frozenset[str] = frozenset()
    copy_price: float = 1.0
    hosted: frozenset[str] = frozenset()
    may_host: bool = False
    bounding: bool = False


@dataclass(frozen=True, slots=True)
class OverlapDiscount:
    """The price of collectives of one kind as far as compute hides them.

    Attributes:
        kind: `"reductions"` of gradients, or `"gathers"` of parameters.
        compute: for every moment of the step, the seconds of compute that may hide one collective: those after a
            reduction, or before the use of a gathered parameter, in the same half of the step.
        price: price of a hidden second, from 0 to 1.
    """

    kind: HideableKind
    compute: np.ndarray
    price: float


@dataclass(frozen=True, slots=True)
class Hideable:
    """A collective on an edge that compute may hide.

    Attributes:
        kind: as in `OverlapDiscount`.
        seconds: seconds of the reshard for every pair of options.
        moment: the start of a reduction, or the first use of the result of a gather.
    """

    kind: HideableKind
    seconds: np.ndarray
    moment: int


@dataclass(frozen=True, slots=True, eq=False)
class LiveRange:
    """Memory that is held in an interval of moments.

    Attributes:
        bytes: the bytes for every option of a variable, or for every pair of options of an edge.
        start: the first moment at which they are held.
        end: the first moment at which they are no longer held.
    """

    bytes: np.ndarray
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class HostedRest:
    """The spec of a parameter at rest whose optimizer state is on the host."""

    spec: Spec


@dataclass(eq=False)
class Variable:
    """One node of the problem.

    Attributes:
        kind: `"operator"`, `"rest"` (a tensor outside the step), `"output"`, `"hub"` (a shared copy), or `"regather"`:
            the shared copy of the backward half if that may gather again.
        key: name of the node or output, key of the hub, or name of the value that is gathered again.
        options: choices of an operator's strategies, `RegatherChoice`s, or specs; of a parameter at rest also
            `HostedRest`s.
        seconds: seconds of every option by itself.
        results: the specs of its results under every option.
        life: first moment and end of the memory that `usage` counts.
        usage: bytes of every option; None for none.
        live_ranges: the memory that it holds, if memory has a price.
    """

    kind: VariableKind
    key: str
    options: Sequence[Choices] | Sequence[Spec | HostedRest] | Sequence[RegatherChoice]
    seconds: np.ndarray
    results: tuple[SpecList, ...]
    life: tuple[int, int] = (0, 1)
    usage: np.ndarray | None = None
    live_ranges: tuple[LiveRange, ...] = ()


@dataclass(frozen=True, slots=True)
class ReshardEdge:
    """The reshard on an edge.

    Attributes:
        meta: shape and dtype of the tensor.
        sources, targets: its specs under the options of both ends.
        gradient: True if an optimizer gets the result.
    """

    meta: TensorMeta
    sources: SpecList
    targets: SpecList
    gradient: bool


@dataclass(eq=False)
class BuiltProblem:
    """A problem, with the meaning of its nodes and edges.

    Attributes:
        problem: the problem.
        variables: its nodes.
        hideable: number of an edge that reduces a gradient or gathers a parameter -> its collective.
        reshard_edges: number of an edge that is only a reshard -> the reshard.
        live_ranges: the memory of every variable.
        edge_live_ranges: number of an edge -> the memory of its pairs of options.
        origin: the problem without prices from which this one is derived; None if it has no prices itself.
    """

    problem: Problem
    variables: list[Variable]
    hideable: dict[int, Hideable] = field(default_factory=dict)
    reshard_edges: dict[int, ReshardEdge] = field(default_factory=dict)
    live_ranges: list[tuple[LiveRange, ...]] = field(default_factory=list)
    edge_live_ranges: dict[int, tuple[LiveRange, ...]] = field(default_factory=dict)
    origin: BuiltProblem | None = None

    @property
    def plain(self) -> BuiltProblem:
        """The problem of the same variables without prices of memory and without discounts."""
        return self.origin or self

    @cached_property
    def program_positions(self) -> list[float]:
        """Position of every variable in program order; copies and tensors at rest are next to operators."""
        # Prices change no position, so derived problems share the list.
        return _program_positions(self) if self.origin is None else self.origin.program_positions

    @cached_property
    def values_of_both_halves(self) -> frozenset[str]:
        """The names of the values that have a hub of the backward half."""
        return frozenset(variable.key for variable in self.variables if variable.kind == "regather")

    def with_memory_prices(self, prices: np.ndarray) -> BuiltProblem:
        """Return the same problem with memory priced in seconds per byte at every moment of the step."""
        # A live range costs the sum of the prices of its moments: a difference of prefix sums.
        paid = np.concatenate(([0.0], np.cumsum(prices)))
        # Equal layers share their arrays, and so the priced ones.
        vectors: dict[tuple[object, ...], np.ndarray] = {}
        blends: dict[tuple[object, ...], Blend] = {}

        def priced_parts(live_ranges: tuple[LiveRange, ...]) -> list[Part]:
            parts = [(float(paid[live.end] - paid[live.start]), live.bytes) for live in live_ranges]
            return [(price, held) for price, held in parts if price > 0.0]

        def array_key(costs: np.ndarray, parts: list[Part]) -> tuple[object, ...]:
            return (id(costs), *((price, id(held)) for price, held in parts))

        costs = list(self.problem.costs)
        for number, live_ranges in enumerate(self.live_ranges):
            parts = priced_parts(live_ranges)
            if parts:
                key = array_key(costs[number], parts)
                if key not in vectors:
                    vectors[key] = costs[number] + sum(price * held for price, held in parts)
                costs[number] = vectors[key]
        edges = list(self.problem.edges)
        for number, live_ranges in self.edge_live_ranges.items():
            edge, parts = edges[number], priced_parts(live_ranges)
            if parts:
                key = array_key(edge.costs, parts)
                if key not in blends:
                    blends[key] = blend([(1.0, edge.costs), *parts])
                edges[number] = Edge(edge.source, edge.target, blends[key])
        problem = replace(self.problem, costs=tuple(costs), edges=tuple(edges))
        # The costs of edges now include memory.
        return replace(self, problem=problem, reshard_edges={}, origin=self.plain)

    def with_discount(self, discount: OverlapDiscount) -> BuiltProblem:
        """Return the same problem with a discount on collectives of one kind as far as compute hides them."""
        edges, tables = list(self.problem.edges), dict[tuple[int, int, float], np.ndarray]()
        for number, hideable in self.hideable.items():
            if hideable.kind != discount.kind:
                continue
            edge, seconds = edges[number], hideable.seconds
            available = float(discount.compute[hideable.moment])
            # Compute beyond the largest entry changes nothing: the minimum lets equal layers share their tables.
            compute = min(available, seconds.max(initial=0.0, where=np.isfinite(seconds)))
            key = (id(edge.costs), id(seconds), compute)
            if key not in tables:
                tables[key] = edge.costs - (1.0 - discount.price) * np.minimum(seconds, available)
            edges[number] = Edge(edge.source, edge.target, tables[key])
        return replace(self, problem=replace(self.problem, edges=tuple(edges)), origin=self.plain)

    def held_bytes(self, assignment: Sequence[int], moments: int) -> np.ndarray:
        """Return the bytes that an assignment holds at every moment, as prices of memory count them."""
        changes = np.zeros(moments + 1)
        parts = [(live, live.bytes[assignment[node]]) for node, lives in enumerate(self.live_ranges) for live in lives]
        for number, lives in self.edge_live_ranges.items():
            edge = self.problem.edges[number]
            pair = assignment[edge.source], assignment[edge.target]
            parts += ((live, live.bytes[pair]) for live in lives)
        for live, held in parts:
            changes[live.start] += held
            changes[live.end] -= held
        return np.asarray(np.cumsum(changes)[:moments])

    def decode(self, assignment: Sequence[int]) -> Decisions:
        """Return the decisions of an assignment."""
        tables: dict[str, dict[str, Any]] = {kind: {} for kind in get_args(VariableKind)}
        for variable, option in zip(self.variables, assignment, strict=True):
            tables[variable.kind][variable.key] = variable.options[option]
        hubs = hubs_from_choices(tables["hub"], tables["regather"])
        rest, hosted = tables["rest"], {name: at for name, at in tables["rest"].items() if isinstance(at, HostedRest)}
        rest |= {name: at.spec for name, at in hosted.items()}
        return Decisions(tables["operator"], rest, tables["output"], hubs, frozenset(hosted))

    def encode(self, decisions: Decisions) -> list[int]:
        """Return the assignment of decisions of this problem.

        Raises:
            ValueError: the problem has no such option.
        """
        hubs, regather = choices_from_hubs(decisions.hubs, self.values_of_both_halves)
        tables: dict[str, Mapping[str, Any]] = {
            "operator": decisions.choices,
            "rest": {**decisions.rest, **{name: HostedRest(decisions.rest[name]) for name in decisions.hosted}},
            "output": decisions.outputs,
            "hub": hubs,
        }
        assignment = []
        for variable in self.variables:
            options: list[Any] = list(variable.options)
            if variable.kind == "regather":
                origin, spec = regather[variable.key]
                # The spec of an absent value has no meaning.
                options = [(each.origin, None if each.origin == "absent" else each.spec) for each in options]
                assignment.append(options.index((origin, spec)))
            else:
                assignment.append(options.index(tables[variable.kind].get(variable.key)))
        return assignment


def _program_positions(built: BuiltProblem) -> list[float]:
    variables = built.variables
    # Variables of operators are added in program order: their numbers are positions.
    positions = {number: float(number) for number, variable in enumerate(variables) if variable.kind == "operator"}
    sources: dict[int, list[int]] = defaultdict(list)
    targets: dict[int, list[int]] = defaultdict(list)
    for edge in built.problem.edges:
        if edge.target not in positions:
            sources[edge.target].append(edge.source)
        if edge.source not in positions:
            targets[edge.source].append(edge.target)
    # Hubs first, since a tensor at rest or an output may have edges only to hubs.
    for kind in ("hub", "regather", "rest", "output"):
        for number, variable in enumerate(variables):
            if variable.kind == kind:
                before = [positions[source] for source in sources[number] if source in positions]
                after = [positions[target] for target in targets[number] if target in positions]
                # A copy comes after its producer, a tensor at rest before its first use.
                if kind == "rest" or not before:
                    positions[number] = min(after, default=0.0) - 0.5
                else:
                    positions[number] = max(before) + 0.25
    return [positions.get(number, 0.0) for number in range(len(variables))]
