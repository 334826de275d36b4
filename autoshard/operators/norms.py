"""Root-mean-square normalisation.

GPUs have a kernel for it, the CPU has none: traced on the CPU it would be five operators that each read and write the
whole tensor wherever the graph runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.operator_library import accumulation_dtype, define, define_backward
from autoshard.patterns.ops.norm import normalization, normalization_backward
from autoshard.patterns.registry import rule_maker

aten = torch.ops.aten
operators = torch.ops.autoshard
"""`rms_norm`: the result, and the reciprocal of the root `[..., 1, ...]` in the dtype in which it is computed.

`rms_norm_backward`: the gradients of input and weight selected by `output_mask`; the others are empty.
"""


def _has_kernel(x: Tensor, weight: Tensor | None) -> bool:
    # torch's kernel requires a weight with the dtype of the input.
    return x.device.type == "cuda" and (weight is None or weight.dtype == x.dtype)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    if _has_kernel(x, weight):
        result, rstd = aten._fused_rms_norm(x, list(shape), weight, eps)
        return result, rstd
    wide = x.to(accumulation_dtype(x.dtype))
    dims = list(range(-len(shape), 0))
    rstd = wide.square().mean(dims, keepdim=True).add(eps).rsqrt()
    result = wide * rstd
    return (result if weight is None else result * weight).to(x.dtype), rstd


def _rms_norm_backward(
    grad_out: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    if _has_kernel(x, weight):
        of_input, of_weight = aten._fused_rms_norm_backward(grad_out, x, list(shape), rstd, weight, list(mask))
        return tuple(x.new_empty(0) if each is None else each for each in (of_input, of_weight))  # type: ignore[return-value]
    wide, gradient = x.to(rstd.dtype), grad_out.to(rstd.dtype)
    normal, absent = wide * rstd, x.new_empty(0)
    dims = list(range(-len(shape), 0))
    of_input = of_weight = absent
    # With n = x * rstd, and the mean over the normalised dims: dx = rstd * (dn - n * mean(dn * n)).
    if mask[0]:
        inner = gradient if weight is None else gradient * weight
        along = (inner * normal).sum(dims, keepdim=True) / math.prod(shape)
        of_input = ((inner - normal * along) * rstd).to(x.dtype)
    if mask[1]:
        assert weight is not None
        batch = list(range(x.dim() - len(shape)))
        product = gradient * normal
        of_weight = (product.sum(batch) if batch else product).to(weight.dtype)
    return of_input, of_weight


def _rms_norm_like(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    batch = x.dim() - len(shape)
    rows = [size if dim < batch else 1 for dim, size in enumerate(x.shape)]
    return torch.empty_like(x), x.new_empty(rows, dtype=accumulation_dtype(x.dtype))


def _rms_norm_backward_like(
    grad_out: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    of_weight = weight.new_empty(weight.shape) if mask[1] and weight is not None else x.new_empty(0)
    return (torch.empty_like(x) if mask[0] else x.new_empty(0)), of_weight


define(
    "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float eps) -> (Tensor, Tensor)",
    _rms_norm,
    _rms_norm_like,
)
define(
    "rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, "
    "bool[2] output_mask) -> (Tensor, Tensor)",
    _rms_norm_backward,
    _rms_norm_backward_like,
)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.shape, weight, _ = inputs
    # The reciprocal root is only for the backward. Without materialised gradients, no zeros are made for it.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], weight)


def _differentiate_rms_norm(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad_out is None:
        return None, None, None, None
    x, rstd, weight = ctx.saved_tensors
    mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    of_input, of_weight = operators.rms_norm_backward(grad_out, x, ctx.shape, rstd, weight, mask)
    return of_input if mask[0] else None, None, of_weight if mask[1] else None, None


define_backward("rms_norm", _save_rms_norm, _differentiate_rms_norm)


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return `aten.rms_norm` of the operands, computed by `autoshard::rms_norm`.

    Args:
        x, normalized_shape, weight, eps: as of the ATen operator.
        dtype: of the result, as recorded by `torch.export`: under autocast, the dtype in which norms are computed.
    """
    # Contiguous, as the results of `_rms_norm_like` are, whichever kernel runs.
    eps = torch.finfo(accumulation_dtype(dtype)).eps if eps is None else eps
    result: Tensor = operators.rms_norm(x.to(dtype).contiguous(), list(normalized_shape), weight, eps)[0]
    return result


rule_maker("autoshard.rms_norm")(normalization)
rule_maker("autoshard.rms_norm_backward")(normalization_backward)
