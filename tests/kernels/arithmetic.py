"""The arithmetic that all fused attention kernels share: forward, and backward from what forward kept.

Shapes: queries `[b, h, s, d]`, keys `[b, g, t, d]`, values `[b, g, t, e]`, where `g` divides `h`; the statistics, one
logarithm of a sum of exponentials per query, `[b, h, s]`. Numbers of 16 bits are computed with in float32, as kernels
do; float64 stays what it is.

Source: Dao et al., "FlashAttention", algorithms 1 and 4, without the tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made of products.

    Attributes:
        scale: factor of the products; one over the square root of the head size if None.
        bias: added, broadcast to `[b, h, s, t]`.
        hidden: `[s, t]`, true where a query may not see a key.
    """

    scale: float | None = None
    bias: Tensor | None = None
    hidden: Tensor | None = None

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores `[b, h, s, t]` of queries and as many heads of keys."""
        scores = query @ key.transpose(-2, -1) * self.factor(query)
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        return scores if self.hidden is None else scores.masked_fill(self.hidden, -math.inf)

    def factor(self, query: Tensor) -> float:
        """The scale in use."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class Dropout:
    """Weights that are dropped, drawn anew from the same seed in backward.

    Attributes:
        probability: of a weight to be dropped.
        seed: of the draw; two calls with the same seed and shape drop the same weights.
    """

    probability: float = 0.0
    seed: int = 0

    def of(self, weights: Tensor) -> Tensor:
        """The weights, zero where they are dropped and scaled up where they are kept."""
        if not self.probability:
            return weights
        generator = torch.Generator().manual_seed(self.seed)
        kept = torch.rand(weights.shape, generator=generator) >= self.probability
        return weights * kept / (1.0 - self.probability)


def forward(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, dropout: Dropout, statistic_of_hidden_row: float
) -> tuple[Tensor, Tensor]:
    """Results `[b, h, s, e]` and statistics `[b, h, s]`.

    Args:
        query: queries.
        key: keys.
        value: values.
        scores: mask, bias and scale.
        dropout: of the weights.
        statistic_of_hidden_row: statistic of a query that sees no key. Its result is zero, unless this is minus
            infinity, the plain logarithm of an empty sum, which makes the result NaN.
    """
    query, key, value = (wide(tensor) for tensor in (query, *repeat_groups(query, key, value)))
    products = scores.of(query, key)
    statistics = products.logsumexp(-1)
    statistics = statistics.masked_fill((products == -math.inf).all(-1), statistic_of_hidden_row)
    weights = (products - statistics.unsqueeze(-1)).exp()
    return dropout.of(weights) @ value, statistics


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    statistics: Tensor,
    scores: Scores,
    dropout: Dropout,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values, and of the scores `[b, h, s, t]`, which are those of a bias of that shape.

    Weights come from the statistics alone: those of more keys than are given make parts of weights, as in a ring.
    """
    groups = key.shape[1]
    keys, values = repeat_groups(query, key, value)
    gradient, query, key, value, result = (wide(tensor) for tensor in (gradient, query, keys, values, result))
    weights = (scores.of(query, key) - wide(statistics).unsqueeze(-1)).exp()
    inner = (gradient * result).sum(-1, keepdim=True)
    of_weights = dropout.of(gradient @ value.transpose(-2, -1))
    of_scores = weights * (of_weights - inner)
    scale = scores.factor(query)
    of_key = scale * of_scores.transpose(-2, -1) @ query
    of_value = dropout.of(weights).transpose(-2, -1) @ gradient
    return scale * of_scores @ key, sum_groups(of_key, groups), sum_groups(of_value, groups), of_scores


def wide(tensor: Tensor) -> Tensor:
    """In the type that is computed in: float64 or float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def repeat_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as queries, each repeated for the neighbouring query heads that share it."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def sum_groups(gradient: Tensor, groups: int) -> Tensor:
    """Gradients of repeated heads, added up to those of the heads that were repeated."""
    return gradient.unflatten(1, (groups, -1)).sum(2)


def causal_from_first(queries: int, keys: int) -> Tensor:
    """Keys that are hidden where query 0 sees key 0 alone: `[queries, keys]`."""
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


def outside_window(queries: int, keys: int, left: int, right: int) -> Tensor | None:
    """Keys that are hidden where the last query is level with the last key; None where none is.

    Args:
        queries: how many.
        keys: how many.
        left: keys before its own that a query sees; all of them if negative.
        right: keys behind its own that a query sees; all of them if negative.
    """
    if left < 0 and right < 0:
        return None
    distance = torch.arange(keys) - (torch.arange(queries).unsqueeze(1) + keys - queries)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden
