"""Memory-efficient attention of CUTLASS as torch calls it on CUDA.

Sources, in torch: `attention.cu`, `attention_backward.cu`, `mem_eff_attention/kernel_forward.h` and
`kernel_backward.h` (`check_supported`), `sdp_utils.cpp` below `aten/src/ATen/native/transformers/cuda`;
`_meta_registrations.py` for layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.arithmetic import Dropout, Scores, backward, causal_from_first, forward
from tests.kernels.contracts import HALVES, check_last_stride, check_shapes, check_types, draw_state, state_of

ROWS = 32  # of which the statistics hold a multiple
BIAS_COLUMNS = 16  # of which a row of a bias' gradient takes a multiple of elements in memory


@dataclass(frozen=True, slots=True)
class Efficient:
    """The kernel, for types up to 32 bits unless `any_type`."""

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
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        """`_scaled_dot_product_efficient_attention` of tensors `[b, h, s, d]`: causal masks begin with the first key.

        The statistics are `[b, h, l]`, where `l` is the number of queries rounded up to a multiple of 32, and infinite
        behind the last query; without `compute_log_sumexp`, `l` is zero. That of a query that sees no key is zero, and
        so is its result. Seed and offset are tensors of no dims.
        """
        self._check(query, key, value, attn_bias)
        state = draw_state(dropout_p)
        scores = Scores(scale, attn_bias, _hidden_mask(query, key, is_causal))
        result, statistics = forward(query, key, value, scores, Dropout(dropout_p, state.number), 0.0)
        rows = _rows(query.shape[2]) if compute_log_sumexp else 0
        kept = statistics.new_full((*statistics.shape[:2], rows), math.inf)
        if compute_log_sumexp:
            kept[..., : query.shape[2]] = statistics
        return _by_position(result, query.dtype), kept, torch.tensor(state.seed), torch.tensor(state.offset)

    def scaled_attention_backward(
        self,
        grad_out_: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor | None,
        philox_offset: Tensor | None,
        dropout_p: float,
        grad_input_mask: Sequence[bool],
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor | None, ...]:
        """`_scaled_dot_product_efficient_attention_backward` of tensors `[b, h, s, d]`.

        Raises:
            AssertionError: an operand is not what the kernel takes. Statistics must be padded as forward pads them:
                the kernel loads whole blocks of rows, and only infinite ones do no harm.
        """
        self._check(query, key, value, attn_bias)
        check_types("efficient", (*HALVES, torch.float32), self.any_type, query, grad_out_, out)
        assert out.shape == grad_out_.shape == (*query.shape[:3], value.shape[3]), "efficient: results of other shapes"
        self._check_statistics(logsumexp, query)
        assert attn_bias is not None or not grad_input_mask[3], "efficient: gradient of a bias that is not there"
        dropout = Dropout(dropout_p, state_of("efficient", dropout_p, philox_seed, philox_offset).number)
        scores = Scores(scale, attn_bias, _hidden_mask(query, key, is_causal))
        statistics = logsumexp[..., : query.shape[2]]
        *made, of_scores = backward(grad_out_, query, key, value, out, statistics, scores, dropout)
        of_bias = None
        if attn_bias is not None and grad_input_mask[3]:
            columns = -(-attn_bias.shape[3] // BIAS_COLUMNS) * BIAS_COLUMNS
            of_bias = attn_bias.new_empty(*attn_bias.shape[:3], columns)[..., : attn_bias.shape[3]].copy_(of_scores)
        return *(_by_position(gradient, query.dtype) for gradient in made), of_bias

    def _check(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
        check_types("efficient", (*HALVES, torch.float32), self.any_type, query, key, value)
        check_shapes("efficient", query, key, value, grouped=False)
        check_last_stride("efficient", query, key, value)
        # 16 bytes; a wider type stands for one of 16 bits.
        elements = 4 if query.dtype == torch.float32 else 8
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            _check_alignment(name, tensor, elements)
        if bias is not None:
            self._check_bias(bias, query, key, elements)

    def _check_bias(self, bias: Tensor, query: Tensor, key: Tensor, elements: int) -> None:
        assert bias.dtype == query.dtype, f"efficient: bias of {bias.dtype}, queries of {query.dtype}"
        shape = (*query.shape[:3], key.shape[2])
        assert bias.shape == shape, f"efficient: bias is {list(bias.shape)}, not expanded to {list(shape)}"
        check_last_stride("efficient", bias)
        strides = [stride for size, stride in zip(bias.shape[:3], bias.stride()[:3], strict=True) if size > 1]
        offset = bias.storage_offset()
        for number in (*strides, offset):
            assert number % elements == 0, f"efficient: bias with strides {bias.stride()} at {offset} is not aligned"

    @staticmethod
    def _check_statistics(statistics: Tensor, query: Tensor) -> None:
        queries = query.shape[2]
        shape = (*query.shape[:2], _rows(queries))
        assert tuple(statistics.shape) == shape, f"efficient: logsumexp is {list(statistics.shape)}, not {list(shape)}"
        strides = [stride for size, stride in zip(shape[:2], statistics.stride(), strict=False) if size > 1]
        assert all(stride % 8 == 0 for stride in strides), "LSE is not correctly aligned"
        assert bool((statistics[..., queries:] == math.inf).all()), "efficient: logsumexp behind the last query"


def _check_alignment(name: str, tensor: Tensor, elements: int) -> None:
    """Of `[b, h, s, d]`: head size, rows, heads where there are several, and the first element."""
    numbers = [tensor.shape[3], tensor.stride(2), tensor.storage_offset()]
    numbers += [tensor.stride(1)] if tensor.shape[1] > 1 else []
    aligned = all(number % elements == 0 for number in numbers)
    assert aligned, f"efficient: {name} {list(tensor.shape)} with strides {tensor.stride()} is not aligned"


def _rows(queries: int) -> int:
    return -(-queries // ROWS) * ROWS


def _hidden_mask(query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    return causal_from_first(query.shape[2], key.shape[2]) if causal else None


def _by_position(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`[b, h, s, d]` as it lies in memory: `[b, s, h, d]`."""
    return tensor.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
