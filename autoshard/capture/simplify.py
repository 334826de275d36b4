"""Simplification of the joint graph without a change of any number: identities, common subexpressions, dead code."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from autoshard.capture._torch import OpOverload
from autoshard.capture.nodes import is_random

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
