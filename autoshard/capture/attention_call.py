"""One call of attention as kernels see it, and the kernel that spells it out in matrix products."""

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
        mask: added to the scores `[b, h, s, t]`, or truth values that keep a score; broadcast to them. A causal call
            has none.
        causal: whether a query attends to no key behind its own, the last query's being the last key.
        window: how many keys a query of a causal call attends to at most, its own last; 0 for all.
        scale: of the scores.
        dropout: the probability with which a weight is dropped.
        seed: of the numbers that say which.
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
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def is_simple(self) -> bool:
        """Whether the causal flag of every kernel means the limit of this call, if it has one."""
        return not self.causal or (self.query.shape[2] == self.key.shape[2] and not self.window)

    def with_mask(self) -> AttentionCall:
        """The same attention, its causal limit and window spelt out in the mask."""
        if not self.causal:
            return self
        queries, keys = self.query.shape[2], self.key.shape[2]
        mask = band(range(keys - queries, keys), range(keys), self.window, self.query.device)
        return replace(self, mask=mask, causal=False, window=0)

    def with_repeated_keys(self) -> AttentionCall:
        """The same attention with a key head for every query head."""
        if self.groups == 1:
            return self
        key, value = (each.repeat_interleave(self.groups, 1) for each in (self.key, self.value))
        return replace(self, key=key, value=value)

    def bias(self) -> Tensor | None:
        """The mask as numbers to add, of the queries' element type."""
        if self.mask is None or self.mask.dtype != torch.bool:
            return self.mask
        hidden = torch.full((), -math.inf, dtype=self.query.dtype, device=self.mask.device)
        return torch.where(self.mask, torch.zeros_like(hidden), hidden)


@dataclass(frozen=True, slots=True)
class AttentionBackwardInputs:
    """What the forward half of a call gave, the gradient of its result, and whether that of the mask is wanted."""

    out: Tensor
    logsumexp: Tensor
    grad_out: Tensor
    mask_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: its forward gives result and logarithms, its backward gradients of query, key, value and mask."""

    forward: Callable[[AttentionCall], tuple[Tensor, Tensor]]
    backward: Callable[[AttentionCall, AttentionBackwardInputs], Gradients]


def band(queries: range, keys: range, window: int, device: torch.device) -> Tensor:
    """Truth values `[s, t]`: whether the query at each position attends to the key at each position."""
    position = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    others = torch.arange(keys.start, keys.stop, device=device)
    kept = others <= position
    return kept & (others > position - window) if window else kept


def drop_unreachable_keys(whole: AttentionCall, start: int) -> tuple[AttentionCall, int]:
    """The call on the keys that its queries reach, and the number of keys before these.

    Args:
        whole: the call on all keys; if it is causal, its first query stands at the position `start` of the keys.
        start: that position.
    """
    if not whole.causal:
        return whole, 0
    queries, keys = whole.query.shape[2], whole.key.shape[2]
    end = start + queries
    first, last = max(0, start - whole.window + 1) if whole.window else 0, min(keys, end)
    first = first if first < last else 0  # else all queries are padding behind the last key
    part = replace(whole, key=whole.key[:, :, first:last], value=whole.value[:, :, first:last])
    if end == last:
        return part, first
    mask = band(range(start, end), range(first, last), whole.window, whole.query.device)
    return replace(part, mask=mask, causal=False, window=0), first


def no_gradient(call: AttentionCall) -> Tensor:
    """What stands for the gradient of a mask that nobody asks for."""
    return call.query.new_empty(0)


def _precise(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _scores(call: AttentionCall) -> Tensor:
    scores = _precise(call.query) @ _precise(call.key).transpose(-2, -1) * call.scale
    if call.mask is None:
        return scores
    return scores.masked_fill(~call.mask, -math.inf) if call.mask.dtype == torch.bool else scores + call.mask


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Softmax of the scores, from their logarithms; a query that attends to nothing has no weights."""
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    return weights.masked_fill((logsumexp == -math.inf).unsqueeze(-1), 0)


def _apply_dropout(call: AttentionCall, *weights: Tensor) -> tuple[Tensor, ...]:
    """Weights, zero where they are dropped and larger where they are kept; of one seed, always the same ones."""
    if not call.dropout:
        return weights
    generator = torch.Generator(call.query.device).manual_seed(call.seed)
    shape = (*call.query.shape[:3], call.key.shape[2])
    drawn = torch.empty(shape, dtype=torch.bool, device=call.query.device)
    kept = drawn.bernoulli_(1 - call.dropout, generator=generator)
    larger = 1 / (1 - call.dropout) if call.dropout < 1 else 0.0
    return tuple(each * kept * larger for each in weights)


def _math_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    scores = _scores(call.with_mask())
    logsumexp = scores.logsumexp(-1)
    (weights,) = _apply_dropout(call, _weights(scores, logsumexp))
    return (weights @ _precise(call.value)).to(call.query.dtype), logsumexp


def _math_backward(call: AttentionCall, attended: AttentionBackwardInputs) -> Gradients:
    call, gradient, dtype = call.with_mask(), _precise(attended.grad_out), call.query.dtype
    weights = _weights(_scores(call), attended.logsumexp)
    inner = (gradient * _precise(attended.out)).sum(-1, keepdim=True)
    kept, of_kept = _apply_dropout(call, weights, gradient @ _precise(call.value).transpose(-2, -1))
    of_scores = weights * (of_kept - inner)
    grad_mask = no_gradient(call)
    if call.mask is not None and call.mask.dtype != torch.bool:
        grad_mask = of_scores.sum_to_size(call.mask.shape).to(call.mask.dtype)
    of_scores = of_scores * call.scale
    grad_query = of_scores @ _precise(call.key)
    grad_key = of_scores.transpose(-2, -1) @ _precise(call.query)
    grad_value = kept.transpose(-2, -1) @ gradient
    return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), grad_mask


MATH = Kernel(_math_forward, _math_backward)
"""Attention spelt out, for keys that no heads share: it holds all scores, and takes every call."""
