"""A language model of words alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models.common import HIDDEN, VOCABULARY, Model, fixed_seed, tokens


class Words(nn.Module):
    """Scores of the next word from a word alone, and their loss: called as a language model, in a tenth of its time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.head = nn.Linear(2 * HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(functional.gelu(self.up(self.tokens(input_ids))))
        if labels is None:
            return logits
        return logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words(seed: int = 0) -> Model:
    with fixed_seed(torch.float64, seed):
        return Words(), {"input_ids": tokens(), "labels": tokens()}
