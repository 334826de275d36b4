"""What the primitives of Whale leave to an operator of a task graph: some mesh axes split the batch, or do not."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Placement, Replicate

from autoshard.capture.joint import JointGraph
from autoshard.capture.task_graphs import Primitive, TaskGraph
from autoshard.cluster.flops import flops
from autoshard.errors import HintError
from autoshard.patterns.batch import batch_factors, factors_along
from autoshard.patterns.graph_rules import GraphRules, Value, operand_nodes, value_of
from autoshard.patterns.strategy import WHOLE, Choices
from autoshard.specs.axes import MeshShape

_COPY_OPS = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
_HEAVY_SHARE = 0.95  # of the arithmetic of a task graph


@dataclass(frozen=True, slots=True)
class Restriction:
    """Which strategies of an operator its task graph allows.

    Attributes:
        axes: indices of the mesh axes that it speaks of.
        allowed: the factors that these may split; all but those of `forbidden` where it is None.
        forbidden: the factors that they may not split.
        wanted: the factors of which as many axes as possible are to split one; None for all that are allowed.
    """

    axes: tuple[int, ...]
    allowed: frozenset[int] | None = None
    forbidden: frozenset[int] = frozenset()
    wanted: frozenset[int] | None = None

    def filter_strategies(self, strategies: Sequence[Choices]) -> tuple[Choices, ...]:
        """The strategies that are allowed: of those that do nothing forbidden, those that split most as they should.

        All of them where none is allowed, since other axes are fixed in a way that leaves none.
        """
        allowed = [(self._splits(choices), choices) for choices in strategies if self._allows(choices)]
        most = max((count for count, _ in allowed), default=0)
        return tuple(choices for count, choices in allowed if count == most) or tuple(strategies)

    def _allows(self, choices: Choices) -> bool:
        split = [choices[axis] for axis in self.axes if choices[axis] > WHOLE]
        return self.forbidden.isdisjoint(split) and (self.allowed is None or self.allowed.issuperset(split))

    def _splits(self, choices: Choices) -> int:
        """On how many of the axes the operator is split as it is wanted."""
        split = [choices[axis] for axis in self.axes if choices[axis] > WHOLE]
        return len(split) if self.wanted is None else sum(one in self.wanted for one in split)


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What the task graphs of a step ask for.

    Attributes:
        operators: which strategies an operator may have; those that are in no task graph are not among them.
        apart: parameters that lie in shards, and over which mesh axes.
    """

    operators: Mapping[fx.Node, Restriction]
    sharded_parameters: Mapping[str, tuple[int, ...]]


def axes_of(graph: JointGraph, mesh: MeshShape) -> dict[Primitive, tuple[int, ...]]:
    """The mesh axes of every primitive of a graph.

    Raises:
        HintError: no axis, and no product of axes, has as many devices as a primitive asks for; or there is no axis of
            a name.
    """
    marked = (graph.task_graph(node) for node in graph.graph.nodes)
    return {primitive: _axes(primitive, mesh) for primitive in dict.fromkeys(one.primitive for one in marked if one)}


def _axes(primitive: Primitive, mesh: MeshShape) -> tuple[int, ...]:
    """Of axes that have as many devices as asked for: one rather than several; the last for `split`, else the first."""
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
    groups = [group for count in range(len(used) + 1) for group in itertools.combinations(used, count)]
    fitting = [group for group in groups if math.prod(mesh.sizes[axis] for axis in group) == devices]
    if not fitting:
        possible = sorted({math.prod(mesh.sizes[axis] for axis in group) for group in groups if group})
        raise HintError(
            f"autoshard.{primitive} asks for {devices} devices, and no axis of the mesh {mesh}, nor any product of its "
            f"axes, has that many. Possible are {', '.join(map(str, possible)) or 'only 1'}; {primitive.kind}() takes "
            f"all there are, and {primitive.kind}({mesh.names[-1]!r}) those of an axis."
        )
    shortest = [group for group in fitting if len(group) == len(fitting[0])]
    return shortest[-1 if primitive.kind == "split" else 0]


def whole_parameters(
    graph: JointGraph, axes: Mapping[Primitive, tuple[int, ...]], mesh: MeshShape
) -> dict[str, tuple[Placement | None, ...]]:
    """What replicated task graphs pin: parameters that these alone use are whole on their axes."""
    pinned: dict[str, tuple[Placement | None, ...]] = {}
    for source in graph.inputs:
        users = [graph.task_graph(user) for user in source.node.users if user.op == "call_function"]
        used = [axes[one.primitive] if one and one.primitive.kind == "replicate" else () for one in users]
        whole = set(used[0]).intersection(*used[1:]) if used else set()
        if source.kind == "parameter" and whole:
            pinned[source.name] = tuple(Replicate() if axis in whole else None for axis in range(mesh.ndim))
    return pinned


def restrictions(rules: GraphRules, axes: Mapping[Primitive, tuple[int, ...]]) -> Restrictions:
    """What the task graphs of a step ask for.

    Of a replicated one: operators split the batch if they have it, and nothing else. Of a split one: none splits the
    batch, and those with most of the arithmetic split something else, a dim of parameters rather than of inputs. A
    parameter that one of them takes lies in shards. Casts of parameters and of their gradients are free: one that is
    in shards is cast there, and half as much is gathered.

    Args:
        rules: of the graph.
        axes: of every primitive in it.

    Source: Whale 3.1.2; which dim is split is left to the search, as patterns are in 3.2.2.
    """
    members: dict[TaskGraph, list[fx.Node]] = defaultdict(list)
    casts = _casts(rules.graph)
    for node in rules.operators:
        task_graph = rules.graph.task_graph(node)
        if task_graph is not None and axes[task_graph.primitive] and node not in casts:
            members[task_graph].append(node)
    if not members:
        return Restrictions({}, {})
    batch = batch_factors(rules)
    weights = _ParameterFactors(rules) if any(one.primitive.kind == "split" for one in members) else None
    operators: dict[fx.Node, Restriction] = {}
    apart: dict[str, tuple[int, ...]] = {}
    for task_graph, nodes in members.items():
        over = axes[task_graph.primitive]
        heavy = _heavy_operators(rules, nodes)
        for node in nodes:
            samples = batch.get(node, frozenset())
            if task_graph.primitive.kind == "replicate" or weights is None:
                operators[node] = Restriction(over, allowed=samples)
            elif node not in heavy:
                operators[node] = Restriction(over, forbidden=samples, wanted=frozenset())
            else:
                operators[node] = Restriction(over, forbidden=samples, wanted=weights.factors(node) - samples or None)
                apart.update(dict.fromkeys(weights.names(node), over))
    return Restrictions(operators, apart)


def _casts(graph: JointGraph) -> set[fx.Node]:
    """Casts of parameters, and those that make gradients of parameters."""
    parameters = {source.node for source in graph.inputs if source.kind == "parameter"}
    gradients = {output.node for output in graph.outputs if output.kind == "gradient"}
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    return {node for node in copies if node in gradients or node.all_input_nodes[0] in parameters}


def _heavy_operators(rules: GraphRules, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The fewest operators that most of the arithmetic is in; all that are no views where none is but elementwise."""
    work = {}
    for node in nodes:
        call = rules.calls[node]
        results = [meta.shape for meta in call.results if meta is not None]
        work[node] = flops(call.op, [meta.shape for meta in call.operands], results, call.args)
    falling = sorted(work.values(), reverse=True)
    done = itertools.accumulate(falling)
    least = next((own for own, so_far in zip(falling, done, strict=True) if so_far >= _HEAVY_SHARE * sum(falling)), 0.0)
    return frozenset(node for node, own in work.items() if own >= least and not rules.rules[node].free)


def _dims_of(placeholders: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    return ((node, dim) for node in placeholders for dim in range(len(Value(node).meta.shape)))


class _ParameterFactors:
    """What of operators is of parameters."""

    def __init__(self, rules: GraphRules) -> None:
        self.rules = rules
        self.parameters = {source.node: source.name for source in rules.graph.inputs if source.kind == "parameter"}
        inputs = [source.node for source in rules.graph.inputs if source.kind == "input"]
        self._along_weights = factors_along(rules, _dims_of(self.parameters))
        self._along_inputs = factors_along(rules, _dims_of(inputs))
        outputs = [output.node for output in rules.graph.outputs if output.kind == "gradient"]
        self._gradients = {self._origin(node, _is_copy) for node in outputs if node is not None}

    def names(self, node: fx.Node) -> tuple[str, ...]:
        """The parameters that an operator takes, views and casts aside."""
        taken = [self._origin(source, _is_copy).node for source in operand_nodes(node)]
        return tuple(self.parameters[one] for one in taken if one in self.parameters)

    def factors(self, node: fx.Node) -> frozenset[int]:
        """The factors over dims of parameters, of an operator that takes one or a choice of one, or makes its gradient.

        If possible not those that inputs have as well: a table of positions has a dim of the sequence.
        """
        taken = [self._origin(source, _takes_one).node for source in operand_nodes(node)]
        if not self._gradients.intersection(self._results(node)) and not self.parameters.keys() & set(taken):
            return frozenset()
        found = self._along_weights.get(node, frozenset())
        return found - self._along_inputs.get(node, frozenset()) or found

    def _results(self, node: fx.Node) -> Iterator[Value]:
        return (Value(node, index) for index in range(len(self.rules.calls[node].results)))

    def _origin(self, node: fx.Node, passes: Callable[[GraphRules, fx.Node], bool]) -> Value:
        """What a value is made of, by operators that `passes` holds for."""
        value = value_of(node)
        while value.node in self.rules.calls and passes(self.rules, value.node):
            sources = [one for one in operand_nodes(value.node) if one.meta["val"].dtype.is_floating_point]
            if len(sources) != 1:
                break
            value = value_of(sources[0])
        return value


def _is_copy(rules: GraphRules, node: fx.Node) -> bool:
    return rules.rules[node].free or rules.calls[node].op in _COPY_OPS


def _takes_one(rules: GraphRules, node: fx.Node) -> bool:
    """Whether an operator takes one tensor of numbers, and perhaps indices of it."""
    return sum(meta.dtype.is_floating_point for meta in rules.calls[node].operands) == 1
