"""Aliasing: whether the tensor of a node of a program has its own memory, or is a view of another node's.

A program without a backward half writes rows in place into inputs that it changes, such as caches.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autoshard.specs.emitter import collectives

_WAIT = collectives.wait_tensor.default

# Operators that write rows into a copy of their first operand -> those that write into the operand itself.
_IN_PLACE = {torch.ops.aten.index_copy.default: torch.ops.aten.index_copy_.default}


@functools.cache
def makes_view(op: Any) -> bool:
    """Return True if a result of the operator aliases its first operand; a reshape may still copy."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def storage_root(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a node's tensor, through any number of views."""
    while True:
        source = view_source(node)
        if source is None:
            return node
        node = source


def view_source(node: fx.Node) -> fx.Node | None:
    """Return the node of which a node's tensor is a view; None if it has its own memory."""
    if node.op != "call_function":
        return None
    # A wait returns the tensor that its collective writes.
    if node.target is _WAIT:
        return next(iter(node.all_input_nodes), None)
    if node.target is operator.getitem:
        call = node.all_input_nodes[0]
        return call.all_input_nodes[0] if makes_view(call.target) else None
    if not makes_view(node.target):
        return None
    source = node.all_input_nodes[0]
    if node.target is not torch.ops.aten.reshape.default:
        return source if isinstance(node.meta["val"], torch.Tensor) else None
    val: torch.Tensor = source.meta["val"]
    return source if _is_view(tuple(val.shape), val.stride(), tuple(node.meta["val"].shape)) else None


@functools.lru_cache(maxsize=1 << 12)
def _is_view(shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return True if a reshape of a tensor with these strides copies nothing."""
    try:
        torch.empty_strided(shape, strides, device="meta").view(target)
    except RuntimeError:
        return False
    return True


def write_in_place(changed: Iterable[tuple[fx.Node, fx.Node]]) -> None:
    """Make a program write rows into its inputs in place.

    Args:
        changed: placeholders of inputs that a step changes, and the nodes of their new values. Inputs that are read
            elsewhere, or computed by other operators, are not written in place.
    """
    for source, value in changed:
        if value.target in _IN_PLACE and value.args[0] is source and len(source.users) == 1:
            value.target = _IN_PLACE[value.target]
            # Its price is now that of the rows, not that of the operator of the captured graph.
            value.meta.pop("stands_for", None)
