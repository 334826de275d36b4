"""Simplification of the joint graph without a change of any number: identities, common subexpressions, dead code.

Forward values that the backward half reads: views of parameters are taken again, old values are copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.capture._torch import OpOverload
from autoshard.capture.joint_graph import JointInput, JointOutput
from autoshard.capture.nodes import closure, is_random, is_view

aten = torch.ops.aten

_ALIASES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_COPIES = frozenset({aten.clone.default, aten.lift_fresh_copy.default})
# Operators that are the identity when their second operand is 1. Adding 0 is none: -0.0 + 0 is 0.0.
_NEUTRAL_AT_ONE = frozenset(
    {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar}
)
_SAME_SHAPE = frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor),
        *(aten.slice_backward.default, aten._to_copy.default),
    }
)
_VIEWS = frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor, aten.select.int),
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim),
        operator.getitem,
    }
)


def simplify(graph: fx.Graph) -> None:
    """Simplify a functional graph, whose nodes carry `meta["partitioner_tag"]`, in place."""
    _remove_empty_operands(graph)
    _remove_identities(graph)
    _merge_common(graph)
    graph.eliminate_dead_code(is_impure_node=_is_impure)


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or (
        isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    )


def _remove_empty_operands(graph: fx.Graph) -> None:
    """Drop operands of `cat` without elements, such as a key-value cache before its first token."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        kept = [operand for operand in node.args[0] if operand.meta["val"].numel()]
        types = {operand.meta["val"].dtype for operand in kept}
        if kept and types == {node.meta["val"].dtype}:  # an empty operand may be what promotes the result's dtype
            node.update_arg(0, kept)


def _remove_identities(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        source = _same_value(node)
        is_returned_copy = node.target in _COPIES and any(user.op == "output" for user in node.users)
        if source is not None and not is_returned_copy:  # the user gets a copy where the model makes one
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _same_value(node: fx.Node) -> fx.Node | None:
    """Return an earlier node with the same numbers in the same layout, if `node` is an identity."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if node.target in _ALIASES:
        return source
    if node.target in _COPIES | _SAME_SHAPE or _is_neutral(node):
        return source if _layout(node) == _layout(source) else None
    if node.target is aten.t.default and source.target is aten.t.default:
        return source.all_input_nodes[0]
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        ndim = node.meta["val"].ndim
        dims = [{dim % ndim for dim in transpose.args[1:]} for transpose in (node, source)]
        return source.all_input_nodes[0] if dims[0] == dims[1] else None
    return None


def _is_neutral(node: fx.Node) -> bool:
    """Return True if the node multiplies by one or the like, which is exact for every number."""
    if node.target not in _NEUTRAL_AT_ONE or node.kwargs:
        return False
    factor = node.args[1]
    return isinstance(factor, (int, float)) and factor == 1


def _layout(node: fx.Node) -> Hashable:
    value = node.meta["val"]
    shape = node.meta.get("sizes", tuple(value.shape))
    return (shape, value.stride(), value.dtype, value.device, value.storage_offset() == 0)


def _merge_common(graph: fx.Graph) -> None:
    """Merge nodes of one task graph with equal operators and operands, except random ones."""
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        key = _expression(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _expression(node: fx.Node) -> Hashable | None:
    if node.op != "call_function" or is_random(node):
        return None
    if isinstance(node.target, OpOverload):
        if node.target._schema.is_mutable or node.target.namespace == "autoshard":
            return None
    elif node.target is not operator.getitem:
        return None
    # Across the halves only views are merged: an operator that the backward half repeats may be there to save memory.
    phase = None if node.target in _VIEWS else node.meta.get("partitioner_tag")
    return (node.target, phase, node.meta.get("task_graph"), freeze(node.args), freeze(node.kwargs))


def freeze(value: Any) -> Hashable:
    """Return a hashable copy of an argument, in which 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, freeze(value[key])) for key in sorted(value))
    if isinstance(value, slice):
        return ("slice", freeze(value.start), freeze(value.stop), freeze(value.step))
    return (type(value), value)


_PARAMETER_VIEWS = frozenset(
    {
        *(aten.t.default, aten.permute.default, aten.transpose.int, aten.expand.default, aten.alias.default),
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    }
)


def refresh_views(graph: fx.Graph, parameters: Collection[fx.Node], is_backward: Callable[[fx.Node], bool]) -> None:
    """Give backward nodes that read a forward view of a parameter a view of their own.

    Then whatever the backward half needs of a parameter starts at the parameter itself, and a plan may keep a
    gathered copy from the forward or gather it again (TensorOpt 4.2, tensor reuse).

    Args:
        graph: a joint graph.
        parameters: its parameter placeholders.
        is_backward: returns True for nodes of the backward half.
    """
    views: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        # Nodes are in topological order: the views that a view is taken of are in the set before it.
        if node.target in _PARAMETER_VIEWS and len(sources) == 1 and (sources[0] in views or sources[0] in parameters):
            views.add(node)
    # One copy of each view serves all backward nodes: it stands before the first of them.
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_backward(node):
            continue
        for source in node.all_input_nodes:
            if source in views and not is_backward(source):
                with graph.inserting_before(node):
                    node.replace_input_with(source, _copy_view_chain(source, views, copies, node))


def _copy_view_chain(view: fx.Node, views: set[fx.Node], copies: dict[fx.Node, fx.Node], user: fx.Node) -> fx.Node:
    """Return a copy of a view, and of the views that it is taken of, in the half of `user`."""
    if view not in views:
        return view  # the parameter itself
    if view not in copies:
        parent = _copy_view_chain(view.all_input_nodes[0], views, copies, user)
        copies[view] = copy = view.graph.node_copy(view, lambda _: parent)
        copy.meta["partitioner_tag"] = user.meta["partitioner_tag"]
    return copies[view]


def keep_old_values(graph: fx.Graph, inputs: Sequence[JointInput], outputs: Sequence[JointOutput]) -> None:
    """Copy every changed input whose old value the backward half or the caller reads.

    Args:
        graph: a joint graph without dead code; its output node names the nodes of `outputs`.
        inputs: the placeholders of the graph.
        outputs: the outputs of the step.
    """
    # New values are written into buffers and inputs at the end of the forward half, which a functional graph does not
    # show: simplification has removed copies that models make themselves, such as that of a queue of keys.
    changed = {output.name: output.node for output in outputs if output.kind == "mutation"}
    last = graph.find_nodes(op="placeholder")[-1]
    for source in inputs:
        if source.kind != "tangent" and source.name in changed and _is_read_late(source.node):
            with graph.inserting_after(last):
                copy = graph.call_function(aten.clone.default, (source.node,))
            copy.meta = {key: value for key, value in source.node.meta.items() if key != "desc"}
            for user in [user for user in source.node.users if user is not copy]:
                user.replace_input_with(source.node, copy)


def _is_read_late(changed: fx.Node) -> bool:
    """Return True if the backward half or the caller reads an input, or a view of it."""
    views = closure([changed], lambda node: filter(is_view, node.users))
    users = (user for view in views for user in view.users)
    return any(user.op == "output" or "backward" in user.meta["partitioner_tag"] for user in users)
