"""A mixture of experts that sorts the rows of tokens by expert and multiplies every group by a matrix of its own."""

from __future__ import annotations

from typing import Literal

import torch
import transformers.integrations.moe  # noqa: F401  (registers the product of groups)
from torch import nn
from torch.nn import functional

from tests.models.common import Model, fixed_seed

Inverse = Literal["argsort", "index_put"]


class SortedExperts(nn.Module):
    """As Hugging Face's blocks do, for choices of experts that are given: gather, products, put back, add up.

    Args:
        width, inner: of the tokens, and of the experts' hidden layer.
        experts: their number.
        inverse: how the order of the rows is undone.
    """

    def __init__(self, width: int, inner: int, experts: int, inverse: Inverse = "index_put") -> None:
        super().__init__()
        self.experts = experts
        self.inverse = inverse
        self.first = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))
        self.up = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(experts, 2 * inner))
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x [tokens, width]`, `chosen` and `weights [tokens, choices]`: `[tokens, width]`."""
        x, choices = self.first(x), chosen.shape[1]
        weights = weights * (x * self.gain).sum(-1, keepdim=True).sigmoid()
        ranked, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(ranked.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        rows = x[order // choices]
        multiply = torch.ops.transformers.grouped_mm_fallback
        gate, up = (multiply(rows, self.up.transpose(1, 2), ends) + self.bias[ranked]).chunk(2, -1)
        rows = multiply(functional.silu(gate) * up, self.down.transpose(1, 2), ends)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        return rows[self._inverse_order(order)].view(x.shape[0], choices, -1).sum(1)

    def _inverse_order(self, order: torch.Tensor) -> torch.Tensor:
        if self.inverse == "argsort":
            return torch.argsort(order)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return inverse


ROUTINGS = ("random", "one expert", "none to the first", "first to last")


def choices_of(routing: str, tokens: int, choices: int, experts: int) -> torch.Tensor:
    """Which experts every token chooses, `[tokens, choices]`: skewed as the name says."""
    if routing == "one expert":
        return torch.full((tokens, choices), experts - 2)
    if routing == "first to last":  # sorted already, so that every rank sends to few others
        return (torch.arange(tokens * choices) * experts // (tokens * choices)).view(tokens, choices)
    low = experts // 2 if routing == "none to the first" else 0
    return torch.randint(low, experts, (tokens, choices), generator=torch.Generator().manual_seed(3))


def sorted_experts(
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokens: int = 24,
    experts: int = 12,
    routing: str = "random",
    inverse: Inverse = "index_put",
) -> Model:
    """Twelve experts, two for each token, which are given."""
    with fixed_seed(dtype, seed):
        module = SortedExperts(6, 4, experts, inverse)
        inputs = {
            "x": torch.randn(tokens, 6),
            "chosen": choices_of(routing, tokens, 2, experts),
            "weights": torch.rand(tokens, 2),
        }
        return module, inputs
