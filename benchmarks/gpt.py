"""The GPT that the step benchmark times: separate projections, so that every hand-written peer can shard it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention import causal_attention
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int = 4
    width: int = 256
    heads: int = 8
    context: int = 128
    vocabulary: int = 512


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        self.fused = True
        self.query, self.key, self.value, self.out = (nn.Linear(shape.width, shape.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # -1 heads: under `parallelize_module` a rank sees only its own.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = causal_attention(query, key, value, fused=self.fused)
        return self.out(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """`forward(tokens, targets)` returns the mean cross-entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
