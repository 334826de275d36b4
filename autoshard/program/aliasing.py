"""The memory in which the tensor of a node of a program lies: its own, or that of the node that it is a view of.

A program without a backward half writes rows into inputs that it changes, such as caches, instead of making new ones.
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
    """Return True if a result of the operator lies in its first operand's memory; a reshape may copy all the same."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def storage_root(node: fx.Node) -> fx.Node:
    """Return the node in whose memory a node's tensor lies: the one it is a view of, through any number, or itself."""
    while True:
        source = view_source(node)
        if source is None:
            return node
        node = source


def view_source(node: fx.Node) -> fx.Node | None:
    """Return the node that a node's tensor is a view of; None if it has memory of its own."""
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
    """Have a program write rows into its inputs.

    Args:
        changed: inputs that a step changes, as placeholders, and the nodes of their new values. Those that are read
            elsewhere, or get their values by other operators, stay as they are.
    """
    for source, value in changed:
        if value.target in _IN_PLACE and value.args[0] is source and len(source.users) == 1:
            value.target = _IN_PLACE[value.target]
            # Its price is that of the rows, no longer that of the operator of the captured graph.
            value.meta.pop("stands_for", None)
