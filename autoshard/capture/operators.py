"""Definition of operators of the `autoshard` namespace, which run on every device, and three families of them.

*Connectionist temporal classification.* ATen's operator also returns a table as wide as the longest target, which a
graph of fixed shapes cannot hold. Here the backward computes the table again.

*Bags of embeddings of one size*, `[B, K]` indices of rows of a table `[V, D]`. ATen's operators take bags of any sizes
one after another in one dim, in which no shard knows its borders. Where the indices are a matrix, every row is a bag:
bags are sharded as any batch is. No operator makes a tensor `[B, K, D]`.

*Root-mean-square normalisation.* GPUs have a kernel for it, the CPU has none: traced on the CPU it would be five
operators, each of which reads and writes the whole tensor wherever the graph runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_library = torch.library.Library("autoshard", "FRAGMENT")


Workspace = Callable[..., int]

WORKSPACES: dict[Any, Workspace] = {}
"""By operator: the bytes that a call holds besides operands and results, from its arguments; tensors need no numbers.

Operators that are not here hold few.
"""


def define(
    schema: str,
    program: Callable[..., Any],
    results_like: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
    workspace: Workspace | None = None,
) -> Any:
    """Define an operator, and return its overload.

    Args:
        schema: the name, the arguments and the results, as `torch.library.Library.define` takes them.
        program: computes the results on any device, without autograd.
        results_like: makes results of the same shapes and dtypes from arguments without numbers.
        tags: properties that passes over graphs ask for.
        workspace: returns the bytes that the program holds besides operands and results, from the same arguments; left
            out where they are few.
    """
    name = _library.define(schema, tags=tags)
    # One program for all devices, which autograd does not look into: the backward is an operator, too.
    _library.impl(name, program, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", results_like, lib=_library)
    op = getattr(torch.ops.autoshard, name).default
    if workspace is not None:
        WORKSPACES[op] = workspace
    return op


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's own kernels add up numbers of `dtype`."""
    # A sum in bfloat16 itself, of 8 bits, would stop growing at 256 ones.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def define_backward(name: str, keep: Callable[..., None], gradients: Callable[..., Any]) -> None:
    """Define the backward of an operator by what it keeps of a call (`setup_context`) and by its gradients."""
    torch.library.register_autograd(f"autoshard::{name}", gradients, setup_context=keep, lib=_library)


def define_dispatch(op: Any, mode: type, rule: Callable[..., Any]) -> None:
    """Define how an operator runs under a torch dispatch mode: `rule(mode, op, types, args, kwargs)`."""
    torch.library.register_torch_dispatch(op.name(), mode, rule, lib=_library)


def define_for_autograd(schema: str, program: Callable[..., Any]) -> None:
    """Define an operator whose program runs under autograd, so that its results have the history of what it calls."""
    _library.impl(_library.define(schema), program, "Autograd")


aten = torch.ops.aten
losses = torch.ops.autoshard


def _loss(log_probs: Tensor, *options: Any) -> Tensor:
    """Return the negative log-likelihood of every sample, `[N]`, of log-probabilities `[T, N, C]`."""
    # The second result is the table.
    likelihood: Tensor = aten._ctc_loss.Tensor(log_probs, *options)[0]
    return likelihood


def _loss_backward(grad: Tensor, log_probs: Tensor, *options: Any) -> Tensor:
    """Return the gradient of the log-probabilities, `[T, N, C]`."""
    *lengths, blank, zero_infinity = options
    tables = aten._ctc_loss.Tensor(log_probs, *options)
    gradient: Tensor = aten._ctc_loss_backward.Tensor(grad, log_probs, *lengths, *tables, blank, zero_infinity)
    return gradient


_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
)
define(f"ctc_loss({_ARGUMENTS}) -> Tensor", _loss, lambda log_probs, *options: log_probs.new_empty(log_probs.shape[1]))
define(
    f"ctc_loss_backward(Tensor grad, {_ARGUMENTS}) -> Tensor",
    _loss_backward,
    lambda grad, log_probs, *options: log_probs.new_empty(log_probs.shape),
)


def _save_ctc(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_ctc(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    options = (*ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return losses.ctc_loss_backward(grad, *options), None, None, None, None, None


define_backward("ctc_loss", _save_ctc, _differentiate_ctc)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int | str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return `torch.nn.functional.ctc_loss`, or `torch.ctc_loss`, whose reductions are numbers: none, mean and sum."""
    single = log_probs.dim() == 2
    lengths = [_as_tensor(value, log_probs.device).reshape(-1) for value in (input_lengths, target_lengths)]
    samples = log_probs.unsqueeze(1) if single else log_probs
    if single and targets.dim() == 1:
        targets = targets.unsqueeze(0)
    loss: Tensor = losses.ctc_loss(samples, targets, *lengths, blank, zero_infinity)
    # ATen's kernel of the loss leaves infinities; torch replaces them here, too.
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0.0, loss)
    if reduction in (1, "mean"):
        return (loss / lengths[1].clamp_min(1).to(loss)).mean()
    if reduction in (2, "sum"):
        return loss.sum()
    return loss.squeeze(0) if single else loss


def _as_tensor(lengths: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Return lengths as a tensor."""
    if isinstance(lengths, Tensor):
        return lengths
    # Operators make the numbers: `torch.tensor` would be a constant of the graph, on one device.
    if len(set(lengths)) == 1:
        return torch.full((len(lengths),), lengths[0], device=device)
    return torch.cat([torch.full((1,), length, device=device) for length in lengths])


# Values of ATen's `mode` arguments.
SUM, MEAN = 0, 1

bags = torch.ops.autoshard


def _offsets(indices: Tensor) -> Tensor:
    """Return the position in the flattened indices at which every bag begins."""
    return torch.arange(0, indices.numel(), indices.shape[1], device=indices.device)


def _bags(table: Tensor, indices: Tensor, weights: Tensor | None, mode: int, padding: int) -> Tensor:
    """Return the sum or mean of the rows of every bag, `[B, D]`, without rows at the index `padding`."""
    flat = None if weights is None else weights.reshape(-1)
    result: Tensor = aten._embedding_bag_forward_only(
        table, indices.reshape(-1), _offsets(indices), False, mode, False, flat, False, padding
    )[0]
    return result


def _per_index(grad: Tensor, indices: Tensor, mode: int, padding: int) -> Tensor:
    """Return the gradient of each row of a bag, without its weight, `[B, D]`."""
    if mode == SUM:
        return grad
    # A bag of padding alone has a sum of zero, which is divided by one.
    count = (indices != padding).sum(1, keepdim=True).clamp_min(1)
    return grad / count.to(grad.dtype)


def _bags_backward(grad: Tensor, indices: Tensor, weights: Tensor | None, rows: int, mode: int, padding: int) -> Tensor:
    """Return the gradient of the table, `[V, D]`."""
    offsets = _offsets(indices)
    bag = torch.arange(indices.shape[0], device=indices.device).repeat_interleave(indices.shape[1])
    flat = None if weights is None else weights.reshape(-1)
    # `_per_index` has divided the gradients of means: as sums, they need neither sizes of bags nor indices of maxima,
    # in whose places are zeros.
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
    """Return `torch.nn.functional.embedding_bag`, computed by the operators of this file where they can."""
    if input.dim() != 2 or offsets is not None or mode == "max" or scale_grad_by_freq or sparse or max_norm is not None:
        return functional.embedding_bag(
            *(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse),
            *(per_sample_weights, include_last_offset, padding_idx),
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]  # no index is -1
    result: Tensor = bags.bags(weight, input, per_sample_weights, SUM if mode == "sum" else MEAN, padding)
    return result


operators = torch.ops.autoshard
"""`rms_norm`: the result, and the reciprocal of the root `[..., 1, ...]` in the dtype that it is computed in.

`rms_norm_backward`: the gradients of input and weight that `output_mask` asks for; the others have no elements.
"""


def _has_kernel(x: Tensor, weight: Tensor | None) -> bool:
    # torch's kernel takes a weight of the dtype of the input alone.
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
    # The reciprocal root is for the backward alone. Without materialised gradients, no zeros are made for it.
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
        dtype: of the result, as `torch.export` noted it: under autocast, the dtype in which norms are computed.
    """
    # Contiguous, as the results of `_rms_norm_like` are, whichever kernel runs.
    eps = torch.finfo(accumulation_dtype(dtype)).eps if eps is None else eps
    result: Tensor = operators.rms_norm(x.to(dtype).contiguous(), list(normalized_shape), weight, eps)[0]
    return result
