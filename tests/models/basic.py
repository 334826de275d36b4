"""An MLP and a GPT, written out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.models.common import BATCH, HIDDEN, SEQUENCE, VOCABULARY, Model, fixed_seed, tokens


class Mlp(nn.Module):
    """Two linear layers and the mean squared error to a target: returns the loss alone."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(functional.gelu(self.up(x)))
        return y if target is None else functional.mse_loss(y, target)


def mlp(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """An MLP with its loss."""
    with fixed_seed(dtype, seed):
        return Mlp(24, 48), {"x": torch.randn(batch, 24), "target": torch.randn(batch, 24)}


class Attention(nn.Module):
    """Causal self-attention with a fused projection of queries, keys and values, cut in three in a chosen way."""

    def __init__(self, hidden: int, heads: int, split: str, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.split = split
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        size = hidden // self.heads
        fused = self.qkv(x)
        if self.split == "view":
            q, k, v = fused.view(batch, sequence, 3, self.heads, size).unbind(2)
        else:
            parts = fused.chunk(3, -1) if self.split == "chunk" else fused.split(hidden, -1)
            q, k, v = (part.reshape(batch, sequence, self.heads, size) for part in parts)
        y = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int, split: str, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, split, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    """A character-level GPT: returns logits, or logits and loss when there are labels."""

    def __init__(self, hidden: int, heads: int, layers: int, split: str, tied: bool, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(SEQUENCE, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, split, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt(
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    batch: int = BATCH,
    sequence: int = SEQUENCE,
    split: str = "view",
    tied: bool = False,
    hidden: int = HIDDEN,
    heads: int = 12,
    layers: int = 2,
    dropout: float = 0.0,
) -> Model:
    """A small GPT; `split` says how the fused projection is cut: "view", "chunk" or "split"."""
    with fixed_seed(dtype, seed):
        module = Gpt(hidden, heads, layers, split, tied, dropout)
        return module, {"input_ids": tokens(batch, sequence), "labels": tokens(batch, sequence)}
