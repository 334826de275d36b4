"""Properties of the nodes of exported and traced graphs: arguments, randomness, memory, regions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from autoshard.capture._torch import OpOverload

aten = torch.ops.aten

# Mutable by its schema, but without effect on numbers; it follows every constant that is written in `forward`.
DETACH = aten.detach_.default

# Normalisations whose running statistics change in training, although their schemas do not say so.
_STATISTICS = frozenset({aten.batch_norm.default, aten.instance_norm.default})


def argument_of(node: fx.Node, name: str, default: Any = None) -> Any:
    """Return an argument of an operator call by its name; `default` if the call or the operator does not have it."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return default


def is_random(node: fx.Node) -> bool:
    """Return True if two calls of the operator may give different results."""
    if not isinstance(node.target, OpOverload):
        return False
    # Not every dropout operator has the tag.
    return torch.Tag.nondeterministic_seeded in node.target.tags or "dropout" in str(node.target)


def is_view(node: fx.Node) -> bool:
    """Return True if the node allocates no tensor: it is a view of another node's memory, or one of several results."""
    if node.target in (operator.getitem, aten._unsafe_view.default):
        return True
    return isinstance(node.target, OpOverload) and any(
        result.alias_info is not None and not result.alias_info.is_write for result in node.target._schema.returns
    )


def is_in_place(node: fx.Node) -> bool:
    """Return True if an operator changes an operand's numbers in place, by its schema."""
    return isinstance(node.target, OpOverload) and node.target is not DETACH and node.target._schema.is_mutable


def changed_memory(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that made the memory that an operator changes in place."""
    yield from map(base_of, changed_operands(node))


def changed_operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands that an operator changes in place, by its schema."""
    for argument in node.target._schema.arguments if is_in_place(node) else ():  # type: ignore[union-attr]
        operand = argument_of(node, argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(operand, fx.Node):
            yield operand


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that made the memory of a node's value, or may have made it."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
        # An operator with several results has its memory in the results, which `getitem` returns.
        if node.target is not operator.getitem and not any(result.alias_info is not None for result in returns):
            break
        node = node.args[0]
    return node


def statistics(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the running statistics that a normalisation changes, or one in a region that the node calls."""
    if node.target in _STATISTICS:
        _, _, _, *running, training = node.args[:6]
        if training:
            yield from (source for source in running if isinstance(source, fx.Node))
        return
    for source, region in regions_of(node):
        operands = node.args[node.args.index(source) + 1 :]
        values: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=False))
        for inner in region.graph.nodes:
            yield from (values[operand] for operand in statistics(inner))


def regions_of(node: fx.Node) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """Yield the operands of a node that are graphs, such as those under another autocast, with these graphs."""
    module = node.graph.owning_module
    assert module is not None
    for source in node.all_input_nodes:
        region = module.get_submodule(str(source.target)) if source.op == "get_attr" else None
        if isinstance(region, fx.GraphModule):
            yield source, region


def graphs_of(module: fx.GraphModule) -> list[fx.Graph]:
    """Return the graph of an exported module, and the graphs of its regions, which are modules inside of it."""
    return [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]


def operands_first(root: fx.Node, is_wanted: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield a node after its wanted operands, recursively; an operand must not be wanted again once it was yielded."""
    # Depth first with an explicit stack: chains of operators may exceed Python's recursion limit.
    stack = [(root, iter(root.all_input_nodes))]
    while stack:
        node, operands = stack[-1]
        operand = next(filter(is_wanted, operands), None)
        if operand is None:
            stack.pop()
            yield node
        else:
            stack.append((operand, iter(operand.all_input_nodes)))


def closure(nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return the nodes, their neighbours, the neighbours of these, and so on."""
    reached: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += neighbours(node)
    return reached
