"""One order of an exported graph for all processes, whatever order Python's sets had in each."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import fx

from autoshard.capture._torch import OpOverload
from autoshard.capture.effects import statistics
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.simplify import is_random

aten = torch.ops.aten

_ASSERTIONS = frozenset({aten._assert_tensor_metadata.default})
"""What export notes of a tensor that is cast: it holds of the example's device only."""

_DETACHES = aten.detach_.default
"""Changes in place no number, and follows every constant that is written in `forward`."""

_NUMBERED = re.compile(r"_\d+$")
_LIFTED = "lifted_tensor"


def canonicalize_order(exported: Exported) -> Exported:
    """The same graph with nodes, constants and names in an order that does not hang on a process's hash seed.

    A model may walk over a set, such as that of the kinds of its layers, and make a table of positions or a mask for
    each. What depends on no parameter therefore comes right before the first node that reads it. All else stays in the
    order of the user's code: what depends on parameters, draws random numbers, or meets memory that is changed in
    place. Assertions about a cast tensor go.
    """
    graph = exported.graph_module.graph
    roots = [*exported.outputs, *(node for _, node in exported.assigned)]
    ordered = _order_nodes(graph, _movable(exported), roots)
    placeholders = dict(zip(graph.find_nodes(op="placeholder"), exported.inputs, strict=True))
    inputs = _inputs_in_order(placeholders, ordered)
    made = fx.Graph(exported.graph_module)
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*inputs, *ordered]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = node.name if node.op == "placeholder" else _NUMBERED.sub("", node.name)
        if node in inputs and inputs[node].kind == "constant":
            name = f"c_{inputs[node].name}".replace(".", "_")
        target = name if node.op == "placeholder" else node.target
        copies[node] = made.create_node(node.op, target, args, kwargs, name, node.type)
        copies[node].meta = node.meta
    exported.graph_module.graph = made  # regions, which were changed before, have new code from here on, too
    return replace(
        exported,
        inputs=tuple(inputs.values()),
        outputs=tuple(copies[node] for node in exported.outputs),
        assigned=tuple((name, copies[node]) for name, node in exported.assigned),
    )


def _order_nodes(graph: fx.Graph, movable: set[fx.Node], roots: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes but placeholders and assertions; movable ones before the first that reads them."""
    ordered: dict[fx.Node, None] = {}
    fixed = [node for node in graph.nodes if node not in movable and node.op != "placeholder"]
    for first in [*fixed[:-1], *roots, fixed[-1]]:  # the output is the last
        if first.target in _ASSERTIONS:
            continue
        waiting = [(first, iter(first.all_input_nodes))]
        while waiting:
            node, operands = waiting[-1]
            operand = next((one for one in operands if one in movable and one not in ordered), None)
            if operand is None:
                waiting.pop()
                if node.op != "placeholder":
                    ordered[node] = None
            else:
                waiting.append((operand, iter(operand.all_input_nodes)))
    return list(ordered)


def _movable(exported: Exported) -> set[fx.Node]:
    """The nodes that may run at any time after what they read, and depend on nothing that is trained."""
    graph = exported.graph_module.graph
    changing = _mutation_neighbours(graph, exported.graph_module)
    placeholders = zip(graph.find_nodes(op="placeholder"), exported.inputs, strict=True)
    trained = {node for node, item in placeholders if item.kind == "parameter" or item.fake.requires_grad}
    movable = set()
    for node in graph.nodes:
        if not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
        elif node not in changing and _is_pure(node, exported.graph_module):
            movable.add(node)
    return movable


def _is_pure(node: fx.Node, module: torch.nn.Module) -> bool:
    """Whether a node does nothing but compute the same result from the same operands."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if node.target is _DETACHES:
        return True
    if isinstance(node.target, OpOverload):
        schema = node.target._schema
        return bool(schema.returns) and not schema.is_mutable and not is_random(node)
    regions = list(_regions(node, module))
    if regions:
        inner = ((one, region) for region in regions for one in region.graph.nodes if one.op == "call_function")
        return all(one.target in _ASSERTIONS or _is_pure(one, region) for one, region in inner)
    return getattr(operator, getattr(node.target, "__name__", ""), None) is node.target


def _mutation_neighbours(graph: fx.Graph, module: torch.nn.Module) -> set[fx.Node]:
    """The nodes that lie in memory that some node changes in place, and those that read it."""
    changed = {one for node in graph.nodes for one in _mutated_operands(node, module)}
    waiting = list(changed)
    while waiting:
        node = waiting.pop()
        near = [user for user in node.users if _may_share(user)]
        near += node.all_input_nodes if _may_share(node) else []
        waiting += [one for one in near if one not in changed]
        changed.update(near)
    return changed | {user for node in changed for user in node.users}


def _mutated_operands(node: fx.Node, module: torch.nn.Module) -> Iterator[fx.Node]:
    """The operands that a node may change in place."""
    if node.op != "call_function" or node.target in _ASSERTIONS:
        return
    yield from statistics(node, module)
    if isinstance(node.target, OpOverload):
        if node.target._schema.is_mutable and node.target is not _DETACHES:
            yield from node.all_input_nodes
    elif any(not _is_pure(node, module) for _ in _regions(node, module)):
        yield from node.all_input_nodes


def _may_share(node: fx.Node) -> bool:
    """Whether a result of a node may lie in the memory of an operand."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    annotated = any(result.alias_info is not None for result in node.target._schema.returns)
    return annotated or not {torch.Tag.core, torch.Tag.pointwise}.intersection(node.target.tags)


def _regions(node: fx.Node, module: torch.nn.Module) -> Iterator[fx.GraphModule]:
    """The graphs that a node runs, such as those under another autocast."""
    for source in node.all_input_nodes:
        region = module.get_submodule(str(source.target)) if source.op == "get_attr" else None
        if isinstance(region, fx.GraphModule):
            yield region


def _inputs_in_order(
    placeholders: dict[fx.Node, ExportedInput], ordered: Iterable[fx.Node]
) -> dict[fx.Node, ExportedInput]:
    """The placeholders, constants among them by their first use, and numbered so where they have no other name."""
    place: dict[Any, int] = {}
    for node in ordered:
        for operand in node.all_input_nodes:
            place.setdefault(operand, len(place))
    constants = [node for node, item in placeholders.items() if item.kind == "constant"]
    used = iter(sorted(constants, key=lambda node: (place.get(node, len(place)), placeholders[node].name)))
    inputs, numbers = {}, count()
    for node, item in placeholders.items():
        taken, known = (node, item) if item.kind != "constant" else ((chosen := next(used)), placeholders[chosen])
        if known.kind == "constant" and _NUMBERED.sub("", known.name) == _LIFTED:
            known = replace(known, name=f"{_LIFTED}_{next(numbers)}")
        inputs[taken] = known
    return inputs
