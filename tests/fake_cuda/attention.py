"""Scaled dot-product attention on a fake GPU: the kernel that a GPU would take, chosen as a GPU chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from tests.kernels.choice import CUDNN, EFFICIENT, FLASH, Choice

aten = torch.ops.aten


@contextmanager
def prefer_kernels(order: Sequence[SDPBackend]) -> Iterator[None]:
    """While active, calls on fake CUDA tensors take the first of these kernels that the GPU would take for them.

    Without it, a torch that was built without CUDA takes the one that is written out, whatever the call.
    """
    choose = Choice(tuple(order))

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
    ) -> Tensor:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        kernel = SDPBackend(choose(query, key, value, attn_mask, dropout_p, is_causal, **options))
        if kernel is FLASH:
            padded = [torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % 8)) for tensor in (query, key, value)]
            result = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
            return result[..., : value.shape[-1]]
        mask = _additive_mask(attn_mask, query)
        if kernel is CUDNN:
            operands = (query, key, value, mask, True, dropout_p, is_causal)
            return aten._scaled_dot_product_cudnn_attention(*operands, scale=scale)[0]
        if kernel is EFFICIENT:
            times = query.shape[1] // key.shape[1]
            keys, values = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
            mask = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
            operands = (query, keys, values, mask, True, dropout_p, is_causal)
            return aten._scaled_dot_product_efficient_attention(*operands, scale=scale)[0]
        return aten._scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, **options)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
        yield


def _additive_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as kernels take it: numbers to be added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
