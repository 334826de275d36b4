"""One call of attention in the form that kernels take, and the kernel that computes it by matrix products.

The kernels behind `autoshard::attention`: the device's own kernel is chosen when the operator runs.

All kernels take and return one form: an output `[b, h, s, e]`, and for each query the natural logarithm of its sum of
exponentials `[b, h, s]`. Backward needs only these and the inputs, so the two halves need not run the same kernel. With
dropout they must: each kernel draws dropped weights in its own way from the device's generator, which is seeded for the
call, so that backward draws them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.functional import pad

aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call, on the keys that its queries can attend to.

    Attributes:
        query: `[b, h, s, d]`.
        key: `[b, g, t, d]`, where `g` divides `h`.
        value: `[b, g, t, e]`.
        mask: added to the scores `[b, h, s, t]`, or booleans that are True for kept scores; broadcast to them. None in
            a causal call.
        causal: True if a query attends to no key after its own; the last query's own key is the last key.
        window: most keys that a query of a causal call attends to, up to its own; 0 for all.
        scale: of the scores.
        dropout: the probability of dropping a weight.
        seed: of the random numbers that choose dropped weights.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    window: int
    scale: float
    dropout: float = 0.0
    seed: int = 0

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return self.query.shape[2], self.key.shape[2]

    @property
    def groups(self) -> int:
        """Number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def is_simple(self) -> bool:
        """True if the call has no limit, or every kernel's causal flag means its limit."""
        # With unequal lengths some kernels align the first query with the first key, others the last with the last.
        queries, keys = self.lengths
        return not self.causal or (queries == keys and not self.window)

    def with_mask(self) -> AttentionCall:
        """Return the same attention with its causal limit and window as a mask."""
        if not self.causal:
            return self
        queries, keys = self.lengths
        mask = band(range(keys - queries, keys), range(keys), self.window, self.query.device)
        return replace(self, mask=mask, causal=False, window=0)

    def with_repeated_keys(self) -> AttentionCall:
        """Return the same attention with a key head for every query head."""
        if self.groups == 1:
            return self
        key, value = (each.repeat_interleave(self.groups, 1) for each in (self.key, self.value))
        return replace(self, key=key, value=value)

    def bias(self) -> Tensor | None:
        """Return the mask as numbers to add to the scores, in the dtype of the queries."""
        if self.mask is None or self.mask.dtype != torch.bool:
            return self.mask
        hidden = torch.full((), -math.inf, dtype=self.query.dtype, device=self.mask.device)
        return torch.where(self.mask, torch.zeros_like(hidden), hidden)


@dataclass(frozen=True, slots=True)
class AttentionBackwardInputs:
    """Results of a forward call, the gradient of its output, and a flag: True if the mask's gradient is wanted.

    Shapes are `[b, h, s, e]` of `out` and `grad_out`, and `[b, h, s]` of `logsumexp`.
    """

    out: Tensor
    logsumexp: Tensor
    grad_out: Tensor
    mask_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: forward returns output and logsumexp, backward the gradients of query, key, value and mask."""

    forward: Callable[[AttentionCall], tuple[Tensor, Tensor]]
    backward: Callable[[AttentionCall, AttentionBackwardInputs], Gradients]


def band(queries: range, keys: range, window: int, device: torch.device) -> Tensor:
    """Return booleans `[s, t]`: True where the query at a position attends to the key at a position."""
    query_position = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    key_position = torch.arange(keys.start, keys.stop, device=device)
    kept = key_position <= query_position
    return kept & (key_position > query_position - window) if window else kept


def drop_unreachable_keys(whole: AttentionCall, start: int) -> tuple[AttentionCall, int]:
    """Return the call on the keys that its queries reach, and the number of keys before these.

    Args:
        whole: the call on all keys.
        start: of a causal call, the position of its first query among the keys.
    """
    if not whole.causal:
        return whole, 0
    queries, keys = whole.lengths
    end = start + queries
    first, last = max(0, start - whole.window + 1) if whole.window else 0, min(keys, end)
    # Queries that are all padding after the last key reach none: use the first keys, not an empty range.
    first = first if first < last else 0
    every = first == 0 and last == keys
    part = whole if every else replace(whole, key=whole.key[:, :, first:last], value=whole.value[:, :, first:last])
    if end == last:
        return part, first
    # Some queries are after the last key: the last query's own key is not the last key, as `causal` would mean.
    mask = band(range(start, end), range(first, last), whole.window, whole.query.device)
    return replace(part, mask=mask, causal=False, window=0), first


def no_gradient(call: AttentionCall) -> Tensor:
    """Return the empty tensor that replaces an unwanted gradient of the mask."""
    return call.query.new_empty(0)


def _precise(value: Tensor) -> Tensor:
    """Return 16-bit floats as float32, in which kernels accumulate, too."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _scores(call: AttentionCall) -> Tensor:
    scores = _precise(call.query) @ _precise(call.key).transpose(-2, -1) * call.scale
    if call.mask is None:
        return scores
    return scores.masked_fill(~call.mask, -math.inf) if call.mask.dtype == torch.bool else scores + call.mask


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the softmax of the scores; the weights of a query that attends to nothing are zero."""
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    return weights.masked_fill((logsumexp == -math.inf).unsqueeze(-1), 0)


def _apply_dropout(call: AttentionCall, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return weights, dropped (zero) or scaled up by random numbers of the seed."""
    if not call.dropout:
        return weights
    generator = torch.Generator(call.query.device).manual_seed(call.seed)
    shape = (*call.query.shape[:3], call.key.shape[2])
    kept = torch.empty(shape, dtype=torch.bool, device=call.query.device)
    kept.bernoulli_(1 - call.dropout, generator=generator)
    factor = 1 / (1 - call.dropout) if call.dropout < 1 else 0.0
    return tuple(each * kept * factor for each in weights)


def _math_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    scores = _scores(call.with_mask())
    logsumexp = scores.logsumexp(-1)
    (weights,) = _apply_dropout(call, _weights(scores, logsumexp))
    return (weights @ _precise(call.value)).to(call.query.dtype), logsumexp


def _math_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    call, gradient, dtype = call.with_mask(), _precise(attended.grad_out), call.query.dtype
    weights = _weights(_scores(call), attended.logsumexp)
    # The backward of softmax subtracts sum(weights * grad_weights) per query, which is sum(out * grad_out).
    inner = (gradient * _precise(attended.out)).sum(-1, keepdim=True)
    kept_weights, grad_weights = _apply_dropout(call, weights, gradient @ _precise(call.value).transpose(-2, -1))
    grad_scores = weights * (grad_weights - inner)
    grad_mask = no_gradient(call)
    if call.mask is not None and call.mask.dtype != torch.bool:
        grad_mask = grad_scores.sum_to_size(call.mask.shape).to(call.mask.dtype)
    grad_scores = grad_scores * call.scale  # the mask is added after scaling
    grad_query = grad_scores @ _precise(call.key)
    grad_key = grad_scores.transpose(-2, -1) @ _precise(call.query)
    grad_value = kept_weights.transpose(-2, -1) @ gradient
    return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), grad_mask


MATH = Kernel(_math_forward, _math_backward)
"""Attention by matrix products, for every call with a key head per query head. It holds all scores in memory."""


# The numbers of `torch.nn.attention.SDPBackend`.
_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3

# Flash attention of causal calls that align the last query and key, and of windows; not one of torch's backends.
_BANDED = -1


def choose_kernel(call: AttentionCall) -> tuple[Kernel, AttentionCall]:
    """Return the kernel that `scaled_dot_product_attention` would take on this device, and the call in its form.

    The form may have more key heads than the call.
    """
    if not call.is_simple:
        if _takes_bands(call):
            return _kernels(call)[_BANDED], call
        call = call.with_mask()
    choice = _choice(call)
    # These kernels do not support groups. With repeated keys, a kernel that holds no scores may take the call.
    if choice in (_MATH, _EFFICIENT):
        call = call.with_repeated_keys()
        choice = _choice(call)
    return _kernels(call).get(choice, MATH), call


def choose_dropout_kernel(call: AttentionCall) -> int:
    """Return the number of the kernel for a call that drops weights.

    Backward must run the same kernel, which redraws the weights.
    """
    # Fused kernels scale kept weights by 1 / (1 - dropout).
    if call.dropout >= 1:
        return _MATH
    call = call.with_repeated_keys()
    if not call.is_simple:
        return _BANDED if _takes_bands(call) else _choice(call.with_mask())
    if call.mask is None or call.mask.dtype == torch.bool:
        return _choice(call)
    # cuDNN's kernel has no gradient of a mask, which backward may need.
    enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        return _choice(call)
    finally:
        cuda.enable_cudnn_sdp(enabled)


def dropout_kernel(call: AttentionCall, number: int) -> tuple[Kernel, AttentionCall]:
    """Return the kernel of this number, and the call in the form in which the kernel drops weights."""
    call = call.with_repeated_keys()
    kernel = _kernels(call).get(number, MATH)
    return kernel, call if number == _BANDED or call.is_simple else call.with_mask()


def _kernels(call: AttentionCall) -> dict[int, Kernel]:
    return _KERNELS.get(call.query.device.type, _GPU_KERNELS)


def _takes_bands(call: AttentionCall) -> bool:
    """Return True if flash attention takes a causal call with a window or unequal lengths."""
    # torch's choice supports neither limit: ask it without.
    return _BANDED in _kernels(call) and _choice(replace(call, causal=False, window=0)) == _FLASH


def _choice(call: AttentionCall) -> int:
    options = {"scale": call.scale, "enable_gqa": call.groups > 1}
    return int(aten._fused_sdp_choice(*call.operands, call.mask, call.dropout, call.causal, **options))


@contextmanager
def _seeded_generator(call: AttentionCall) -> Iterator[None]:
    """Context in which the device's generator has the seed of a call that drops weights."""
    if not call.dropout:
        yield
        return
    device = call.query.device
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(call.seed)
    try:
        yield
    finally:
        generator.set_state(state)


# Flash attention for the CPU


def _cpu_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *call.operands, 0.0, call.causal, attn_mask=call.bias(), scale=call.scale
    )
    return out, logsumexp


def _cpu_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    inputs = (attended.grad_out, *call.operands, attended.out, attended.logsumexp)
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, 0.0, call.causal, attn_mask=call.bias(), scale=call.scale
    )
    return (*gradients, no_gradient(call))


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward)


# Flash attention of GPUs: heads as wide as multiples of 8, no mask


def _with_wide_heads(call: AttentionCall) -> AttentionCall:
    # Zeros add nothing to scores, nor columns of zeros to results. The scale is that of the call.
    missing = -call.query.shape[-1] % 8
    query, key, value = (pad(each, (0, missing)) if missing else each for each in call.operands)
    return replace(call, query=query, key=key, value=value)


def _wide_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> tuple[AttentionCall, Tensor, Tensor]:
    """Return the call with wide heads, its gradient and its result."""
    wide = _with_wide_heads(call)
    missing = wide.value.shape[-1] - call.value.shape[-1]
    return wide, pad(attended.grad_out, (0, missing)), pad(attended.out, (0, missing))


def _narrow_gradients(call: AttentionCall, gradients: tuple[Tensor, Tensor, Tensor]) -> Gradients:
    """Return gradients of the width of the call's heads."""
    width = call.query.shape[-1]
    query, key, value = (each[..., :width] for each in gradients)
    return query, key, value, no_gradient(call)


def _random_state(call: AttentionCall, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return seed and offset of a generator with the seed of the call: backward draws as forward did."""
    seed, offset = (torch.full((), number, dtype=torch.int64, device=device) for number in (call.seed, 0))
    return seed, offset


def _flash_state(call: AttentionCall) -> tuple[Tensor, Tensor]:
    # Flash attention keeps both numbers in the first tensor.
    seed, offset = _random_state(call, call.query.device)
    return torch.stack((seed, offset)).view(torch.uint64), offset


def _flash_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    with _seeded_generator(call):
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            *_with_wide_heads(call).operands, call.dropout, call.causal, False, scale=call.scale
        )
    return out[..., : call.value.shape[-1]], logsumexp


def _flash_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    wide, grad_out, out = _wide_backward(call, attended)
    gradients = aten._scaled_dot_product_flash_attention_backward(
        *(grad_out, *wide.operands, out, attended.logsumexp, None, None, *call.lengths),
        *(call.dropout, call.causal, *_flash_state(call)),
        scale=call.scale,
    )
    return _narrow_gradients(call, gradients)


FLASH = Kernel(_flash_forward, _flash_backward)


# Flash attention of GPUs by its own operator: it aligns the last query with the last key, and supports windows


def _limits(call: AttentionCall) -> dict[str, int | float]:
    limits: dict[str, int | float] = {"scale": call.scale}
    # torch counts the keys before a query's own; `window` includes its own.
    return limits | {"window_size_left": call.window - 1, "window_size_right": 0} if call.window else limits


def _banded_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    # This operator takes and returns `[b, s, h, d]`.
    operands = (each.transpose(1, 2) for each in _with_wide_heads(call).operands)
    with _seeded_generator(call):
        out, logsumexp, *_ = aten._flash_attention_forward(
            *operands, None, None, *call.lengths, call.dropout, True, False, **_limits(call)
        )
    return out.transpose(1, 2)[..., : call.value.shape[-1]], logsumexp


def _banded_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    wide, grad_out, out = _wide_backward(call, attended)
    operands = (each.transpose(1, 2) for each in (grad_out, *wide.operands, out))
    query, key, value = aten._flash_attention_backward(
        *(*operands, attended.logsumexp, None, None, *call.lengths, call.dropout, True, *_flash_state(call)),
        **_limits(call),
    )
    return _narrow_gradients(call, (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)))


BANDED_FLASH = Kernel(_banded_forward, _banded_backward)


# The memory-efficient kernel


def _aligned_mask(call: AttentionCall) -> Tensor | None:
    """Return the mask for all samples, heads and queries, with rows aligned in memory for the kernel."""
    bias = call.bias()
    if bias is None:
        return None
    _, keys = call.lengths
    bias = bias.to(call.query.dtype).expand(*bias.shape[:-1], keys)
    # Rows must begin at multiples of 16 bytes. Multiples of 16 elements do for every dtype.
    missing = -keys % 16
    bias = pad(bias, (0, missing))[..., :keys] if missing else bias.contiguous()
    return bias.expand(*call.query.shape[:3], keys)


def _efficient_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    with _seeded_generator(call):
        out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
            *call.operands, _aligned_mask(call), True, call.dropout, call.causal, scale=call.scale
        )
    # The kernel keeps logarithms in rows of multiples of 32.
    return out, logsumexp[..., : call.query.shape[2]]


def _efficient_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    logsumexp = pad(attended.logsumexp, (0, -call.query.shape[2] % 32), value=math.inf)
    wanted = [True, True, True, attended.mask_gradient]
    query, key, value, mask = aten._scaled_dot_product_efficient_attention_backward(
        *(attended.grad_out, *call.operands, _aligned_mask(call), attended.out, logsumexp),
        *(*_random_state(call, "cpu"), call.dropout, wanted, call.causal),
        scale=call.scale,
    )
    if not attended.mask_gradient or call.mask is None:
        return query, key, value, no_gradient(call)
    return query, key, value, mask.sum_to_size(call.mask.shape).to(call.mask.dtype)


EFFICIENT = Kernel(_efficient_forward, _efficient_backward)


# cuDNN's kernel: its logarithms have one more dim


def _full_mask(call: AttentionCall) -> Tensor | None:
    bias = call.bias()
    if bias is None:
        return None
    return bias.to(call.query.dtype).expand(*call.query.shape[:3], call.key.shape[2])


def _cudnn_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    with _seeded_generator(call):
        out, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(
            *call.operands, _full_mask(call), True, call.dropout, call.causal, False, scale=call.scale
        )
    return out, logsumexp.reshape(call.query.shape[:3])


def _cudnn_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        *(attended.grad_out, *call.operands, attended.out, attended.logsumexp.unsqueeze(-1)),
        *(*_random_state(call, call.query.device), _full_mask(call), None, None, *call.lengths),
        *(call.dropout, call.causal),
        scale=call.scale,
    )
    return (*gradients, no_gradient(call))


CUDNN = Kernel(_cudnn_forward, _cudnn_backward)

_GPU_KERNELS = {_FLASH: FLASH, _BANDED: BANDED_FLASH, _EFFICIENT: EFFICIENT, _CUDNN: CUDNN}
_KERNELS = {"cpu": {_FLASH: CPU_FLASH}}
