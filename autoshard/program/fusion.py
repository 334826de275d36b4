"""What a compiler fuses: chains of pointwise operators, and reductions of what they make, are one kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autoshard.program.kernels import makes_view

_CASTS = (torch.ops.aten._to_copy.default,)
_REDUCTIONS = ("_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "linalg_vector_norm")


@functools.cache
def is_pointwise(op: Any) -> bool:
    """Whether every element of an operator's result is made of the elements at its place."""
    return torch.Tag.pointwise in getattr(op, "tags", ()) or op in _CASTS


@functools.cache
def _fuses_operands(op: Any) -> bool:
    """Whether a compiler computes an operator's operands where it reads them."""
    name = getattr(getattr(op, "overloadpacket", None), "__name__", "")
    return is_pointwise(op) or torch.Tag.reduction in getattr(op, "tags", ()) or name in _REDUCTIONS


def memory_operands(node: fx.Node) -> list[fx.Node] | None:
    """The operands that a compiled call reads from memory; None where the operator is not one that is fused.

    What pointwise operators make is there already, in the kernel that they share.
    """
    if not _fuses_operands(node.target):
        return None
    return [source for source in node.all_input_nodes if not is_pointwise(_view_base(source).target)]


def is_written(node: fx.Node) -> bool:
    """Whether a compiled call writes its result: something reads it that is not computed in the same kernel."""
    return (
        not is_pointwise(node.target)
        or not all(_fuses_operands(user.target) for user in _users(node))
        or not node.users
    )


def _view_base(node: fx.Node) -> fx.Node:
    """What a node is a view of, or itself."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a node and of its views."""
    for user in node.users:
        if user.op == "call_function" and _is_view(user):
            yield from _users(user)
        else:
            yield user


def _is_view(node: fx.Node) -> bool:
    return hasattr(node.target, "_schema") and makes_view(node.target) and len(node.all_input_nodes) == 1
