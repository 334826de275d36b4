"""The layers of a model: stretches of its forward half that the backward half can run again from what enters them."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import fx

from autoshard.capture._torch import OpOverload
from autoshard.capture.joint_graph import JointGraph

_MIN_OPERATORS = 3  # operators that a layer has, on average
_UNCUTTABLE_BYTES = 10**18  # more bytes than anything crosses: no cut parts an operator from the names of its results
aten = torch.ops.aten
Key = TypeVar("Key")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


PREPARATIONS = frozenset(
    (
        operator.getitem,  # names one of several that were gathered together
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

    `name` is the path of their module, such as `"model.layers.3"`, or `"part 3"` where modules do not tell layers.
    """

    name: str
    nodes: tuple[fx.Node, ...]


def layers(graph: JointGraph) -> tuple[Layer, ...]:
    """The layers of a model, in the order in which they run.

    Layers are the elements of the module's lists and sequences, outermost first, as long as none of them is most of the
    model. Where that says nothing (a module called many times, a sequence of single operators), the forward half is cut
    into about as many parts as a part has operators, where least crosses.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and graph.phase(node) == "forward"]
    named = group_by_list_element({node: _path(graph, node) for node in nodes})
    found = [Layer(name, tuple(members)) for name, members in named.items()]
    inside = sum(len(_compute_nodes(layer.nodes)) for layer in found)
    if len(found) > 1 and inside >= max(_MIN_OPERATORS * len(found), len(_compute_nodes(nodes)) / 2):
        return tuple(found)
    return tuple(Layer(f"part {number}", part) for number, part in enumerate(_parts(nodes)))


def parameter_layers(graph: JointGraph) -> dict[str, str]:
    """The layer of every parameter: the element of a list that it belongs to, or the module where there is none.

    Returns:
        Parameter name -> path of the layer.
    """
    modules = {source.name: source.name.rpartition(".")[0] for source in graph.inputs if source.kind == "parameter"}
    named = group_by_list_element(modules)
    return modules | {name: layer for layer, names in named.items() for name in names}


def is_view(node: fx.Node) -> bool:
    """Whether the node makes no tensor of its own: it looks at another one's memory, or names one of several."""
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        return True
    return isinstance(node.target, OpOverload) and any(
        result.alias_info is not None and not result.alias_info.is_write for result in node.target._schema.returns
    )


def _compute_nodes(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if not is_view(node)]


def group_by_list_element(paths: Mapping[Key, str]) -> dict[str, list[Key]]:
    """Nodes, or parameters, by the path of the list element that they belong to, of which none is most of the model.

    Args:
        paths: of the modules of all of them.
    """
    sizes = Counter(prefix for path in paths.values() for prefix in _indexed_prefixes(path))
    named: dict[str, list[Key]] = {}
    for node, path in paths.items():
        name = next((prefix for prefix in _indexed_prefixes(path) if sizes[prefix] <= len(paths) / 2), None)
        if name is not None:
            named.setdefault(name, []).append(node)
    return named


def _path(graph: JointGraph, node: fx.Node) -> str:
    """Module path of a node; the results of an operator belong where the operator does."""
    return graph.module_path(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _indexed_prefixes(path: str) -> Iterator[str]:
    """The parts of a path that end in an index, shortest first."""
    return (path[: match.end()] for match in _INDEX.finditer(path))


def _parts(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    """The nodes in about as many parts as a part has operators, each cut near its place where least crosses."""
    count = math.isqrt(len(_compute_nodes(nodes)))
    if count < 2:
        return
    crossing = _crossing_bytes(nodes)
    start, step = 0, len(nodes) / count
    for number in range(1, count):
        low, high = (round((number + side / 4) * step) for side in (-1, 1))
        end = min(range(max(low, start + 1), max(high, start + 1) + 1), key=lambda place: crossing[place])
        yield tuple(nodes[start:end])
        start = end
    yield tuple(nodes[start:])


def _crossing_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """For every place between two nodes, bytes made before it and used after it."""
    position = {node: place for place, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for place, node in enumerate(nodes):
        last = max((position[user] for user in node.users if user in position), default=place)
        value = node.meta.get("val")
        held = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else _UNCUTTABLE_BYTES
        change[place + 1] += held
        change[last + 1] -= held
    return list(accumulate(change))
