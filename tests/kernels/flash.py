"""FlashAttention 2 as torch calls it on CUDA.

Sources, in torch: `flash_api.cpp` (`mha_fwd`, `mha_bwd`), `attention.cu` and `attention_backward.cu` below
`aten/src/ATen/native/transformers/cuda`, `_meta_registrations.py` for layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.arithmetic import Dropout, Scores, backward, forward, outside_window
from tests.kernels.contracts import (
    HALVES,
    check_counts,
    check_last_stride,
    check_shapes,
    check_statistics,
    check_types,
    draw_state,
    state_of,
    written_like,
)

LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Flash:
    """The kernel, for 16-bit types alone unless `any_type`."""

    any_type: bool = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **unused: Any,
    ) -> tuple[Tensor, ...]:
        """`_flash_attention_forward` of tensors `[b, s, h, d]`: causal masks and windows end level with the last key.

        The random state is two numbers, seed and offset; the next result means nothing any more, and the debug mask
        is empty. The statistic of a query that sees no key is infinite, its result zero.
        """
        assert all(option is None for option in unused.values()), f"the reference takes no {sorted(unused)}"
        self._check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        assert not return_debug_mask, "flash: the reference makes no debug mask"
        hidden = _hidden_mask(query, key, is_causal, window_size_left, window_size_right)
        state = draw_state(dropout_p)
        operands = (tensor.transpose(1, 2) for tensor in (query, key, value))
        result, statistics = forward(*operands, Scores(scale, None, hidden), Dropout(dropout_p, state.number), math.inf)
        kept = torch.tensor([state.seed, state.offset], dtype=torch.uint64)
        unused_state = torch.zeros((), dtype=torch.uint64)
        return written_like(result.transpose(1, 2), query), statistics, kept, unused_state, query.new_empty(0)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor | None,
        unused: Tensor | None,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:
        """`_flash_attention_backward` of tensors `[b, s, h, d]`."""
        self._check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        check_types("flash", HALVES, self.any_type, query, grad_out, out)
        assert out.shape == grad_out.shape == query.shape, "flash: results and their gradients have other shapes"
        statistics = check_statistics("flash", logsumexp, (query.shape[0], query.shape[2], query.shape[1]))
        hidden = _hidden_mask(query, key, is_causal, window_size_left, window_size_right)
        dropout = Dropout(dropout_p, state_of("flash", dropout_p, rng_state, dtype=torch.uint64).number)
        operands = (tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out))
        made = backward(*operands, statistics, Scores(scale, None, hidden), dropout)
        return tuple(written_like(x.transpose(1, 2), like) for x, like in zip(made, (query, key, value), strict=False))

    def scaled_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """`_scaled_dot_product_flash_attention` of tensors `[b, h, s, d]`."""
        _check_square(query, key, is_causal)
        turned = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        sizes = (query.shape[2], key.shape[2])
        made = self.forward(*turned, None, None, *sizes, dropout_p, is_causal, return_debug_mask, scale=scale)
        return made[0].transpose(1, 2), made[1], None, None, *sizes, *made[2:]

    def scaled_attention_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor | None,
        philox_offset: Tensor | None,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        """`_scaled_dot_product_flash_attention_backward` of tensors `[b, h, s, d]`."""
        _check_square(query, key, is_causal)
        turned = [tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out)]
        kept = (logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
        return tuple(gradient.transpose(1, 2) for gradient in self.backward(*turned, *kept, scale=scale))

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
    ) -> None:
        assert cum_seq_q is None, "the reference takes no packed sequences"
        assert cum_seq_k is None, "the reference takes no packed sequences"
        check_types("flash", HALVES, self.any_type, query, key, value)
        check_shapes("flash", *(tensor.transpose(1, 2) for tensor in (query, key, value)), grouped=True)
        check_last_stride("flash", query, key, value)
        head = query.shape[3]
        assert head == value.shape[3], f"flash: values have head size {value.shape[3]}, keys {head}"
        assert head % 8 == 0, f"flash: head size {head} is no multiple of 8"
        assert head <= LARGEST_HEAD, f"flash: head size {head} is over {LARGEST_HEAD}"
        sizes = (query.shape[1], key.shape[1])
        check_counts("flash", (max_q, max_k), sizes)


def _check_square(query: Tensor, key: Tensor, causal: bool) -> None:
    # The kernel would align the mask with the last key, and torch's `is_causal` means the first.
    sizes = (query.shape[2], key.shape[2])
    assert not causal or sizes[0] == sizes[1], f"flash: is_causal with {sizes[0]} queries and {sizes[1]} keys"


def _hidden_mask(query: Tensor, key: Tensor, causal: bool, left: int | None, right: int | None) -> Tensor | None:
    before = -1 if left is None else left
    behind = 0 if causal else -1 if right is None else right
    return outside_window(query.shape[1], key.shape[1], before, behind)
