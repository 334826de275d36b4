"""cuDNN's attention as torch calls it on CUDA.

Sources, in torch: `aten/src/ATen/native/cudnn/MHA.cpp`, `attention.cu`, `attention_backward.cu` and `sdp_utils.cpp`
(`check_cudnn_tensor_shapes`) below `aten/src/ATen/native/transformers/cuda`; `_meta_registrations.py` for layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.arithmetic import Dropout, Scores, backward, causal_from_first, forward
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

LARGEST_HEAD = 128  # 256 on some devices with later versions
MOST = 65535  # samples, heads


@dataclass(frozen=True, slots=True)
class Cudnn:
    """The kernel, for 16-bit types alone unless `any_type`."""

    any_type: bool = False

    def scaled_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """`_scaled_dot_product_cudnn_attention` of tensors `[b, h, s, d]`: causal masks begin with the first key.

        The statistics are `[b, h, s, 1]`. A query that sees no key has NaN for a result: nothing is promised of it.
        """
        self._check(query, key, value, attn_bias, dropout_p)
        state = draw_state(dropout_p)
        scores = Scores(scale, _four_dims(attn_bias, query, key), _hidden_mask(query, key, is_causal))
        result, statistics = forward(query, key, value, scores, Dropout(dropout_p, state.number), -math.inf)
        kept = statistics.unsqueeze(-1) if compute_log_sumexp else None
        drawn = (torch.tensor(state.seed), torch.tensor(state.offset), None)
        return _laid_like(result, query), kept, None, None, query.shape[2], key.shape[2], *drawn

    def scaled_attention_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor | None,
        philox_offset: Tensor | None,
        attn_bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        """`_scaled_dot_product_cudnn_attention_backward`; a bias gets no gradient."""
        assert cum_seq_q is None, "the reference takes no packed sequences"
        assert cum_seq_k is None, "the reference takes no packed sequences"
        self._check(query, key, value, attn_bias, dropout_p)
        check_types("cudnn", HALVES, self.any_type, query, grad_out, out)
        assert out.shape == grad_out.shape == (*query.shape[:3], value.shape[3]), "cudnn: results of other shapes"
        sizes = (query.shape[2], key.shape[2])
        check_counts("cudnn", (max_q, max_k), sizes)
        statistics = check_statistics("cudnn", logsumexp, (*query.shape[:3], 1)).squeeze(-1)
        dropout = Dropout(dropout_p, state_of("cudnn", dropout_p, philox_seed, philox_offset).number)
        scores = Scores(scale, _four_dims(attn_bias, query, key), _hidden_mask(query, key, is_causal))
        made = backward(grad_out, query, key, value, out, statistics, scores, dropout)
        return tuple(written_like(x, like) for x, like in zip(made, (query, key, value), strict=False))

    def _check(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> None:
        check_types("cudnn", HALVES, self.any_type, *(x for x in (query, key, value, bias) if x is not None))
        check_shapes("cudnn", query, key, value, grouped=True)
        check_last_stride("cudnn", query, key, value)
        for head in (query.shape[3], value.shape[3]):
            assert head % 8 == 0, f"cudnn: head size {head} is no multiple of 8"
            assert head <= LARGEST_HEAD, f"cudnn: head size {head} is over {LARGEST_HEAD}"
        assert max(query.shape[:2]) <= MOST, f"cudnn: more than {MOST} samples or heads"
        assert key.shape[2] != 1, "cudnn: a single key"
        assert not (dropout and query.shape[2] == 1), "cudnn: dropout with a single query"
        assert dropout * 16 == int(dropout * 16), f"cudnn: dropout {dropout} is no multiple of 1/16"


def _four_dims(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A bias `[s, t]` or `[1, s, t]` holds for all samples and heads."""
    if bias is None:
        return None
    assert bias.dim() in (2, 3, 4), f"cudnn: a bias of {bias.dim()} dims"
    heads = bias.shape[1] if bias.dim() == 4 else 1
    return bias.expand(query.shape[0], heads, query.shape[2], key.shape[2])


def _hidden_mask(query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    return causal_from_first(query.shape[2], key.shape[2]) if causal else None


def _laid_like(result: Tensor, query: Tensor) -> Tensor:
    """The result with its dims in memory in the order of the query's, though its heads may have another size."""
    if result.shape == query.shape:
        return written_like(result, query)
    order = sorted(range(4), key=query.stride, reverse=True)
    return torch.empty_permuted(result.shape, order, dtype=query.dtype).copy_(result)
