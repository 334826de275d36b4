"""Flash and memory-efficient attention, called by name, written out for the CPU, which has neither.

Contracts of the kernels stand as asserts. Flash aligns a causal mask with the last key, the memory-efficient kernel
with the first or the last, as it is told; it keeps rows of logarithms that are padded to whole 32s.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Bounds = Tensor | None


@contextlib.contextmanager
def attention_on_cpu() -> Iterator[None]:
    """While it lasts, the kernels run on the CPU: without dropout."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", flash, "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        library.impl("_efficient_attention_forward", efficient, "CPU")
        library.impl("_efficient_attention_backward", efficient_backward, "CPU")
        yield


def _scores(query: Tensor, key: Tensor, aligned: int | None, bias: Tensor | None, scale: float | None) -> Tensor:
    """Scores `[h, s, t]` of queries `[s, h, d]` and keys `[t, h, d]`.

    Args:
        aligned: how many keys more than its own number the first query sees where the mask is causal; None without.
    """
    scores = torch.einsum("shd,thd->hst", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if aligned is None:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(aligned)
    return scores.masked_fill(~seen, -torch.inf)


def _repeat_heads(value: Tensor, heads: int) -> Tensor:
    return value.repeat_interleave(heads // value.shape[1], 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """The result of one sample `[s, h, e]`, and logarithms of sums of exponentials `[h, s]`."""
    key, value = (_repeat_heads(one, query.shape[1]) for one in (key, value))
    scores = _scores(query, key, *how)
    return torch.einsum("hst,the->she", scores.softmax(-1), value), scores.logsumexp(-1)


def _differentiate(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logarithm: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of one sample's queries, keys, values and scores, from the logarithms that are given."""
    heads, groups = query.shape[1], key.shape[1]
    scale = query.shape[-1] ** -0.5 if how[2] is None else how[2]
    keys, values = _repeat_heads(key, heads), _repeat_heads(value, heads)
    weights = (_scores(query, keys, *how) - logarithm[..., None]).exp()
    inner = torch.einsum("she,she->hs", gradient, result)[..., None]
    scores = weights * (torch.einsum("she,the->hst", gradient, values) - inner)
    of_keys = torch.einsum("hst,shd->thd", scores, query) * scale
    of_values = torch.einsum("hst,she->the", weights, gradient)
    shared = [one.unflatten(1, (groups, -1)).sum(2) for one in (of_keys, of_values)]
    return torch.einsum("hst,thd->shd", scores, keys) * scale, *shared, scores


def _bounds(bounds: Bounds, tensor: Tensor) -> list[slice]:
    assert bounds is not None
    assert bounds.dtype is torch.int32
    assert int(bounds[-1]) <= tensor.shape[0]
    return [slice(start, end) for start, end in pairwise(bounds.tolist())]


def _from_last(query: Tensor, key: Tensor, causal: bool) -> int | None:
    return key.shape[0] - query.shape[0] if causal else None


def _state() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Bounds,
    cum_seq_k: Bounds,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    assert dropout_p == 0
    assert query.shape[-2] % key.shape[-2] == 0, "query heads share key heads evenly"

    def one(*sample: Tensor) -> tuple[Tensor, Tensor]:
        return _attend(*sample, _from_last(*sample[:2], is_causal), None, scale)

    states = (_state(), _state(), query.new_zeros(0))
    if cum_seq_q is None:
        results, logarithms = zip(*map(one, query, key, value), strict=True)
        return torch.stack(results), torch.stack(logarithms), *states
    cuts = list(zip(_bounds(cum_seq_q, query), _bounds(cum_seq_k, key), strict=True))
    assert max_q >= max(q.stop - q.start for q, _ in cuts)
    results, logarithms = zip(*(one(query[q], key[k], value[k]) for q, k in cuts), strict=True)
    return torch.cat(results), torch.cat(logarithms, 1), *states


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Bounds,
    cum_seq_k: Bounds,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    def one(*sample: Tensor) -> tuple[Tensor, ...]:
        return _differentiate(*sample, _from_last(*sample[1:3], is_causal), None, scale)[:3]

    if query.dim() == 4:
        return _stack_results(map(one, grad_out, query, key, value, out, logsumexp))
    cuts = zip(_bounds(cum_seq_q, query), _bounds(cum_seq_k, key), strict=True)
    made = (one(grad_out[q], query[q], key[k], value[k], out[q], logsumexp[:, q]) for q, k in cuts)
    return tuple(map(torch.cat, zip(*made, strict=True)))


def _stack_results(made: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.stack, zip(*made, strict=True)))


def _causal_diagonal(query: Tensor, key: Tensor, kind: int) -> int | None:
    return {0: None, 1: 0, 2: key.shape[0] - query.shape[0]}[kind]


def _pad_rows(rows: Sequence[Tensor], longest: int) -> Tensor:
    """Rows of logarithms `[h, s]` of all samples as the kernel keeps them."""
    length = math.ceil(longest / 32) * 32
    return torch.stack([torch.nn.functional.pad(row, (0, length - row.shape[1]), value=torch.inf) for row in rows])


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    assert dropout_p == 0
    assert query.shape[2] == key.shape[2], "every query head has a key head"
    assert compute_log_sumexp

    def one(q: Tensor, k: Tensor, v: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        return _attend(q, k, v, _causal_diagonal(q, k, custom_mask_type), b, scale)

    if cu_seqlens_q is None:
        biases = [None] * len(query) if bias is None else bias.expand(len(query), -1, -1, -1)
        results, rows = zip(*map(one, query, key, value, biases), strict=True)
        whole, longest = torch.stack(results), query.shape[1]
    else:
        assert bias is None
        assert max_seqlen_q is not None
        cuts = zip(_bounds(cu_seqlens_q, query[0]), _bounds(cu_seqlens_k, key[0]), strict=True)
        results, rows = zip(*(one(query[0, q], key[0, k], value[0, k], None) for q, k in cuts), strict=True)
        whole, longest = torch.cat(results)[None], max_seqlen_q
    return whole, _pad_rows(rows, longest), _state(), _state(), longest, key.shape[1]


def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor,
    philox_offset: Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    def one(g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, row: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
        return _differentiate(g, q, k, v, o, row[:, : q.shape[0]], _causal_diagonal(q, k, custom_mask_type), b, scale)

    if cu_seqlens_q is None:
        biases = [None] * len(query) if bias is None else bias.expand(len(query), -1, -1, -1)
        *made, scores = _stack_results(map(one, grad_out_, query, key, value, out, logsumexp, biases))
        return *made, None if bias is None else scores.sum_to_size(bias.shape)
    cuts = zip(_bounds(cu_seqlens_q, query[0]), _bounds(cu_seqlens_k, key[0]), logsumexp, strict=True)
    made = [one(grad_out_[0, q], query[0, q], key[0, k], value[0, k], out[0, q], row, None)[:3] for q, k, row in cuts]
    return *(torch.cat(one)[None] for one in zip(*made, strict=True)), None
