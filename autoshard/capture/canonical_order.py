"""A canonical order of an exported graph, equal in all processes, whatever the order of Python's sets."""

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
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.nodes import closure, is_in_place, is_random, operands_first, regions_of, statistics

aten = torch.ops.aten

# torch.export asserts the metadata of a cast tensor: the assertion holds only on the example's device.
_ASSERTIONS = frozenset({aten._assert_tensor_metadata.default})

_NUMBERED = re.compile(r"_\d+$")
_LIFTED = "lifted_tensor"


def canonicalize_order(exported: Exported) -> Exported:
    """Return the same graph with nodes, constants and names in an order that does not depend on the hash seed.

    A model may iterate over a set, such as the kinds of its layers, and make a table of positions or a mask for each.
    Nodes that depend on no parameter are therefore moved right before the first node that reads them. All other nodes
    stay in the order of the user's code: those that depend on parameters, draw random numbers, or access memory that is
    changed in place. Assertions about a cast tensor are removed.
    """
    graph = exported.graph
    roots = [*exported.outputs, *(node for _, node in exported.assigned)]
    ordered = _order_nodes(graph, _movable(exported), roots)
    inputs = _inputs_in_order(exported.placeholders, ordered)
    new_graph = fx.Graph(exported.graph_module)
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*inputs, *ordered]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        # Suffix numbers count nodes in the old order: without them, `create_node` numbers names in the new one.
        name = node.name if node.op == "placeholder" else _NUMBERED.sub("", node.name)
        if node in inputs and inputs[node].kind == "constant":
            name = f"c_{inputs[node].name}".replace(".", "_")
        target = name if node.op == "placeholder" else node.target
        copies[node] = new_graph.create_node(node.op, target, args, kwargs, name, node.type)
        copies[node].meta = node.meta
    # The assignment also regenerates the code of regions, which were changed before.
    exported.graph_module.graph = new_graph
    return replace(
        exported,
        inputs=tuple(inputs.values()),
        outputs=tuple(copies[node] for node in exported.outputs),
        assigned=tuple((name, copies[node]) for name, node in exported.assigned),
    )


def _order_nodes(graph: fx.Graph, movable: set[fx.Node], roots: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes except placeholders and assertions, movable ones before the first node that reads them."""
    ordered: dict[fx.Node, None] = {}
    fixed = [node for node in graph.nodes if node not in movable and node.op != "placeholder"]
    # Movable results that only the output reads are put in the order of the outputs, before the output node.
    for root in [*fixed[:-1], *roots, fixed[-1]]:
        if root.target not in _ASSERTIONS:
            for node in operands_first(root, lambda operand: operand in movable and operand not in ordered):
                if node.op != "placeholder":
                    ordered[node] = None
    return list(ordered)


def _movable(exported: Exported) -> set[fx.Node]:
    """Return the nodes that may run at any time after their operands, and depend on no trained parameter."""
    graph = exported.graph
    ordered_by_memory = _mutation_neighbours(graph)
    trained = {
        node for node, item in exported.placeholders.items() if item.kind == "parameter" or item.fake.requires_grad
    }
    movable = set()
    for node in graph.nodes:
        if not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
        elif node not in ordered_by_memory and _is_pure(node):
            movable.add(node)
    return movable


def _is_pure(node: fx.Node) -> bool:
    """Return True if a node has no side effects, and always gives the same result for the same operands."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.returns) and not is_in_place(node) and not is_random(node)
    regions = [region for _, region in regions_of(node)]
    if regions:
        inner = (call for region in regions for call in region.graph.nodes if call.op == "call_function")
        return all(call.target in _ASSERTIONS or _is_pure(call) for call in inner)
    # Functions of Python's `operator`, such as `getitem` and arithmetic on sizes, are pure; other code may not be.
    return getattr(operator, getattr(node.target, "__name__", ""), None) is node.target


def _mutation_neighbours(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes in memory that some node changes in place, and the readers of that memory."""

    def sharing_nodes(node: fx.Node) -> list[fx.Node]:
        # Users may be views of the node, and the node may be a view of its operands.
        views = [user for user in node.users if _may_share(user)]
        return views + (node.all_input_nodes if _may_share(node) else [])

    operands = (operand for node in graph.nodes for operand in _mutated_operands(node))
    changed = closure(operands, sharing_nodes)
    return changed | {user for node in changed for user in node.users}


def _mutated_operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands that a node may change in place."""
    if node.op != "call_function" or node.target in _ASSERTIONS:
        return
    yield from statistics(node)
    if isinstance(node.target, OpOverload):
        if is_in_place(node):
            yield from node.all_input_nodes
    elif any(True for _ in regions_of(node)) and not _is_pure(node):
        yield from node.all_input_nodes


def _may_share(node: fx.Node) -> bool:
    """Return True if a result of a node may share an operand's memory."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    # Composite operators such as `reshape` may alias without an annotation; core and pointwise ones do not.
    annotated = any(result.alias_info is not None for result in node.target._schema.returns)
    return annotated or not {torch.Tag.core, torch.Tag.pointwise}.intersection(node.target.tags)


def _inputs_in_order(
    placeholders: dict[fx.Node, ExportedInput], ordered: Iterable[fx.Node]
) -> dict[fx.Node, ExportedInput]:
    """Return the placeholders, with the constants among them sorted by their first use.

    Constants that torch.export named by a number are numbered in that order.
    """
    place: dict[Any, int] = {}
    for node in ordered:
        for operand in node.all_input_nodes:
            place.setdefault(operand, len(place))
    constants = [node for node, item in placeholders.items() if item.kind == "constant"]
    used = iter(sorted(constants, key=lambda node: (place.get(node, len(place)), placeholders[node].name)))
    inputs, numbers = {}, count()
    for node, item in placeholders.items():
        if item.kind == "constant":
            # The positions of constants among the placeholders stay; the constants are permuted among them.
            node = next(used)
            item = placeholders[node]
            if _NUMBERED.sub("", item.name) == _LIFTED:
                item = replace(item, name=f"{_LIFTED}_{next(numbers)}")
        inputs[node] = item
    return inputs
