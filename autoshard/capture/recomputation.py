"""Layers of a model, modules that are equal layers, and recomputation of layers in the backward half.

Recomputation rewrites the joint graph before planning: copies of a layer's operators in the backward half recompute
what it reads of the layer from the layer's inputs, just before it is needed, so that these tensors are not kept. The
copies, and their collectives, have placements, prices and memory like all operators.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import fx

from autoshard.capture.backward_copies import RECOMPUTES as RECOMPUTES
from autoshard.capture.backward_copies import STATISTICS, pending_nodes, run_again
from autoshard.capture.backward_copies import copy_graph as copy_graph
from autoshard.capture.backward_copies import rerun_name as rerun_name
from autoshard.capture.host_copies import TO_HOST
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.nodes import is_view
from autoshard.capture.offloading import offload_values
from autoshard.errors import PlanError
from autoshard.names import ancestors

aten = torch.ops.aten

Key = TypeVar("Key")

_MIN_OPERATORS = 3  # the minimum of operators per layer, on average: lists of single operators do not show layers
_UNCUTTABLE_BYTES = 10**18  # more than any tensor: cuts do not separate an operator from the getitems of its results
# A part of a path that is a number.
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")

PREPARATIONS = frozenset(
    (
        operator.getitem,  # one of several parameters gathered together
        aten._to_copy.default,  # the cast of a mixed precision policy
        aten.alias.default,
        aten.clone.default,
        aten.constant_pad_nd.default,  # uneven shards
        aten.permute.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view_as_real.default,
    )
)
"""Cheap calls with one operand that may come between a parameter and its gathering."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Nodes of the forward half that belong together, in the order of the graph.

    Attributes:
        name: the path of their module, such as `"model.layers.3"`; or `"part 3"` if modules do not show layers.
        nodes: the nodes.
    """

    name: str
    nodes: tuple[fx.Node, ...]


def layers(graph: JointGraph) -> tuple[Layer, ...]:
    """Return the layers of a model, in the order in which they run.

    Layers are the elements of the module's lists and sequences, outermost first, provided that none of them is most of
    the model. If these show no layers (a module called many times, a sequence of single operators), the forward half is
    cut where few bytes cross: n operators into about sqrt(n) parts.
    """
    # Copies to the host are not part of the model: the layers, and their names, are those of the graph without them.
    nodes = [
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and graph.phase(node) == "forward" and node.target is not TO_HOST
    ]
    # Results of an operator belong to the operator's module.
    callers = {node: node.all_input_nodes[0] if node.target is operator.getitem else node for node in nodes}
    groups = group_by_list_element({node: graph.module_path(caller) for node, caller in callers.items()})
    candidates = [Layer(name, tuple(members)) for name, members in groups.items()]
    # Lists with less than half of the work are parts of layers, such as experts, or beside them.
    inside = sum(_compute_count(layer.nodes) for layer in candidates)
    if len(candidates) > 1 and inside >= max(_MIN_OPERATORS * len(candidates), _compute_count(nodes) / 2):
        return tuple(candidates)
    return tuple(Layer(f"part {number}", part) for number, part in enumerate(_parts(nodes)))


def parameter_layers(graph: JointGraph) -> dict[str, str]:
    """Return the path of each parameter's layer: the list element that holds it, or else its module."""
    modules = {source.name: source.name.rpartition(".")[0] for source in graph.inputs if source.kind == "parameter"}
    groups = group_by_list_element(modules)
    return modules | {name: layer for layer, names in groups.items() for name in names}


def _compute_count(nodes: Sequence[fx.Node]) -> int:
    return sum(not is_view(node) for node in nodes)


def group_by_list_element(paths: Mapping[Key, str]) -> dict[str, list[Key]]:
    """Group keys by the outermost list element in their module path that holds at most half of them.

    Args:
        paths: nodes or names of parameters, with the paths of their modules.
    """
    # Prefixes that end in an index, shortest first: `layers.3.experts.0` has `layers.3`, then itself.
    prefixes = {key: [path[: match.end()] for match in _INDEX.finditer(path)] for key, path in paths.items()}
    sizes = Counter(prefix for parts in prefixes.values() for prefix in parts)
    groups: dict[str, list[Key]] = {}
    for key, parts in prefixes.items():
        name = next((prefix for prefix in parts if sizes[prefix] <= len(paths) / 2), None)
        if name is not None:
            groups.setdefault(name, []).append(key)
    return groups


def _parts(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    """Cut n operators into about sqrt(n) parts, at places where few bytes cross."""
    # With n operators in k parts, k tensors between parts are kept, and n / k inside the part being recomputed: the sum
    # is smallest for k = sqrt(n).
    count = math.isqrt(_compute_count(nodes))
    if count < 2:
        return
    crossing = _crossing_bytes(nodes)
    start, step = 0, len(nodes) / count
    for number in range(1, count):
        # Each cut is within a quarter of a part of its even place, where the fewest bytes cross.
        low, high = (round((number + side / 4) * step) for side in (-1, 1))
        end = min(range(max(low, start + 1), max(high, start + 1) + 1), key=lambda place: crossing[place])
        yield tuple(nodes[start:end])
        start = end
    yield tuple(nodes[start:])


def _crossing_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Return, for every place between two nodes, the bytes made before it and used after it."""
    position = {node: place for place, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for place, node in enumerate(nodes):
        last = max((position[user] for user in node.users if user in position), default=place)
        value = node.meta.get("val")
        held = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else _UNCUTTABLE_BYTES
        change[place + 1] += held
        change[last + 1] -= held
    return list(accumulate(change))


@dataclass(frozen=True, slots=True)
class RepeatedModule:
    """Modules whose paths differ in one index, and whose nodes do the same work in the same order.

    Attributes:
        pattern: the path with `*` for the index, such as `model.layers.*`.
        paths: the paths, in the order of the index.
        nodes: the nodes of each path in graph order, so that `nodes[i][k]` and `nodes[j][k]` correspond.
    """

    pattern: str
    paths: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]


def repeated_modules(graph: JointGraph, work: Mapping[fx.Node, Hashable]) -> tuple[RepeatedModule, ...]:
    """Return the modules of a joint graph that repeat one another, outermost and first in the graph first.

    Args:
        graph: the joint graph.
        work: for every relevant node, a key that is equal for nodes with the same work in the same half of the step.
    """
    members = _members(graph, work)
    groups: defaultdict[tuple[str, tuple[Hashable, ...]], list[str]] = defaultdict(list)
    for path, nodes in members.items():
        done = tuple(work[node] for node in nodes)
        for pattern in _patterns(path):
            groups[pattern, done].append(path)
    repeated = [
        RepeatedModule(pattern, tuple(paths), tuple(tuple(members[path]) for path in paths))
        for (pattern, _), paths in groups.items()
        if len(paths) > 1
    ]
    # A stable sort: modules of equal depth keep the order of the graph.
    return tuple(sorted(repeated, key=lambda module: module.pattern.count(".")))


def _members(graph: JointGraph, work: Mapping[fx.Node, Hashable]) -> dict[str, list[fx.Node]]:
    """Return the nodes below every module path, in graph order; paths are sorted by index, not alphabetically."""
    below: defaultdict[str, list[fx.Node]] = defaultdict(list)
    prefixes: dict[str, tuple[str, ...]] = {}
    for node in graph.graph.nodes:
        if node in work:
            path = graph.module_path(node)
            if path not in prefixes:
                prefixes[path] = (*reversed([*ancestors(path)]), path) if path else ()
            for prefix in prefixes[path]:
                below[prefix].append(node)
    return dict(sorted(below.items(), key=lambda item: _order(item[0])))


def _patterns(path: str) -> Iterable[str]:
    """Return the path with each one of its indices replaced by `*`."""
    return (path[: match.start()] + "*" + path[match.end() :] for match in _INDEX.finditer(path))


def _order(path: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]


# Operators of two tensors whose results depend on rounding: the gradient of `amax` goes where `input == result`.
_COMPARISONS = frozenset(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))


@dataclass(frozen=True, slots=True)
class Recomputable:
    """A layer that the backward half can recompute.

    Attributes:
        name: the name of the layer.
        freed: forward nodes whose tensors need not be kept if the layer is recomputed.
        rerun: forward nodes that are recomputed then.
    """

    name: str
    freed: tuple[fx.Node, ...]
    rerun: tuple[fx.Node, ...]


def recompute_layers(graph: JointGraph, names: Collection[str], kept: Collection[str] = ()) -> JointGraph:
    """Return the graph in which the backward half recomputes some layers or single operators.

    The inputs and outputs of these layers are kept; all other tensors that the backward half reads of them are
    recomputed. A view of a kept tensor is taken again. Operators that read an input which the step changes are not
    recomputed, because its old value is gone. Tensors that are compared with others are not recomputed: from other
    shards they may be rounded differently, and no longer equal what they equalled. Values moved to the host are not
    recomputed, and recomputation reads them there.

    Args:
        graph: the captured step; it is not changed.
        names: layers, as named by `layers`, or operators: with the results that `rerunnable` lists for them, or else
            without, since these have their own names. They add to what the graph recomputes already; without names, the
            graph itself is returned.
        kept: names of values that are not recomputed.

    Raises:
        PlanError: the model has no such layer, or no such operator that can be recomputed.
    """
    if not names:
        return graph
    if graph.unmoved is not None:
        return offload_values(recompute_layers(graph.unmoved, names, graph.offloaded), graph.offloaded)
    asked = {*names, *graph.recomputed}
    graph = captured_step(graph)
    known = {layer.name: layer for layer in layers(graph)}
    made_again: set[fx.Node] = set()
    for name in asked & known.keys():
        made_again |= _nodes_to_recompute(graph, known[name])
    single = asked - known.keys()
    if single:
        again = {**{node.name: {node} for node in _may_run_again(graph)}, **rerunnable(graph)}
        unknown = sorted(single - again.keys())
        if unknown:
            raise PlanError(
                f"the plan recomputes {unknown[0]!r}, which is no layer of this model, and no operator that can run "
                "again: it was made for another model, or by another version of autoshard. Make the plan again."
            )
        for name in single:
            made_again |= again[name]
    # A copy, because a search compares graphs with and without recomputation.
    copy, at = copy_graph(graph)
    run_again(copy, {at[node] for node in made_again if node.name not in kept})
    copy.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    copy.graph.lint()
    order = [*known, *(node.name for node in graph.graph.nodes if node.name in single)]
    return replace(copy, recomputed=tuple(name for name in order if name in asked), run_once=graph)


def captured_step(graph: JointGraph) -> JointGraph:
    """Return the original step of a graph, in which nothing is recomputed or moved."""
    graph = graph if graph.unmoved is None else graph.unmoved
    return graph if graph.run_once is None else graph.run_once


def forms_of(graph: JointGraph) -> Iterator[JointGraph]:
    """Yield a graph, and the graphs from which it was made: without moves, and without recomputation."""
    yield graph
    for earlier in (graph.unmoved, graph.run_once):
        if earlier is not None:
            yield from forms_of(earlier)


def graph_of_plan(graph: JointGraph, recomputed: Collection[str], offloaded: Collection[str]) -> JointGraph:
    """Return the graph to which a plan's decisions apply. The plan takes precedence over what the user keeps.

    Args:
        graph: the captured step, whatever it already recomputes or moves.
        recomputed: what the plan recomputes in the backward half, as for `recompute_layers`.
        offloaded: the values that the plan moves to the host, as for `offload_values`.

    Raises:
        PlanError: the model has no such layer, operator or value.
    """
    if {*recomputed} == {*graph.recomputed} and {*offloaded} == {*graph.offloaded}:
        return graph
    captured = replace(captured_step(graph), kept={})
    return offload_values(recompute_layers(captured, recomputed, offloaded), offloaded)


def rerunnable(graph: JointGraph) -> dict[str, set[fx.Node]]:
    """Return, by name, the operators that the backward half can recompute, each as its node and those of its results.

    They are the operators inside layers: outputs of layers are kept, so that no chain of recomputed operators is longer
    than a layer.
    """
    found: dict[str, set[fx.Node]] = {}
    known = None if graph.unmoved is None else rerunnable(graph.unmoved)
    for layer in layers(graph):
        again = _nodes_to_recompute(graph, layer)
        for node in layer.nodes:
            if node in again and node.target is not operator.getitem and (known is None or node.name in known):
                found[node.name] = {node, *(user for user in node.users if user.target is operator.getitem)} & again
    return found


def names_of_region(graph: JointGraph, nodes: Collection[fx.Node], without: Collection[fx.Node] = ()) -> list[str]:
    """Return the names, for `recompute_layers`, of what the backward half recomputes of a region of the forward half.

    Values that are used outside the region in the forward half are kept, like the outputs of a layer.

    Args:
        graph: the captured step.
        nodes: nodes of the forward half.
        without: those of them that are not recomputed.
    """
    members = tuple(node for node in graph.graph.nodes if node in nodes)
    return names_to_run_again(graph, _nodes_to_recompute(graph, Layer("", members)).difference(without))


def names_to_run_again(graph: JointGraph, nodes: Collection[fx.Node]) -> list[str]:
    """Return the names, for `recompute_layers`, of those nodes that the backward half needs."""
    needed = pending_nodes((node for node in nodes if _is_read_backward(graph, node)), nodes)
    known = rerunnable(graph)
    # The results of an operator in a layer are named with it, except those used outside the layer.
    of_operators = {result for node in needed for result in known.get(node.name, ()) if result is not node}
    return [node.name for node in graph.graph.nodes if node in needed and node not in of_operators]


def recomputable(graph: JointGraph) -> tuple[Recomputable, ...]:
    """Return the layers of which the backward half could recompute a value that it reads, in the model's order."""
    results = []
    for layer in layers(graph):
        again = _nodes_to_recompute(graph, layer)
        read = [node for node in layer.nodes if node in again and _is_read_backward(graph, node)]
        bases = dict.fromkeys(_base(node, again) for node in read)
        freed = tuple(node for node in bases if node in again)
        rerun = pending_nodes(read, again)
        if freed:
            results.append(Recomputable(layer.name, freed, tuple(node for node in layer.nodes if node in rerun)))
    return tuple(results)


def _is_read_backward(graph: JointGraph, node: fx.Node) -> bool:
    return any(graph.phase(user) == "backward" for user in _users(node))


def _users(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if user.op != "output")


def _base(node: fx.Node, again: Collection[fx.Node]) -> fx.Node:
    """Return the node that owns the memory of a node's tensor, as far as it is recomputed."""
    while is_view(node) and not _is_tuple(node.all_input_nodes[0]) and node.all_input_nodes[0] in again:
        node = node.all_input_nodes[0]
    return node


def _nodes_to_recompute(graph: JointGraph, layer: Layer) -> set[fx.Node]:
    """Return the nodes of a layer whose results need not be kept for the backward half."""
    members = set(layer.nodes)
    returned = {output.node for output in graph.outputs if output.kind != "gradient"}
    stays = _old_state_readers(graph, layer)
    for node in layer.nodes:
        leaves = any(user not in members and _forward(graph, user) for user in _users(node))
        if leaves or node in returned or _is_compared(graph, node):
            stays.add(node)
            while is_view(node) and node.all_input_nodes[0] in members:
                node = node.all_input_nodes[0]  # a view keeps the whole tensor
                if not _is_tuple(node):
                    stays.add(node)
    return {node for node in members - stays if node.name not in graph.kept}


def _may_run_again(graph: JointGraph) -> set[fx.Node]:
    """Return all nodes of the forward half whose results need not be kept, without regard to layers."""
    nodes = (node for node in graph.graph.nodes if node.op == "call_function" and _forward(graph, node))
    return _nodes_to_recompute(graph, Layer("", tuple(nodes)))


def _old_state_readers(graph: JointGraph, layer: Layer) -> set[fx.Node]:
    """Return the nodes of a layer that read an input that the step changes, directly or through a view."""
    changed = {output.name for output in graph.outputs if output.kind == "mutation"}
    old = {source.node for source in graph.inputs if source.name in changed and source.kind != "tangent"}
    readers: set[fx.Node] = set()
    for node in layer.nodes:
        sources = node.all_input_nodes
        if node.target not in STATISTICS and any(
            source in old or (source in readers and is_view(source)) for source in sources
        ):
            readers.add(node)
    return readers


def _is_compared(graph: JointGraph, node: fx.Node) -> bool:
    """Return True if a forward node compares two tensors, or the backward half compares the node's tensor."""
    return _compares(node) or any(
        not _forward(graph, user) and (_compares(user) or (is_view(user) and _is_compared(graph, user)))
        for user in _users(node)
    )


def _compares(node: fx.Node) -> bool:
    return node.target in _COMPARISONS and any(
        source.meta["val"].dtype.is_floating_point for source in node.all_input_nodes
    )


def _is_tuple(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor)


def _forward(graph: JointGraph, node: fx.Node) -> bool:
    return graph.phase(node) == "forward"
