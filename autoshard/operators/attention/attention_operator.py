"""Scaled dot-product attention as an operator of the `autoshard` namespace, the same in every captured graph.

The kernel is chosen where the operator runs (`attention_kernels`), by the device, the dtype, the width of heads and the
mask of the rank's shards. A graph captured on one machine is therefore valid on all others. Causal calls may be of a
range of the queries that starts at position `start` (a 0-d tensor on the host).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autoshard.operator_library import KERNELS, SEEDS, define, define_backward
from autoshard.operators.attention.attention_kernels import (
    MATH,
    AttentionBackwardInputs,
    AttentionCall,
    Gradients,
    choose_dropout_kernel,
    choose_kernel,
    drop_unreachable_keys,
    dropout_kernel,
)

operators = torch.ops.autoshard
"""`attention(query, key, value, attn_mask, start, is_causal, window, scale, dropout_p, seed)`: output and logsumexp.

`query` is `[b, h, s, d]`, `key` `[b, g, t, d]`, `value` `[b, g, t, e]`, and `g` divides `h`. `attn_mask` is broadcast
to `[b, h, s, t]`: numbers to add to the scores, or booleans that are True for kept scores. A causal call has no mask;
its query `i` attends to the keys up to `i + start`, at most the last `window` of them unless that is 0. The output is
`[b, h, s, e]`; logsumexp, the natural logarithms of the sums of exponentials, is `[b, h, s]`, in the dtype in which
kernels accumulate. Dropout draws by `seed`, a 0-d tensor on the host; the third result, also on the host, is the number
of the kernel that drew.

`attention_backward` returns the gradients of query, key, value and, if `mask_gradient`, of the mask.

`attention_seed` returns a seed: a number of torch's default generator.
"""


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    start: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[AttentionCall, int]:
    """Return the call on the keys that its queries reach, and the number of keys before these."""
    call = AttentionCall(query, key, value, mask, causal, window, scale, dropout, _number(seed))
    return drop_unreachable_keys(call, _number(start))


def _forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, _ = _call(query, key, value, *options)
    number = choose_dropout_kernel(call) if call.dropout else 0
    kernel, call = dropout_kernel(call, number) if call.dropout else choose_kernel(call)
    out, logsumexp = kernel.forward(call)
    return _heads_last(out), logsumexp.contiguous(), torch.full((), number, dtype=torch.int64, device="cpu")


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *options: Any
) -> Gradients:
    # The dispatcher omits trailing default arguments, such as those of dropout.
    *limits, mask_gradient = options[:6]
    dropout, drawn_by = options[6:8], options[8:]
    call, first = _call(query, key, value, *limits, *dropout)
    behind = key.shape[2] - first - call.key.shape[2]
    if call.dropout:
        kernel, call = dropout_kernel(call, _number(*drawn_by))
    else:
        # Not every kernel has a gradient of the mask; the reference does.
        kernel, call = (MATH, call.with_repeated_keys()) if mask_gradient else choose_kernel(call)
    gradients = kernel.backward(call, AttentionBackwardInputs(out, logsumexp, grad_out, mask_gradient))
    # Sum the gradients of repeated key heads; keys that no query reaches have zero gradients.
    copies = call.key.shape[1] // key.shape[1]
    of_keys = (each.unflatten(1, (-1, copies)).sum(2) if copies > 1 else each for each in gradients[1:3])
    grad_key, grad_value = (pad(each, (0, 0, first, behind)) if first or behind else each for each in of_keys)
    return _heads_last(gradients[0]), _heads_last(grad_key), _heads_last(grad_value), gradients[3].contiguous()


def _number(value: Tensor | None = None) -> int:
    """Return a number on the host; 0 for None."""
    return 0 if value is None else int(value)


def _seed() -> Tensor:
    return torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")


def _fake_seed() -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _heads_last(value: Tensor) -> Tensor:
    """Return `value` `[b, h, s, d]` in memory of the layout `[b, s, h, d]`."""
    # One layout for all kernels, so that the traced graph is right whichever runs. This one needs no copy where a model
    # merges the heads after attention.
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _empty(like: Tensor, *shape: Any) -> Tensor:
    batch, heads, length, width = shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
    out = _empty(query, *query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=wide), _fake_seed()


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *options: Any
) -> Gradients:
    # In the order of the schema, where `mask_gradient` follows the five options of a call.
    mask, mask_gradient = options[0], options[5]
    grad_mask = mask.new_empty(mask.shape) if mask_gradient else query.new_empty(0)
    return (*(_empty(each, *each.shape) for each in (query, key, value)), grad_mask)  # type: ignore[return-value]


_OPTIONS = "Tensor? attn_mask, Tensor? start, bool is_causal, int window, float scale"
_DROPOUT = "float dropout_p=0.0, Tensor? seed=None"
define(
    f"attention(Tensor query, Tensor key, Tensor value, {_OPTIONS}, {_DROPOUT}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"{_OPTIONS}, bool mask_gradient, {_DROPOUT}, Tensor? drawn_by=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
SEEDS.add(define("attention_seed() -> Tensor", _seed, _fake_seed, tags=[torch.Tag.nondeterministic_seeded]))
KERNELS.update((operators.attention.default, operators.attention_backward.default))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, mask, start, *options, ctx.dropout, seed = inputs
    ctx.options = options
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    dropout_state = (seed, output[2]) if ctx.dropout else ()
    ctx.save_for_backward(query, key, value, *output[:2], mask, start, *dropout_state)


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 10
    mask_gradient = ctx.needs_input_grad[3]
    # Query, key, value, output, logsumexp, mask, start; then what backward needs to redraw dropout.
    saved = ctx.saved_tensors
    dropout = (ctx.dropout, *saved[7:]) if ctx.dropout else ()
    gradients = operators.attention_backward(grad_out, *saved[:7], *ctx.options, mask_gradient, *dropout)
    return (*gradients[:3], gradients[3] if mask_gradient else None, *(None,) * 6)


define_backward("attention", _keep, _differentiate)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int = 0,
    dtype: torch.dtype,
    order: Sequence[int] = (),
) -> Tensor:
    """Return `aten.scaled_dot_product_attention` of the operands, computed by `autoshard::attention`.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as of the ATen operator.
        window: most keys that a query of a causal call attends to; 0 for all.
        dtype: of the result, as recorded by `torch.export`: under autocast, the dtype in which attention is computed.
        order: the dims of the result larger than 1, in memory order, outermost first; empty for the order of the
            operator.
    """
    query, key, value = (each.to(dtype) for each in (query, key, value))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(dtype)
    shape = query.shape
    query, key, value, attn_mask = _with_four_dims(query, key, value, attn_mask)
    scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
    dropout = (dropout_p, operators.attention_seed()) if dropout_p else ()
    out: Tensor = operators.attention(query, key, value, attn_mask, None, is_causal, window, scale, *dropout)[0]
    return _in_memory_order(out if len(shape) == 4 else out.reshape(*shape[:-1], value.shape[-1]), order)


def _in_memory_order(out: Tensor, order: Sequence[int]) -> Tensor:
    """Return the result of `attention`, or a copy if it is not in this memory order; see there."""
    dims = list(range(out.dim()))
    present = [*dims[:-3], dims[-2], dims[-3], dims[-1]] if len(dims) > 3 else dims  # see `_heads_last`
    if list(order) == [dim for dim in present if dim in order]:
        return out
    wanted = [*(dim for dim in dims if dim not in order), *order]
    return out.permute(wanted).contiguous().permute([wanted.index(dim) for dim in dims])


def attention_with_dropout(*args: Any, **kwargs: Any) -> Tensor:
    """Return `attention` with random dropout."""
    # A separate target, by which passes over an exported graph recognise that the call draws random numbers.
    return attention(*args, **kwargs)


def _with_four_dims(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the operands as `[b, h, s, d]`: dims before the heads are samples, and broadcast dims are expanded."""
    # The first of three dims is that of samples: insert a dim of one head after it.
    if max(each.dim() for each in (query, key, value)) < 4:
        query, key, value = (each.unsqueeze(-3) for each in (query, key, value))
        mask = mask.unsqueeze(-3) if mask is not None and mask.dim() > 2 else mask
    heads = max(each.shape[-3] for each in (query, key, value))
    if key.shape[-3] != value.shape[-3] or query.shape[-3] != heads:
        query, key, value = (each.expand(*each.shape[:-3], heads, *each.shape[-2:]) for each in (query, key, value))
    batch = torch.broadcast_shapes(*(each.shape[:-3] for each in (query, key, value)))
    query, key, value = (_with_samples(each, batch) for each in (query, key, value))
    if mask is not None and mask.dim() > 4:
        mask = _with_samples(mask, batch)
    return query, key, value, mask


def _with_samples(value: Tensor, batch: torch.Size) -> Tensor:
    """Return `value` `[..., h, s, d]` with one dim of samples, expanded to the shape `batch` and flattened."""
    if len(batch) == 1 and value.shape[:-3] == batch:
        return value
    return value.expand(*batch, *value.shape[-3:]).reshape(math.prod(batch), *value.shape[-3:])
