"""One call of attention in the form that kernels take, and the kernel that computes it by matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call on the keys that its queries can attend to.

    Attributes:
        query: `[b, h, s, d]`.
        key: `[b, g, t, d]`, where `g` divides `h`.
        value: `[b, g, t, e]`.
        mask: added to the scores `[b, h, s, t]`, or truth values that keep a score; broadcast to them. None in a
            causal call.
        causal: a query attends to no key behind its own; the last query's own key is the last key.
        window: number of keys that a query of a causal call attends to at most, its own the last; 0 for all.
        scale: of the scores.
        dropout: the probability with which a weight is dropped.
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
        """True if the causal flag of every kernel means the limit of this call, or the call has no limit."""
        # With unequal lengths some kernels align the first query with the first key, others the last with the last.
        queries, keys = self.lengths
        return not self.causal or (queries == keys and not self.window)

    def with_mask(self) -> AttentionCall:
        """Return the same attention, its causal limit and window written into the mask."""
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
    """The results of the forward half of a call, the gradient of its output, and a flag: the mask's gradient is wanted.

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
    """Return truth values `[s, t]`: the query at a position attends to the key at a position."""
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
    # Queries that are all padding behind the last key reach none; their call has the first keys, not an empty range.
    first = first if first < last else 0
    part = replace(whole, key=whole.key[:, :, first:last], value=whole.value[:, :, first:last])
    if end == last:
        return part, first
    # Some queries stand behind the last key: the last query's own key is not the last one, as `causal` would mean.
    mask = band(range(start, end), range(first, last), whole.window, whole.query.device)
    return replace(part, mask=mask, causal=False, window=0), first


def no_gradient(call: AttentionCall) -> Tensor:
    """Return the empty tensor in the place of the mask's gradient where it is not wanted."""
    return call.query.new_empty(0)


def _precise(value: Tensor) -> Tensor:
    """Return 16-bit floats as float32, in which kernels add up, too."""
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
    """Return weights, zero where they are dropped and scaled up where they are kept; the seed decides which."""
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
    grad_scores = grad_scores * call.scale  # the mask is added behind the scale
    grad_query = grad_scores @ _precise(call.key)
    grad_key = grad_scores.transpose(-2, -1) @ _precise(call.query)
    grad_value = kept_weights.transpose(-2, -1) @ gradient
    return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), grad_mask


MATH = Kernel(_math_forward, _math_backward)
"""Attention by matrix products, for keys that no heads share. It holds all scores in memory, and takes every call."""
