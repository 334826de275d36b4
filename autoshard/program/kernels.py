"""What one call of a program costs: a kernel by its operations and bytes, a collective by its kind and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autoshard.cluster.cost import CostModel
from autoshard.cluster.flops import flops
from autoshard.patterns.ring import shift
from autoshard.patterns.routed_exchange import exchange_ops
from autoshard.specs.emitter import collectives

COLLECTIVE_KINDS: dict[Any, str] = {
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_gather_into_tensor_coalesced.default: "all_gather",
    collectives.all_reduce.default: "all_reduce",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_to_all_single.default: "all_to_all",
    shift: "shift",
    exchange_ops.exchange.default: "all_to_all",
}
"""The operators that start a collective, and its kind; the tensors are their first argument, the group the last."""


def kernel_seconds(cost: CostModel, op: Any, operands: object, results: object, args: Sequence[object]) -> float:
    """Time of one call of an operator that is no collective, on one device.

    Args:
        cost: prices of the cluster.
        op: the operator; what is none, such as arithmetic on sizes, costs nothing.
        operands: the tensors that it reads, with or without numbers; nested as they may be.
        results: those that it makes.
        args: its arguments, for what the shapes do not tell.

    Returns:
        Seconds: of a view, what a call costs; of everything else, its operations or the bytes that it reads and writes.
    """
    if not hasattr(op, "overloadpacket"):
        return 0.0
    if makes_view(op):
        return cost.view()
    made, taken = list(tensors(results)), list(tensors(operands))
    work = flops(op, [one.shape for one in taken], [one.shape for one in made], args)
    read = made if op is torch.ops.aten.index_select.default else taken  # a slice reads what it keeps
    moved = sum(one.numel() * one.element_size() for one in (*read, *made))
    dtype = made[0].dtype if made else torch.float32
    return cost.compute(work, moved, dtype, op.overloadpacket.__name__)


def makes_view(op: Any) -> bool:
    """Whether a result of the operator lies in the memory of an operand."""
    return any(result.alias_info is not None for result in op._schema.returns)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, or those in a list of values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
