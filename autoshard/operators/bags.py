"""Bags of embeddings of one size: `[B, K]` indices of rows of a table `[V, D]`.

ATen's operators take bags of any sizes concatenated in one dim, in which a shard does not know its bags. Where the
indices are a matrix, every row is a bag: bags are sharded as any batch is. No operator makes a tensor `[B, K, D]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoshard.operator_library import define, define_backward
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.embedding import bags_weights_backward, localize_bag_indices, masked_weights
from autoshard.patterns.ops.helpers import bind_named, if_sharded, named_values
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

aten = torch.ops.aten

# Values of ATen's `mode` arguments.
SUM, MEAN = 0, 1

bags = torch.ops.autoshard


def _offsets(indices: Tensor) -> Tensor:
    """Return the start of every bag in the flattened indices."""
    return torch.arange(0, indices.numel(), indices.shape[1], device=indices.device)


def _bags(table: Tensor, indices: Tensor, weights: Tensor | None, mode: int, padding: int) -> Tensor:
    """Return the sum or mean of the rows of every bag, `[B, D]`, ignoring the index `padding`."""
    flat = None if weights is None else weights.reshape(-1)
    result: Tensor = aten._embedding_bag_forward_only(
        table, indices.reshape(-1), _offsets(indices), False, mode, False, flat, False, padding
    )[0]
    return result


def _per_index(grad: Tensor, indices: Tensor, mode: int, padding: int) -> Tensor:
    """Return the gradient of each row of a bag, without its weight, `[B, D]`."""
    if mode == SUM:
        return grad
    # A bag of only padding has sum 0, which is divided by 1.
    count = (indices != padding).sum(1, keepdim=True).clamp_min(1)
    return grad / count.to(grad.dtype)


def _bags_backward(grad: Tensor, indices: Tensor, weights: Tensor | None, rows: int, mode: int, padding: int) -> Tensor:
    """Return the gradient of the table, `[V, D]`."""
    offsets = _offsets(indices)
    bag = torch.arange(indices.shape[0], device=indices.device).repeat_interleave(indices.shape[1])
    flat = None if weights is None else weights.reshape(-1)
    # `_per_index` has divided the gradients of means. As sums, they need neither sizes of bags nor indices of maxima:
    # pass zeros for these.
    result: Tensor = aten._embedding_bag_dense_backward(
        *(_per_index(grad, indices, mode, padding), indices.reshape(-1), bag),
        *(torch.zeros_like(offsets), torch.zeros_like(offsets), rows, False, SUM, flat, padding),
    )
    return result


def _bags_weights_backward(grad: Tensor, table: Tensor, indices: Tensor, mode: int, padding: int) -> Tensor:
    """Return the gradient of the weights, `[B, K]`."""
    offsets = _offsets(indices)
    bag = torch.arange(indices.shape[0], device=indices.device).repeat_interleave(indices.shape[1])
    flat: Tensor = aten._embedding_bag_per_sample_weights_backward(
        grad, table, indices.reshape(-1), offsets, bag, mode, padding
    )
    return flat.view(indices.shape)


_OPTIONS = "int mode, int padding"
define(
    f"bags(Tensor table, Tensor indices, Tensor? weights, {_OPTIONS}) -> Tensor",
    _bags,
    lambda table, indices, *_: table.new_empty(indices.shape[0], table.shape[1]),
)
define(
    f"bags_backward(Tensor grad, Tensor indices, Tensor? weights, int rows, {_OPTIONS}) -> Tensor",
    _bags_backward,
    lambda grad, indices, weights, rows, *_: grad.new_empty(rows, grad.shape[1]),
)
define(
    f"bags_weights_backward(Tensor grad, Tensor table, Tensor indices, {_OPTIONS}) -> Tensor",
    _bags_weights_backward,
    lambda grad, table, indices, *_: grad.new_empty(indices.shape),
)


def _save_bags(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, indices, weights, ctx.mode, ctx.padding = inputs
    ctx.rows = table.shape[0]
    # Only the gradient of weights needs the table.
    ctx.save_for_backward(None if weights is None else table, indices, weights)


def _differentiate_bags(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    table, indices, weights = ctx.saved_tensors
    options = (ctx.mode, ctx.padding)
    of_table = bags.bags_backward(grad, indices, weights, ctx.rows, *options) if ctx.needs_input_grad[0] else None
    of_weights = None
    if weights is not None and ctx.needs_input_grad[2]:
        of_weights = bags.bags_weights_backward(grad, table, indices, *options)
    return of_table, None, of_weights, None, None


define_backward("bags", _save_bags, _differentiate_bags)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return `torch.nn.functional.embedding_bag`, computed by the operators of this file where possible."""
    if input.dim() != 2 or offsets is not None or mode == "max" or scale_grad_by_freq or sparse or max_norm is not None:
        return functional.embedding_bag(
            *(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse),
            *(per_sample_weights, include_last_offset, padding_idx),
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]  # no index is -1
    result: Tensor = bags.bags(weight, input, per_sample_weights, SUM if mode == "sum" else MEAN, padding)
    return result


# Bags, vocabulary and embedding dim may be sharded; a rank sums the rows of every bag within its stretch of the
# vocabulary.

_OPERAND_DIMS = {"table": "v^ d", "indices": "b k!", "weights": "b k!", "grad": "b d"}


@rule_maker("autoshard::bags")
def bags_rule(call: OpCall) -> Rule:
    """Sums or means of the rows of every bag; linear in the table."""
    # Rows of other ranks are read as this rank's first row, which may be padding, with weight 0.
    return bind_named(
        call, _OPERAND_DIMS, ["b d"], linear=[{"table"}], local=_local_bags, uneven=("b", "d"), fill={"v": 0.0}
    )


@if_sharded("v")
def _local_bags(call: LocalCall) -> Any:
    values = named_values(call)
    indices, weights = _local_indices_and_weights(call, call.operand_shape(0)[0])
    result = call.run(operands=[values["table"], indices, weights], weights=weights, mode=0, padding=-1)
    return result / _counts(call) if call.arg("mode") == MEAN else result


def _local_indices_and_weights(call: LocalCall, stretch: int) -> tuple[Any, Any]:
    values = named_values(call)
    indices, outside = localize_bag_indices(call, stretch, call.arg("padding"))
    dense = values["table"] if "table" in values else values["grad"]
    return indices, masked_weights(call, dense, values.get("weights"), outside)


def _counts(call: LocalCall) -> Any:
    """Number of rows of every bag on all ranks, at least one: `[b, 1]`."""
    return named_values(call)["indices"].ne(call.arg("padding")).sum([1], True).clamp_min(1)


@rule_maker("autoshard::bags_backward")
def bags_backward_rule(call: OpCall) -> Rule:
    """The gradient of the table: partial over bags, sharded over the vocabulary without communication."""
    return bind_named(call, _OPERAND_DIMS, ["v^ d"], linear=[{"grad"}], local=_local_bags_backward, uneven=True)


@if_sharded("v")
def _local_bags_backward(call: LocalCall) -> Any:
    rows, values = call.result_shape()[0], named_values(call)
    indices, weights = _local_indices_and_weights(call, rows)
    gradient = values["grad"]
    if call.arg("mode") == MEAN:
        gradient = gradient / _counts(call)
    return call.emit.call(call.call.op, gradient, indices, weights, rows, 0, -1)


rule_maker("autoshard::bags_weights_backward", dims=_OPERAND_DIMS, result="b k!", uneven=("b", "d"))(
    bags_weights_backward
)
