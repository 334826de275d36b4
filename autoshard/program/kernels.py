"""Prices of the calls of a program: kernels, alone or fused by a compiler, and collectives."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.cluster.cost import CostModel
from autoshard.cluster.flops import flops
from autoshard.patterns.exchanging import exchange_ops, shift
from autoshard.program.aliasing import makes_view
from autoshard.specs.emitter import collectives

# The operators that start a collective, and its kind. Tensors are their first argument, the group is the last.
COLLECTIVE_KINDS: dict[Any, str] = {
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_gather_into_tensor_coalesced.default: "all_gather",
    collectives.all_reduce.default: "all_reduce",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_to_all_single.default: "all_to_all",
    shift: "shift",
    exchange_ops.exchange.default: "all_to_all",
}


def kernel_seconds(cost: CostModel, op: Any, operands: object, results: object, args: Sequence[object]) -> float:
    """Return the seconds of one call of an operator that is no collective, on one device.

    A view costs a call. Everything else costs its operations, or the bytes that it reads and writes.

    Args:
        cost: prices of the cluster.
        op: the operator. Other functions, such as arithmetic on sizes, cost nothing.
        operands: the tensors that it reads, nested as they may be; their numbers are not needed.
        results: the tensors that it makes.
        args: its arguments, for the operators whose work does not follow from shapes.
    """
    if not hasattr(op, "overloadpacket"):
        return 0.0
    if makes_view(op):
        return cost.view()
    made, operands = list(tensors(results)), list(tensors(operands))
    work = flops(op, [tensor.shape for tensor in operands], [tensor.shape for tensor in made], args)
    # A kernel that selects reads only what it keeps.
    read = made if op is torch.ops.aten.index_select.default else operands
    dtype = made[0].dtype if made else torch.float32
    return cost.compute(work, bytes_of([*read, *made]), dtype, op.overloadpacket.__name__)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: itself, or those in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def bytes_of(value: object) -> int:
    """Return the bytes of the elements of all tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))


# A compiler makes one kernel of a chain of pointwise operators, and of reductions of what they make.
# Softmax and norms are reductions without torch's tag.
_REDUCTIONS = ("_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "linalg_vector_norm")


@functools.cache
def is_pointwise(op: Any) -> bool:
    """Return True if every element of the result depends only on the elements at its place."""
    # Casts lack the tag.
    return torch.Tag.pointwise in getattr(op, "tags", ()) or op is torch.ops.aten._to_copy.default


@functools.cache
def _fuses_operands(op: Any) -> bool:
    """Return True if a compiler computes the operands of an operator in the operator's own kernel."""
    name = getattr(getattr(op, "overloadpacket", None), "__name__", "")
    return is_pointwise(op) or torch.Tag.reduction in getattr(op, "tags", ()) or name in _REDUCTIONS


def memory_operands(node: fx.Node) -> list[fx.Node] | None:
    """Return the operands that a compiled call reads from memory; None if its operator is not fused."""
    if not _fuses_operands(node.target):
        return None
    read = []
    for source in node.all_input_nodes:
        base = source
        while base.op == "call_function" and _is_view(base):
            base = base.all_input_nodes[0]
        # The results of pointwise operators are in the kernel already.
        if not is_pointwise(base.target):
            read.append(source)
    return read


def is_written(node: fx.Node) -> bool:
    """Return True if a compiled call writes its result to memory, because a call outside of its kernel reads it."""
    if not is_pointwise(node.target) or not node.users:
        return True
    return not all(_fuses_operands(user.target) for user in _users(node))


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node and of its views."""
    for user in node.users:
        if user.op == "call_function" and _is_view(user):
            yield from _users(user)
        else:
            yield user


def _is_view(node: fx.Node) -> bool:
    return makes_view(node.target) and len(node.all_input_nodes) == 1
