"""The kernels behind `autoshard::attention`: the device's own kernel is chosen when the operator runs.

All kernels take and return one form: an output `[b, h, s, e]`, and for each query the natural logarithm of its sum of
exponentials `[b, h, s]`. Backward needs no more than these and the inputs, so that the two halves need not run the same
kernel. With dropout they must: each kernel draws dropped weights in its own way from the device's generator, which is
seeded for the call, so that backward draws them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.functional import pad

from autoshard.capture.attention_call import (
    MATH,
    AttentionBackwardInputs,
    AttentionCall,
    Gradients,
    Kernel,
    no_gradient,
)

aten = torch.ops.aten

# The numbers of `torch.nn.attention.SDPBackend`.
_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3

# Flash attention of causal calls whose last query is the last key, and of windows. It is no backend of torch's own.
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
    # These kernels know no groups. With repeated keys, a kernel that holds no scores may take the call.
    if choice in (_MATH, _EFFICIENT):
        call = call.with_repeated_keys()
        choice = _choice(call)
    return _kernels(call).get(choice, MATH), call


def choose_dropout_kernel(call: AttentionCall) -> int:
    """Return the number of the kernel for a call that drops weights.

    Backward must run the same kernel, which draws the weights again.
    """
    # Fused kernels scale kept weights by 1 / (1 - dropout).
    if call.dropout >= 1:
        return _MATH
    call = call.with_repeated_keys()
    if not call.is_simple:
        return _BANDED if _takes_bands(call) else _choice(call.with_mask())
    if call.mask is None or call.mask.dtype == torch.bool:
        return _choice(call)
    # cuDNN's kernel gives no gradient of a mask, which backward may be asked for.
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
    # torch's choice knows neither limit. It is asked about the shapes, dtype and device alone.
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
    # Zeros add nothing to scores, and columns of zeros to no result. The call's own scale stays.
    missing = -call.query.shape[-1] % 8
    query, key, value = (pad(each, (0, missing)) if missing else each for each in call.operands)
    return replace(call, query=query, key=key, value=value)


def _wide_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> tuple[AttentionCall, Tensor, Tensor]:
    """Return the call with wide heads, its gradient and its result."""
    wide = _with_wide_heads(call)
    missing = wide.value.shape[-1] - call.value.shape[-1]
    return wide, pad(attended.grad_out, (0, missing)), pad(attended.out, (0, missing))


def _narrow_gradients(call: AttentionCall, gradients: tuple[Tensor, Tensor, Tensor]) -> Gradients:
    """Return gradients of heads as wide as those of the call."""
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


# Flash attention of GPUs by its own operator: it aligns the last query with the last key, and knows windows


def _limits(call: AttentionCall) -> dict[str, int | float]:
    limits: dict[str, int | float] = {"scale": call.scale}
    # torch counts the keys before a query's own, `window` counts that one, too.
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
    """Return the mask for all samples, heads and queries, in rows whose starts in memory the kernel takes."""
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
