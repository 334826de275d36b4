"""Layers of a model: parts that the backward half can recompute, and modules that are the same layer again."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import fx

from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.nodes import is_view
from autoshard.names import ancestors

aten = torch.ops.aten

Key = TypeVar("Key")

_MIN_OPERATORS = 3  # operators that a layer has on average: lists of single operators say nothing of layers
_UNCUTTABLE_BYTES = 10**18  # more than any tensor has: no cut parts an operator of several results from its getitems
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")

PREPARATIONS = frozenset(
    (
        operator.getitem,  # one of several parameters that were gathered together
        aten._to_copy.default,  # the cast of a policy of precisions
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
"""Cheap calls of one operand, through which a parameter may pass before it is gathered."""


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

    Layers are the elements of the module's lists and sequences, outermost first, as long as none of them is most of the
    model. If these show no layers (a module called many times, a sequence of single operators), the forward half is cut
    into about as many parts as a part has operators, at places where few bytes cross.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and graph.phase(node) == "forward"]
    # The results of an operator belong to the module of the operator.
    callers = {node: node.all_input_nodes[0] if node.target is operator.getitem else node for node in nodes}
    groups = group_by_list_element({node: graph.module_path(caller) for node, caller in callers.items()})
    candidates = [Layer(name, tuple(members)) for name, members in groups.items()]
    inside = sum(_compute_count(layer.nodes) for layer in candidates)
    if len(candidates) > 1 and inside >= max(_MIN_OPERATORS * len(candidates), _compute_count(nodes) / 2):
        return tuple(candidates)
    return tuple(Layer(f"part {number}", part) for number, part in enumerate(_parts(nodes)))


def parameter_layers(graph: JointGraph) -> dict[str, str]:
    """Return the path of each parameter's layer: the element of a list that holds it, or else its module."""
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
    # The parts of a path that end in an index, shortest first: `layers.3.experts.0` has `layers.3`, then itself.
    prefixes = {key: [path[: match.end()] for match in _INDEX.finditer(path)] for key, path in paths.items()}
    sizes = Counter(prefix for parts in prefixes.values() for prefix in parts)
    groups: dict[str, list[Key]] = {}
    for key, parts in prefixes.items():
        name = next((prefix for prefix in parts if sizes[prefix] <= len(paths) / 2), None)
        if name is not None:
            groups.setdefault(name, []).append(key)
    return groups


def _parts(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    """Yield the nodes in about as many parts as a part has operators."""
    # Of n operators in k parts, k tensors are kept between parts, and n / k inside of the one that is recomputed: the
    # sum is least for k = sqrt(n).
    count = math.isqrt(_compute_count(nodes))
    if count < 2:
        return
    crossing = _crossing_bytes(nodes)
    start, step = 0, len(nodes) / count
    for number in range(1, count):
        # Each cut is within a quarter of a part around its even place, where the fewest bytes cross.
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
        work: for every node that counts, a key that is equal for nodes of the same work in the same half of the step.
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
    return tuple(sorted(repeated, key=lambda module: module.pattern.count(".")))


def _members(graph: JointGraph, work: Mapping[fx.Node, Hashable]) -> dict[str, list[fx.Node]]:
    """Return the nodes below every module path, in graph order; paths are ordered by index, not alphabetically."""
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
