"""Small models, each with one kind of layer whose numbers must be right on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, WIDTH, VOCABULARY = 4, 12, 32, 64

Inputs = dict[str, Tensor]
Model = tuple[nn.Module, Inputs]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer.

    Attributes:
        queries: number of heads of queries.
        keys: number of heads of keys and values, which divides `queries`.
        causal: True if positions attend to earlier ones alone.
        size: of a head.
    """

    queries: int
    keys: int
    causal: bool
    size: int = 8


class SelfAttention(nn.Module):
    """Self-attention with separate query, key and value projections."""

    def __init__(self, width: int, heads: Heads) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, heads.queries * heads.size)
        # Without a bias of keys, which softmax cancels: its gradient would be rounding alone.
        self.key = nn.Linear(width, heads.keys * heads.size, bias=False)
        self.value = nn.Linear(width, heads.keys * heads.size)
        self.out = nn.Linear(heads.queries * heads.size, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.heads.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        grouped = self.heads.queries != self.heads.keys
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.heads.causal, enable_gqa=grouped
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class AttentionLoss(nn.Module):
    """Attention, and the mean squared error to a target."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.attention = SelfAttention(WIDTH, heads)

    def forward(self, x: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.mse_loss(x + self.attention(x, mask), target)


class TransformerBlock(nn.Module):
    """A pre-norm layer of a transformer."""

    def __init__(self, width: int, heads: Heads) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self, layers: int, width: int, heads: Heads, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Norms(nn.Module):
    """Layer, root-mean-square and group norm, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.LayerNorm(WIDTH)
        self.rms = nn.RMSNorm(WIDTH, eps=1e-5)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.group = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.rms(functional.gelu(self.first(self.layer(x))))
        x = self.group(self.second(x).transpose(1, 2)).transpose(1, 2)
        return functional.mse_loss(x, target)


class Convolutions(nn.Module):
    """Two convolutions with batch norm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        # Batch norm subtracts a bias.
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.relu(self.norm1(self.first(images)))
        x = functional.relu(self.norm2(self.second(x)))
        # In float32 in every dtype, as training has it: a loss of two digits would hide faults.
        return functional.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class Recurrent(nn.Module):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.head(self.lstm(x)[0]), target)


class Experts(nn.Module):
    """Experts whose rows are sorted by expert, multiplied group by group, and put back; choices are inputs."""

    def __init__(self, experts: int, inner: int) -> None:
        super().__init__()
        self.experts = experts
        self.first = nn.Linear(WIDTH, WIDTH)
        # Scaled so that rows keep their size: sums of large numbers would hide small faults.
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * inner) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, WIDTH) / inner**0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        choices = chosen.shape[1]
        # Row k of the sorted rows is choice `order[k]`, which belongs to token `order[k] // choices`.
        ranked, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(ranked.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        gate, up = multiply_groups(x[order // choices], self.up, ranked, ends).chunk(2, -1)
        rows = multiply_groups(functional.silu(gate) * up, self.down, ranked, ends)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        mixed = rows[torch.argsort(order)].view(x.shape[0], choices, -1).sum(1)
        return functional.mse_loss(mixed, target)


def multiply_groups(rows: Tensor, weights: Tensor, groups: Tensor, ends: Tensor) -> Tensor:
    """Multiply every row by the matrix of its group.

    Args:
        rows: `[r, i]`, sorted by group.
        weights: `[g, i, o]`.
        groups: `[r]`, of the rows.
        ends: `[g]`, the row behind the last of each group.
    """
    # The only dtype of torch's kernel.
    if rows.dtype == torch.bfloat16:
        return functional.grouped_mm(rows, weights, offs=ends)
    return (rows.unsqueeze(1) @ weights[groups]).squeeze(1)


def _sequences(width: int = WIDTH, batch: int = BATCH) -> Inputs:
    return {"x": torch.randn(batch, LENGTH, width), "target": torch.randn(batch, LENGTH, width)}


# One sequence, so that the heads are sharded and not the batch.
def causal_attention(ranks: int) -> Model:
    """Causal attention of one sequence, with heads that the ranks divide."""
    return AttentionLoss(Heads(2 * ranks, 2 * ranks, True)), _sequences(batch=1)


def grouped_attention(ranks: int) -> Model:
    """Causal attention with two query heads for every key head."""
    return AttentionLoss(Heads(2 * ranks, ranks, True)), _sequences(batch=1)


def masked_attention(ranks: int) -> Model:
    """Attention with a mask of truth values: the sequences are of different lengths."""
    lengths = torch.tensor([LENGTH, LENGTH - 3, 5, 1])
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1))[:, None, None, :]
    return AttentionLoss(Heads(2 * ranks, 2 * ranks, False)), {**_sequences(), "mask": mask}


def odd_heads(ranks: int) -> Model:
    """Causal attention of one sequence with one head more than there are ranks."""
    return AttentionLoss(Heads(ranks + 1, ranks + 1, True)), _sequences(batch=1)


def norms(ranks: int) -> Model:
    """Norms of three kinds."""
    return Norms(), _sequences()


def convolutions(ranks: int) -> Model:
    """Convolutions whose batch norms need the statistics of the whole batch."""
    return Convolutions(), {"images": torch.randn(2 * ranks, 3, 8, 8), "labels": torch.randint(10, (2 * ranks,))}


def recurrent(ranks: int) -> Model:
    """An LSTM."""
    return Recurrent(), _sequences()


def experts(ranks: int) -> Model:
    """Two experts for each token; every rank has two, and the last gets no token."""
    tokens, number = 8 * ranks, 2 * ranks
    inputs = {
        "x": torch.randn(tokens, WIDTH),
        # The last expert gets no token: a group without rows is where kernels and splits go wrong.
        "chosen": torch.randint(number - 1, (tokens, 2)),
        "weights": torch.rand(tokens, 2),
        "target": torch.randn(tokens, WIDTH),
    }
    return Experts(number, 16), inputs


def gpt(
    ranks: int, *, layers: int = 2, width: int = WIDTH, head: int = 8, batch: int = BATCH, length: int = LENGTH
) -> Model:
    """A GPT with its loss; the ranks need not divide its heads."""
    module = Gpt(layers, width, Heads(width // head, width // head, True, head), length, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (batch, length + 1))
    return module, {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def make_seeded(make: Callable[[int], Model], ranks: int, seed: int = 0) -> Model:
    """Return a model and its inputs, on the CPU in float32, equal on all ranks; the random state stays as it was."""
    # Models are made on the CPU: generators of devices stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(ranks)
