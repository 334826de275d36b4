"""A joint graph as an optimisation problem: variables, their options, and the seconds between them (Rhino 4.2).

Every operator, tensor at rest and shared copy is a node of the problem; its strategies are its options. An edge holds
the seconds to reshard a tensor from each option of its producer to each option of its user. What memory costs, and what
of a reduction is hidden, are prices that such a problem is asked at; `building` makes the problem itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch.distributed.tensor import Placement

from autoshard.capture.task_graphs import Primitive
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.rule import TensorMeta
from autoshard.patterns.strategy import Choices
from autoshard.planner.regather import RegatherChoice, choices_from_hubs, hubs_from_choices
from autoshard.planner.strategy_tables import SpecList
from autoshard.solver import Edge, Problem
from autoshard.solver.blend import Blend, BlendedEdge, Part, blend
from autoshard.specs.shared_axis import SharedAxis
from autoshard.specs.spec import Spec

HideableKind = Literal["reductions", "gathers"]


@dataclass(frozen=True, slots=True)
class Constraints:
    """What the user and the memory limit ask of the plan.

    Attributes:
        pinned: placeholder name -> placement per axis, None where the planner decides.
        forced: parameters that may not be replicated (Rhino 4.4).
        planned_outputs: outputs are handed back as they lie, not gathered.
        outputs: output name -> the spec in which it is to be handed back.
        local_inputs: inputs arrive as shards.
        optimizer: what it holds beside a trained parameter and its gradient.
        shared: the mesh axis of which ranks hold shares of their own of the batch, if there is one.
        task_graphs: the mesh axes of every primitive that the graph's nodes are marked with.
        summed: parameters whose gradients are added up with those of other devices than the mesh's, and the seconds
            that this counts for every byte that a device holds of them.
    """

    pinned: Mapping[str, tuple[Placement | None, ...]] = field(default_factory=dict)
    forced: frozenset[str] = frozenset()
    planned_outputs: bool = False
    outputs: Mapping[str, Spec] = field(default_factory=dict)
    local_inputs: bool = False
    optimizer: OptimizerMemory = field(default_factory=OptimizerMemory)
    shared: SharedAxis | None = None
    task_graphs: Mapping[Primitive, tuple[int, ...]] = field(default_factory=dict)
    summed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OverlapDiscount:
    """What collectives of one kind count while compute hides them.

    Attributes:
        kind: `"reductions"` of gradients, or `"gathers"` of parameters.
        compute: seconds of compute that may hide one of every moment of the step: those that follow a reduction, and
            those before what needs a gather, in the same half.
        price: of a hidden second, from 0 to 1.
    """

    kind: HideableKind
    compute: np.ndarray
    price: float

    def hidden_seconds(self, seconds: np.ndarray, moment: int) -> np.ndarray:
        """The part of a collective's seconds that compute hides."""
        return np.minimum(seconds, self.compute[moment])


@dataclass(frozen=True, slots=True)
class Hideable:
    """What compute may hide of an edge.

    Attributes:
        kind: as of `OverlapDiscount`.
        seconds: of the reshard, for every pair of options.
        moment: of a reduction, at which it starts; of a gather, at which its result is needed.
    """

    kind: HideableKind
    seconds: np.ndarray
    moment: int


@dataclass(frozen=True, slots=True, eq=False)
class LiveRange:
    """What is held for some moments, and costs what memory costs then.

    Attributes:
        bytes: held under every option of a variable, or every pair of options of two.
        start, end: from which moment, and until before which.
    """

    bytes: np.ndarray
    start: int
    end: int


@dataclass(eq=False)
class Variable:
    """One node of the problem.

    Attributes:
        kind: `"operator"`, `"rest"`, `"output"`, `"hub"`, or `"again"`: the hub of the backward half where that may
            make a copy of its own.
        key: name of the node, output, copy, or copied value.
        options: a strategy's choices for an operator, a `RegatherChoice` for the hub of the backward half, a spec for
            the others.
        seconds: of every option by itself.
        life: first and last position in the program at which its memory is held.
        usage: bytes of every option.
        rents: what it holds, and when, where memory has a price.
    """

    kind: str
    key: str
    options: Sequence[Choices] | Sequence[Spec] | Sequence[RegatherChoice]
    seconds: np.ndarray
    results: tuple[SpecList, ...]
    life: tuple[int, int] = (0, 1)
    usage: np.ndarray | None = None
    live_ranges: tuple[LiveRange, ...] = ()


@dataclass(frozen=True, slots=True)
class ReshardEdge:
    """What is resharded on an edge.

    Attributes:
        meta: of the tensor.
        sources, targets: its specs under the options of either end.
        gradient: whether an optimizer is given what arrives.
    """

    meta: TensorMeta
    sources: SpecList
    targets: SpecList
    gradient: bool


@dataclass(eq=False)
class BuiltProblem:
    """A problem, and how its assignments read as decisions.

    Attributes:
        problem: the problem.
        variables: its nodes.
        hideable: number of an edge on which a gradient goes to its optimizer, or a parameter to its use -> what
            compute may hide of it.
        crossings: number of an edge that is a reshard and nothing else -> that.
        rents: what the options of a variable hold, per variable.
        edge_rents: number of an edge -> what the pairs of options hold.
        origin: the problem of the same variables in which neither memory nor hiding has a price; None for that itself.
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
        """The problem of the same variables in which neither memory nor hiding has a price."""
        return self.origin or self

    @cached_property
    def program_positions(self) -> list[float]:
        """Where every variable comes in the order of the program: what is no operator stands by those that it joins."""
        return _program_positions(self) if self.origin is None else self.origin.program_positions

    def with_memory_prices(self, prices: np.ndarray) -> BuiltProblem:
        """The same problem where memory has a price, in seconds per byte, at every moment of the step."""
        paid = np.concatenate(([0.0], np.cumsum(prices)))
        vectors: dict[tuple[object, ...], np.ndarray] = {}
        blends: dict[tuple[object, ...], Blend] = {}  # equal edges share one

        def parts(rents: tuple[LiveRange, ...]) -> list[Part]:
            owed = [(float(paid[rent.end] - paid[rent.start]), rent.bytes) for rent in rents]
            return [(price, held) for price, held in owed if price > 0.0]

        def array_key(costs: np.ndarray, more: list[Part]) -> tuple[object, ...]:
            return (id(costs), *((price, id(held)) for price, held in more))

        costs = list(self.problem.costs)
        for number, rents in enumerate(self.live_ranges):
            more = parts(rents)
            if more:
                key = array_key(costs[number], more)
                if key not in vectors:
                    vectors[key] = costs[number] + sum(price * held for price, held in more)
                costs[number] = vectors[key]
        edges = list(self.problem.edges)
        for number, rents in self.edge_live_ranges.items():
            edge, more = edges[number], parts(rents)
            if more:
                key = array_key(edge.costs, more)
                if key not in blends:
                    blends[key] = blend([(1.0, edge.costs), *more])
                edges[number] = BlendedEdge(edge.source, edge.target, blends[key])
        problem = replace(self.problem, costs=tuple(costs), edges=tuple(edges))
        return replace(self, problem=problem, reshard_edges={}, origin=self.plain)

    def with_discount(self, hiding: OverlapDiscount) -> BuiltProblem:
        """The same problem where collectives of a kind count less as far as compute hides them."""
        edges, made = list(self.problem.edges), dict[tuple[int, int, float], np.ndarray]()
        for number, one in self.hideable.items():
            if one.kind != hiding.kind:
                continue
            edge = edges[number]
            most = one.seconds.max(initial=0.0, where=np.isfinite(one.seconds))
            compute = min(float(hiding.compute[one.moment]), most)
            key = (id(edge.costs), id(one.seconds), compute)  # equal layers share a table
            if key not in made:
                made[key] = edge.costs - (1.0 - hiding.price) * hiding.hidden_seconds(one.seconds, one.moment)
            edges[number] = Edge(edge.source, edge.target, made[key])
        return replace(self, problem=replace(self.problem, edges=tuple(edges)), origin=self.plain)

    def decode(self, assignment: Sequence[int]) -> Decisions:
        """The decisions that an assignment stands for."""
        tables: dict[str, dict[str, Any]] = {"operator": {}, "rest": {}, "output": {}, "hub": {}, "again": {}}
        for variable, option in zip(self.variables, assignment, strict=True):
            tables[variable.kind][variable.key] = variable.options[option]
        hubs = hubs_from_choices(tables["hub"], tables["again"])
        return Decisions(tables["operator"], tables["rest"], tables["output"], hubs)

    def encode(self, decisions: Decisions) -> list[int]:
        """The assignment that stands for decisions made of this problem."""
        hubs, again = choices_from_hubs(decisions.hubs, [one.key for one in self.variables if one.kind == "again"])
        tables: dict[str, Mapping[str, object]] = {
            "operator": decisions.choices,
            "rest": decisions.rest,
            "output": decisions.outputs,
            "hub": hubs,
            "again": again,
        }
        return [list(one.options).index(tables[one.kind][one.key]) for one in self.variables]


def _program_positions(built: BuiltProblem) -> list[float]:
    variables = built.variables
    place = {number: float(number) for number, variable in enumerate(variables) if variable.kind == "operator"}
    sources: dict[int, list[int]] = defaultdict(list)
    targets: dict[int, list[int]] = defaultdict(list)
    for edge in built.problem.edges:
        if edge.target not in place:
            sources[edge.target].append(edge.source)
        if edge.source not in place:
            targets[edge.source].append(edge.target)
    for kind in ("hub", "rest", "output"):
        for number, variable in enumerate(variables):
            if variable.kind == kind:
                made = [place[other] for other in sources[number] if other in place]
                used = [place[other] for other in targets[number] if other in place]
                if kind == "rest" or not made:
                    place[number] = min(used, default=0.0) - 0.5
                else:
                    place[number] = max(made) + 0.25
    return [place.get(number, 0.0) for number in range(len(variables))]
