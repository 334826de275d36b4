"""Models that look up or route: a recommender with embedding bags, a mixture of experts by einsum."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.models.common import BATCH, SEQUENCE, SMALL, VOCABULARY, Model, fixed_seed, tokens


class Recommender(nn.Module):
    """Like DLRM: embedding bags and a bottom MLP, the products of each pair of them, and a top MLP."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, width), nn.ReLU())
        vectors = tables + 1
        self.top = nn.Sequential(nn.Linear(width + vectors * (vectors - 1) // 2, 24), nn.ReLU(), nn.Linear(24, 1))
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        bottom = self.bottom(dense)
        looked_up = [bag(indices) for bag, indices in zip(self.bags, sparse.unbind(1), strict=True)]
        vectors = torch.stack([bottom, *looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = self.pairs
        logits = self.top(torch.cat([bottom, products[:, first, second]], 1)).squeeze(1)
        return {"loss": functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def dlrm(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """A recommender with three tables of 48 rows, four indices to a bag."""
    with fixed_seed(dtype, seed):
        module = Recommender(3, VOCABULARY, 12)
        inputs = {
            "dense": torch.randn(batch, 12),
            "sparse": torch.randint(0, VOCABULARY, (batch, 3, 4)),
            "labels": torch.randint(0, 2, (batch,)).to(dtype),
        }
        return module, inputs


class Experts(nn.Module):
    """GShard's mixture: each token goes to its two best experts, as far as these have room, all by einsum.

    Every sequence is a group: within it, an expert takes `capacity` tokens, first choices before second ones.
    """

    def __init__(self, hidden: int, inner: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts = experts
        self.capacity = capacity
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = self.router(x).softmax(-1)  # [group, token, expert]
        first = functional.one_hot(gates.argmax(-1), self.experts).to(x.dtype)
        second = functional.one_hot((gates * (1 - first)).argmax(-1), self.experts).to(x.dtype)
        balance = (gates.mean(1) * first.mean(1)).sum(-1).mean() * self.experts
        place1 = (first.cumsum(1) - first) * first
        place2 = ((second.cumsum(1) - second) + first.sum(1, keepdim=True)) * second
        combine = self._combine_weights(gates, first, place1) + self._combine_weights(gates, second, place2)
        combine = combine / combine.sum((2, 3), keepdim=True).clamp_min(1e-9)
        dispatch = (combine > 0).to(x.dtype)  # [group, token, expert, place]
        arrived = torch.einsum("gtec,gtd->egcd", dispatch, x)
        inner = functional.relu(torch.einsum("egcd,edf->egcf", arrived, self.up))
        left = torch.einsum("egcf,efd->egcd", inner, self.down)
        return torch.einsum("gtec,egcd->gtd", combine, left), balance

    def _combine_weights(self, gates: torch.Tensor, chosen: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Weight of each token at each place of each expert; none where the expert is full."""
        fits = chosen * (place < self.capacity)
        weight = (gates * fits).sum(-1)
        at = functional.one_hot(place.sum(-1).long().clamp_max(self.capacity - 1), self.capacity).to(gates.dtype)
        return weight[..., None, None] * fits[..., None] * at[..., None, :]


class GShard(nn.Module):
    """A language model of one attention layer and one mixture of experts: returns loss and logits."""

    def __init__(self, hidden: int, heads: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(hidden)
        self.experts = Experts(hidden, 2 * hidden, experts, capacity)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        mixed, balance = self.experts(self.norm2(x))
        logits = self.head(x + mixed)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * balance
        return {"loss": loss, "logits": logits}


def gshard(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """A mixture of 4 experts with room for 4 tokens of each sequence."""
    with fixed_seed(dtype, seed):
        module = GShard(SMALL, 4, 4, SEQUENCE // 3)
        return module, {"input_ids": tokens(batch), "labels": tokens(batch)}
