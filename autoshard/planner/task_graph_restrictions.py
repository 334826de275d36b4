"""Restrictions of operators by Whale's task graphs: some mesh axes split only the batch, or anything but the batch."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import fx
from torch.distributed.tensor import Replicate

from autoshard.capture.joint import JointGraph
from autoshard.capture.marks import Primitive, TaskGraph
from autoshard.cluster.cost import flops
from autoshard.errors import HintError
from autoshard.options.placements import InfeasibleHintError, Pins
from autoshard.patterns.graph_rules import GraphRules, Value, operand_nodes, value_of
from autoshard.patterns.propagation import DimPart
from autoshard.patterns.strategy import WHOLE, Choices, offered_factors
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import dim_of
from autoshard.specs.spec import is_shard, split_factor_of

_COPY_OPS = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
_SUM_OPS = _COPY_OPS | {torch.ops.aten.add.Tensor}
_HEAVY_SHARE = 0.95  # fraction of the arithmetic of a task graph in its heavy operators


@dataclass(frozen=True, slots=True)
class Restriction:
    """The strategies of an operator that its task graph allows.

    Attributes:
        axes: indices of the mesh axes of the task graph.
        allowed: the factors that these axes may split; None for all but those of `forbidden`.
        forbidden: the factors that they must not split.
        preferred: the factors that as many of these axes as possible should split; None for all allowed factors.
        sums: whether partial sums over these axes may pass through the operator: `"allowed"`; `"preferred"`, which
            counts as if a preferred factor were split; or `"refused"`.
    """

    axes: tuple[int, ...]
    allowed: frozenset[int] | None = None
    forbidden: frozenset[int] = frozenset()
    preferred: frozenset[int] | None = None
    sums: Literal["allowed", "preferred", "refused"] = "allowed"

    def filter_strategies(self, strategies: Sequence[Choices]) -> tuple[Choices, ...]:
        """Return the allowed strategies that split preferred factors on the most axes."""
        allowed = []
        for choices in strategies:
            split = [choices[axis] for axis in self.axes if choices[axis] > WHOLE]
            sums = sum(choices[axis] < WHOLE for axis in self.axes)
            if sums and self.sums == "refused":
                continue
            if self.forbidden.isdisjoint(split) and (self.allowed is None or self.allowed.issuperset(split)):
                count = sum(self.preferred is None or factor in self.preferred for factor in split)
                count += sums if self.sums == "preferred" else 0
                allowed.append((count, choices))
        most = max((count for count, _ in allowed), default=0)
        # If fixed axes outside the task graph exclude all allowed strategies, all are allowed.
        return tuple(choices for count, choices in allowed if count == most) or tuple(strategies)


@dataclass(frozen=True, slots=True)
class Restrictions:
    """The restrictions of a step by its task graphs.

    Attributes:
        operators: operator in a task graph -> its restrictions, of different mesh axes.
        sharded_parameters: name of a parameter that must be sharded -> the mesh axes.
    """

    operators: Mapping[fx.Node, tuple[Restriction, ...]]
    sharded_parameters: Mapping[str, tuple[int, ...]]


def axes_of(graph: JointGraph, mesh: MeshShape) -> dict[Primitive, tuple[int, ...]]:
    """Return the mesh axes of every primitive of a graph.

    Raises:
        HintError: no axis or product of axes has as many devices as a primitive asks for; there is no axis with a name;
            or two primitives of one task graph share an axis.
    """
    marks = (graph.task_graph(node) for node in graph.graph.nodes)
    axes: dict[Primitive, tuple[int, ...]] = {}
    for primitives in dict.fromkeys(task_graph.primitives for task_graph in marks if task_graph):
        axes |= {primitive: _axes(primitive, mesh) for primitive in primitives}
        shared = Counter(itertools.chain(*(axes[primitive] for primitive in primitives))).most_common(1)
        if shared and shared[0][1] > 1:
            raise HintError(
                f"{' and '.join(f'autoshard.{primitive}' for primitive in primitives)} are for one module, and have "
                f"the mesh axis {mesh.names[shared[0][0]]!r} in common: name different axes of {mesh}."
            )
    return axes


def _axes(primitive: Primitive, mesh: MeshShape) -> tuple[int, ...]:
    """Return the mesh axes with as many devices as a primitive asks for."""
    used = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    devices = primitive.devices
    if devices is None:
        return tuple(used)
    if isinstance(devices, tuple):
        unknown = [name for name in devices if name not in mesh.names]
        if unknown:
            raise HintError(
                f"autoshard.{primitive} names the mesh axis {unknown[0]!r}; the axes of this mesh are {mesh}."
            )
        return tuple(axis for axis in used if mesh.names[axis] in devices)
    # The empty group is included, since a primitive may ask for one device.
    groups = [group for count in range(len(used) + 1) for group in itertools.combinations(used, count)]
    fitting = [group for group in groups if math.prod(mesh.sizes[axis] for axis in group) == devices]
    if not fitting:
        possible = sorted({math.prod(mesh.sizes[axis] for axis in group) for group in groups if group})
        raise InfeasibleHintError(
            f"autoshard.{primitive} asks for {devices} devices, and no axis of the mesh {mesh}, nor any product of its "
            f"axes, has that many. Possible are {', '.join(map(str, possible)) or 'only 1'}; {primitive.kind}() takes "
            f"all there are, and {primitive.kind}({mesh.names[-1]!r}) those of an axis."
        )
    # Prefer one axis to several: groups are sorted by size. Prefer the last axis for `split`, which is usually that of
    # tensor parallelism, else the first.
    shortest = [group for group in fitting if len(group) == len(fitting[0])]
    return shortest[-1 if primitive.kind == "split" else 0]


def whole_parameters(graph: JointGraph, axes: Mapping[Primitive, tuple[int, ...]], mesh: MeshShape) -> dict[str, Pins]:
    """Return pins that replicate the parameters of replicated task graphs on the axes of all their users."""
    pinned: dict[str, Pins] = {}
    for source in graph.parameters:
        users = [graph.task_graph(user) for user in source.node.users if user.op == "call_function"]
        used = [
            [axis for primitive in user.primitives if primitive.kind == "replicate" for axis in axes[primitive]]
            if user
            else []
            for user in users
        ]
        # All users must be in replicated task graphs with the axis.
        whole = set(used[0]).intersection(*used[1:]) if used else set()
        if whole:
            pinned[source.name] = tuple(Replicate() if axis in whole else None for axis in range(mesh.ndim))
    return pinned


def restrictions(
    rules: GraphRules, axes: Mapping[Primitive, tuple[int, ...]], pinned: Mapping[str, Pins], mesh: MeshShape
) -> Restrictions:
    """Return the restrictions of a step by its task graphs.

    In a replicated task graph, operators split only the batch, if they have it. In a split one, no operator splits the
    batch; those with most of the arithmetic split another dim, preferably of parameters rather than of inputs, and
    their parameters are sharded. In a split one with `rest`, operators split the factors over pinned shards of
    parameters, and the others the factors that `rest` names.

    Args:
        rules: the graph and its rules.
        axes: the mesh axes of every primitive.
        pinned: name of a parameter -> its placements, None where the planner decides.
        mesh: the mesh axes.

    Raises:
        HintError: no parameter of a split task graph with a rest is pinned to shards on its axes, or no input has a
            sequence.

    Source: Whale 3.1.2; which dim is split is left to the search, as patterns are in 3.2.2.
    """
    members: dict[TaskGraph, list[fx.Node]] = defaultdict(list)
    # Casts of parameters and of their gradients are free: casting shards before the gather halves its bytes.
    casts = _casts(rules.graph)
    for node in rules.operators:
        task_graph = rules.graph.task_graph(node)
        if task_graph is not None and node not in casts:
            members[task_graph].append(node)
    used = {primitive for task_graph in members for primitive in task_graph.primitives if axes[primitive]}
    if not used:
        return Restrictions({}, {})
    builder = _RestrictionBuilder(rules, axes, pinned, mesh)
    builder.check_shards(used, members)
    operators: dict[fx.Node, tuple[Restriction, ...]] = {}
    for task_graph, nodes in members.items():
        for primitive in task_graph.primitives:
            if axes[primitive]:
                for node, restriction in builder.restrict(task_graph, primitive, nodes):
                    operators[node] = (*operators.get(node, ()), restriction)
    return Restrictions(operators, builder.sharded_parameters)


class _RestrictionBuilder:
    """Builds the restrictions of task graphs; arguments as for `restrictions`.

    Attributes:
        sharded_parameters: as in `Restrictions`.
    """

    def __init__(
        self, rules: GraphRules, axes: Mapping[Primitive, tuple[int, ...]], pinned: Mapping[str, Pins], mesh: MeshShape
    ) -> None:
        self.rules = rules
        self.axes = axes
        self.pinned = pinned
        self.mesh = mesh
        self.sharded_parameters: dict[str, tuple[int, ...]] = {}

    @cached_property
    def batch(self) -> dict[fx.Node, frozenset[int]]:
        """The factors of every operator that run over the batch."""
        return self.rules.batch_factors()

    @cached_property
    def sequence(self) -> dict[fx.Node, frozenset[int]]:
        """The factors of every operator that run over the sequence."""
        inputs = sequence_inputs(self.rules)
        if not inputs:
            raise HintError(
                'autoshard.split(rest="sequence"): no input has a batch, a sequence, and at most one dim more. Choose '
                'rest="whole".'
            )
        return self.rules.factors_along(DimPart(node, 1) for node in inputs)

    @cached_property
    def computed(self) -> frozenset[fx.Node]:
        """The operators that depend on parameters."""
        known = {source.node for source in self.rules.graph.inputs if source.kind in ("parameter", "tangent")}
        for node in self.rules.operators:
            if not known.isdisjoint(value.node for value in self.rules.operands[node]):
                known.add(node)
        return frozenset(known)

    @cached_property
    def weights(self) -> _ParameterFactors:
        """The factors of operators over dims of parameters."""
        return _ParameterFactors(self.rules)

    def restrict(
        self, task_graph: TaskGraph, primitive: Primitive, nodes: Sequence[fx.Node]
    ) -> Iterator[tuple[fx.Node, Restriction]]:
        """Return every restricted operator of a task graph with its restriction by one of the primitives."""
        if primitive.rest is not None:
            return self._along_shards(task_graph, primitive, nodes)
        if primitive.kind == "replicate":
            return ((node, Restriction(self.axes[primitive], self._of(self.batch, node))) for node in nodes)
        return self._by_work(self.axes[primitive], nodes)

    def _by_work(self, axes: tuple[int, ...], nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, Restriction]]:
        heavy = _heavy_operators(self.rules, nodes)
        for node in nodes:
            samples = self._of(self.batch, node)
            if node not in heavy:
                yield node, Restriction(axes, forbidden=samples, preferred=frozenset())
            else:
                preferred = self.weights.factors(node) - samples or None
                yield node, Restriction(axes, forbidden=samples, preferred=preferred)
                self.sharded_parameters.update(dict.fromkeys(self.weights.names(node), axes))

    def _along_shards(
        self, task_graph: TaskGraph, primitive: Primitive, nodes: Sequence[fx.Node]
    ) -> Iterator[tuple[fx.Node, Restriction]]:
        shards = list(self._shards(task_graph, primitive))
        split = self.rules.factors_along(shards)
        kinds = {"batch": lambda: self.batch, "sequence": lambda: self.sequence, "whole": dict}
        others: Mapping[fx.Node, frozenset[int]] = kinds[primitive.rest or "whole"]()
        # A rank with shards of the groups' matrices receives the rows of these groups.
        groups = {node: _group_factors(self.rules, node) for node in nodes}
        sends_rows = any(groups[node] & split.get(node, frozenset()) for node in nodes)
        sharded = {self.weights.parameters[part.node] for part in shards}
        for node in nodes:
            along, other = self._of(split, node), self._of(others, node)
            # Views, and values that depend on no parameter, such as positions, cost almost nothing: they follow their
            # readers.
            is_open = self.rules.rules[node].free or node not in self.computed
            if sends_rows and groups[node]:
                along = groups[node]
            elif primitive.rest == "batch" and sharded.isdisjoint(self.weights.names(node)):
                # Only products with shards must follow them: a gate has a dim of experts, but is computed per sample.
                is_open = is_open or not other
                along, other = frozenset(), along | other
            if along:
                yield node, Restriction(self.axes[primitive], along)
            else:
                yield node, self._of_rest(node, self.axes[primitive], other, is_open)

    def _of_rest(self, node: fx.Node, axes: tuple[int, ...], factors: frozenset[int], is_open: bool) -> Restriction:
        if is_open:
            return Restriction(axes, factors, preferred=frozenset())
        # Gradients are summed before they are reduced; other operators get reduced operands.
        if self.rules.calls[node].op not in _SUM_OPS:
            return Restriction(axes, factors, sums="refused")
        return Restriction(axes, factors, sums="preferred" if factors else "allowed")

    def _shards(self, task_graph: TaskGraph, primitive: Primitive) -> Iterator[DimPart]:
        """Yield the parts of dims that are pinned shards of a task graph's parameters."""
        for source in self.rules.graph.parameters:
            pins = self.pinned.get(source.name)
            if pins is None or all(self.rules.graph.task_graph(user) != task_graph for user in source.node.users):
                continue
            parts: dict[int, DimPart] = {}
            for axis in self.axes[primitive]:
                pin = pins[axis]
                if pin is not None and is_shard(pin):
                    dim, size = dim_of(pin, len(Value(source.node).meta.shape)), self.mesh.sizes[axis]
                    outer, blocks = parts.get(dim, (source.node, dim, split_factor_of(pin), 1))[2:]
                    parts[dim] = DimPart(source.node, dim, outer, (blocks or 1) * size)
            yield from parts.values()

    def check_shards(self, used: Iterable[Primitive], task_graphs: Iterable[TaskGraph]) -> None:
        """Raise a `HintError` if a primitive splits operators along shards, and there are none."""
        for primitive in used:
            graphs = [task_graph for task_graph in task_graphs if primitive in task_graph.primitives]
            if primitive.rest is not None and not any(any(self._shards(graph, primitive)) for graph in graphs):
                names = " and ".join(repr(self.mesh.names[axis]) for axis in self.axes[primitive])
                raise HintError(
                    f"autoshard.{primitive} splits operators along the shards that hints give their parameters on "
                    f"{names}, and they give none: add hints such as {{'*.up.weight': {{{names}: Shard(0)}}}}."
                )

    @staticmethod
    def _of(factors: Mapping[fx.Node, frozenset[int]], node: fx.Node) -> frozenset[int]:
        return factors.get(node, frozenset())


def sequence_inputs(rules: GraphRules) -> list[fx.Node]:
    """Return the inputs with a batch dim, then a sequence dim, and at most one more."""
    return [node for node in rules.batch_inputs() if len(Value(node).meta.shape) in (2, 3)]


def _group_factors(rules: GraphRules, node: fx.Node) -> frozenset[int]:
    """Return the factors of an operator that send rows to groups."""
    offered = offered_factors(rules.rules[node])
    return frozenset(index for index, factor in enumerate(offered) if factor.routed == "group")


def _casts(graph: JointGraph) -> set[fx.Node]:
    """Return the casts of parameters, and those whose results are gradients of parameters."""
    parameters = {source.node for source in graph.parameters}
    gradients = set(graph.gradients.values())
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    return {node for node in copies if node in gradients or node.all_input_nodes[0] in parameters}


def _heavy_operators(rules: GraphRules, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the fewest operators with most of the arithmetic; all but views if none has any arithmetic."""
    work = {}
    for node in nodes:
        call = rules.calls[node]
        results = [meta.shape for meta in call.results if meta is not None]
        work[node] = flops(call.op, [meta.shape for meta in call.operands], results, call.args)
    falling = sorted(work.values(), reverse=True)
    # Equal operators are all heavy or none is, since layers would differ otherwise.
    goal, sums = _HEAVY_SHARE * sum(falling), itertools.accumulate(falling)
    least = next((amount for amount, total in zip(falling, sums, strict=True) if total >= goal), 0.0)
    return frozenset(node for node, amount in work.items() if amount >= least and not rules.rules[node].free)


def _dims_of(placeholders: Iterable[fx.Node]) -> Iterator[DimPart]:
    return (DimPart(node, dim) for node in placeholders for dim in range(len(Value(node).meta.shape)))


class _ParameterFactors:
    """Parameters that operators take, and factors of operators over dims of parameters."""

    def __init__(self, rules: GraphRules) -> None:
        self.rules = rules
        self.parameters = {source.node: source.name for source in rules.graph.parameters}
        inputs = [source.node for source in rules.graph.inputs if source.kind == "input"]
        self._along_weights = rules.factors_along(_dims_of(self.parameters))
        self._along_inputs = rules.factors_along(_dims_of(inputs))
        self._gradients = {origin(rules, node, is_copy) for node in rules.graph.gradients.values()}

    def names(self, node: fx.Node) -> tuple[str, ...]:
        """Return the parameters that an operator takes, through views and casts."""
        nodes = [origin(self.rules, source, is_copy).node for source in operand_nodes(node)]
        return tuple(self.parameters[each] for each in nodes if each in self.parameters)

    def factors(self, node: fx.Node) -> frozenset[int]:
        """Return the factors over dims of parameters of an operator that reads a parameter, or computes its gradient.

        An operator that takes a selection of a parameter counts too.
        """
        origins = {origin(self.rules, source, _takes_one).node for source in operand_nodes(node)}
        results = {Value(node, index) for index in range(len(self.rules.calls[node].results))}
        if not self._gradients & results and not self.parameters.keys() & origins:
            return frozenset()
        factors = self._along_weights.get(node, frozenset())
        # If possible without those that inputs have too: a table of positions has a dim of the sequence.
        return factors - self._along_inputs.get(node, frozenset()) or factors


def origin(rules: GraphRules, node: fx.Node, passes: Callable[[GraphRules, fx.Node], bool]) -> Value:
    """Return the value from which a value is computed only by operators for which `passes` returns True."""
    value = value_of(node)
    while value.node in rules.calls and passes(rules, value.node):
        # Indices into a parameter are not the origin of the value.
        sources = [source for source in operand_nodes(value.node) if source.meta["val"].dtype.is_floating_point]
        if len(sources) != 1:
            break
        value = value_of(sources[0])
    return value


def is_copy(rules: GraphRules, node: fx.Node) -> bool:
    """Return True if an operator is a view, a copy or a cast."""
    return rules.rules[node].free or rules.calls[node].op in _COPY_OPS


def _takes_one(rules: GraphRules, node: fx.Node) -> bool:
    """Return True if an operator takes one floating-point tensor, and perhaps indices into it."""
    return sum(meta.dtype.is_floating_point for meta in rules.calls[node].operands) == 1
