"""The kernels behind `autoshard::attention`: the device's own one is chosen when the operator runs.

All take and give one form: a result `[b, h, s, e]`, and for each query the natural logarithm of its sum of exponentials
`[b, h, s]`. A kernel's backward needs no more than these and its inputs, so that the forward and the backward half need
not take the same kernel. Where weights are dropped they do: every kernel draws in a way of its own which ones, from the
device's generator, which is seeded for the call, so that the numbers can be drawn again.
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

_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3
"""The numbers of `torch.nn.attention.SDPBackend`."""

_BANDED = -1
"""Flash attention of causal calls whose last query is the last key, and of windows."""


def choose_kernel(call: AttentionCall) -> tuple[Kernel, AttentionCall]:
    """The kernel that `scaled_dot_product_attention` would take on this device, and the call in the form it takes.

    The form may have more key heads than the call.
    """
    kernels = _KERNELS.get(call.query.device.type, _GPU_KERNELS)
    if not call.is_simple:
        if _BANDED in kernels and _choice(replace(call, causal=False, window=0)) == _FLASH:
            return kernels[_BANDED], call
        call = call.with_mask()
    choice = _choice(call)
    if choice in (_MATH, _EFFICIENT):  # these know no groups; asked without them, a kernel may do that holds no scores
        call = call.with_repeated_keys()
        choice = _choice(call)
    return kernels.get(choice, MATH), call


def choose_dropout_kernel(call: AttentionCall) -> int:
    """The kernel that drops weights of a call: its backward has to be the same kernel's, which draws them again."""
    if call.dropout >= 1:
        return _MATH
    call = call.with_repeated_keys()
    if not call.is_simple:
        kernels = _KERNELS.get(call.query.device.type, _GPU_KERNELS)
        if _BANDED in kernels and _choice(replace(call, causal=False, window=0)) == _FLASH:
            return _BANDED
        return _choice(call.with_mask())
    if call.mask is None or call.mask.dtype == torch.bool:
        return _choice(call)
    with _without_cudnn():
        return _choice(call)


def dropout_kernel(call: AttentionCall, number: int) -> tuple[Kernel, AttentionCall]:
    """The kernel of this number, and the call in the form in which it drops weights."""
    call = call.with_repeated_keys()
    kernel = _KERNELS.get(call.query.device.type, _GPU_KERNELS).get(number, MATH)
    return kernel, call if number == _BANDED or call.is_simple else call.with_mask()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Context in which cuDNN's kernel, which gives no gradient of a mask, is not chosen."""
    enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(enabled)


@contextmanager
def _seeded_generator(call: AttentionCall) -> Iterator[None]:
    """Context in which the device's generator has the seed of a call that draws; it is then what it was before."""
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


def _choice(call: AttentionCall) -> int:
    return int(
        aten._fused_sdp_choice(
            call.query,
            call.key,
            call.value,
            call.mask,
            call.dropout,
            call.causal,
            scale=call.scale,
            enable_gqa=call.groups > 1,
        )
    )


# Flash attention for the CPU


def _cpu_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, 0.0, call.causal, attn_mask=call.bias(), scale=call.scale
    )
    return out, logsumexp


def _cpu_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        attended.grad_out,
        call.query,
        call.key,
        call.value,
        attended.out,
        attended.logsumexp,
        0.0,
        call.causal,
        attn_mask=call.bias(),
        scale=call.scale,
    )
    return (*gradients, no_gradient(call))


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward)


# Flash attention of GPUs: heads as wide as multiples of 8, no mask


def _with_wide_heads(call: AttentionCall) -> AttentionCall:
    missing = -call.query.shape[-1] % 8
    query, key, value = (pad(each, (0, missing)) if missing else each for each in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


def _gradients(call: AttentionCall, gradients: tuple[Tensor, Tensor, Tensor]) -> Gradients:
    """Gradients of heads as wide as those of the call."""
    width = call.query.shape[-1]
    query, key, value = (each[..., :width] for each in gradients)
    return query, key, value, no_gradient(call)


def _state(call: AttentionCall, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """What a generator holds that was just seeded, on the device of a call or another: its seed, and how far it is."""
    device = call.query.device if device is None else device
    seed, drawn = (torch.full((), number, dtype=torch.int64, device=device) for number in (call.seed, 0))
    return seed, drawn


def _flash_state(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The same as flash attention keeps it: both in the first tensor."""
    seed, drawn = _state(call)
    return torch.stack((seed, drawn)).view(torch.uint64), drawn


def _flash_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    wide = _with_wide_heads(call)
    with _seeded_generator(call):
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            wide.query, wide.key, wide.value, call.dropout, call.causal, False, scale=call.scale
        )
    return out[..., : call.value.shape[-1]], logsumexp


def _flash_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    wide = _with_wide_heads(call)
    missing = wide.value.shape[-1] - call.value.shape[-1]
    gradients = aten._scaled_dot_product_flash_attention_backward(
        pad(attended.grad_out, (0, missing)),
        wide.query,
        wide.key,
        wide.value,
        pad(attended.out, (0, missing)),
        attended.logsumexp,
        None,
        None,
        call.query.shape[2],
        call.key.shape[2],
        call.dropout,
        call.causal,
        *_flash_state(call),
        scale=call.scale,
    )
    return _gradients(call, gradients)


FLASH = Kernel(_flash_forward, _flash_backward)


# Flash attention of GPUs by its own name: it aligns the last query with the last key, and knows windows


def _limits(call: AttentionCall) -> dict[str, int | float]:
    limits: dict[str, int | float] = {"scale": call.scale}
    return limits | {"window_size_left": call.window - 1, "window_size_right": 0} if call.window else limits


def _banded_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    wide = _with_wide_heads(call)
    operands = (each.transpose(1, 2) for each in (wide.query, wide.key, wide.value))
    lengths = call.query.shape[2], call.key.shape[2]
    with _seeded_generator(call):
        out, logsumexp, *_ = aten._flash_attention_forward(
            *operands, None, None, *lengths, call.dropout, True, False, **_limits(call)
        )
    return out.transpose(1, 2)[..., : call.value.shape[-1]], logsumexp


def _banded_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    wide = _with_wide_heads(call)
    missing = wide.value.shape[-1] - call.value.shape[-1]
    out, grad_out = (pad(each, (0, missing)) for each in (attended.out, attended.grad_out))
    operands = (each.transpose(1, 2) for each in (grad_out, wide.query, wide.key, wide.value, out))
    lengths = call.query.shape[2], call.key.shape[2]
    query, key, value = aten._flash_attention_backward(
        *operands, attended.logsumexp, None, None, *lengths, call.dropout, True, *_flash_state(call), **_limits(call)
    )
    return _gradients(call, (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)))


BANDED_FLASH = Kernel(_banded_forward, _banded_backward)


# The memory-efficient kernel: rows of a mask begin at whole 16 bytes, logarithms lie in rows of 32


def _aligned_mask(call: AttentionCall) -> Tensor | None:
    """The mask for all samples, heads and queries, its rows in memory a multiple of 16 elements apart."""
    bias = call.bias()
    if bias is None:
        return None
    keys = call.key.shape[2]
    bias = bias.to(call.query.dtype).expand(*bias.shape[:-1], keys)
    missing = -keys % 16
    bias = pad(bias, (0, missing))[..., :keys] if missing else bias.contiguous()
    return bias.expand(*call.query.shape[:3], keys)


def _efficient_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    with _seeded_generator(call):
        out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
            call.query, call.key, call.value, _aligned_mask(call), True, call.dropout, call.causal, scale=call.scale
        )
    return out, logsumexp[..., : call.query.shape[2]]


def _efficient_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    logsumexp = pad(attended.logsumexp, (0, -call.query.shape[2] % 32), value=math.inf)
    query, key, value, mask = aten._scaled_dot_product_efficient_attention_backward(
        attended.grad_out,
        call.query,
        call.key,
        call.value,
        _aligned_mask(call),
        attended.out,
        logsumexp,
        *_state(call, "cpu"),
        call.dropout,
        [True, True, True, attended.mask_gradient],
        call.causal,
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
            call.query, call.key, call.value, _full_mask(call), True, call.dropout, call.causal, False, scale=call.scale
        )
    return out, logsumexp.reshape(call.query.shape[:3])


def _cudnn_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        attended.grad_out,
        call.query,
        call.key,
        call.value,
        attended.out,
        attended.logsumexp.unsqueeze(-1),
        *_state(call),
        _full_mask(call),
        None,
        None,
        call.query.shape[2],
        call.key.shape[2],
        call.dropout,
        call.causal,
        scale=call.scale,
    )
    return (*gradients, no_gradient(call))


CUDNN = Kernel(_cudnn_forward, _cudnn_backward)

_GPU_KERNELS = {_FLASH: FLASH, _BANDED: BANDED_FLASH, _EFFICIENT: EFFICIENT, _CUDNN: CUDNN}
_KERNELS = {"cpu": {_FLASH: CPU_FLASH}}
