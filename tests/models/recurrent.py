"""Recurrent networks, written out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.models.common import BATCH, SMALL, VOCABULARY, Model, fixed_seed, tokens

STEPS = 6  # tokens to a sequence: every one is a step of the recurrence, and so a copy of the cell in the graph


class LstmLanguageModel(nn.Module):
    """An LSTM of two layers that predicts the next token: returns loss and logits."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        states, _ = self.lstm(self.tokens(input_ids))
        logits = self.head(states)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def lstm(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """A language model of two LSTM layers."""
    with fixed_seed(dtype, seed):
        return LstmLanguageModel(SMALL), {"input_ids": tokens(batch, STEPS), "labels": tokens(batch, STEPS)}


class Translator(nn.Module):
    """Like GNMT: a bidirectional and a plain LSTM read, another writes, attending to what was read at each token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, hidden)
        self.target = nn.Embedding(VOCABULARY, hidden)
        self.reader = nn.LSTM(hidden, hidden // 2, batch_first=True, bidirectional=True)
        self.encoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.mixed = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        read, _ = self.reader(self.source(input_ids))
        read = read + self.encoder(read)[0]
        written, _ = self.decoder(self.target(decoder_input_ids))
        scores = self.score(torch.tanh(self.query(written)[:, :, None] + self.key(read)[:, None])).squeeze(-1)
        context = scores.softmax(-1) @ read
        logits = self.head(self.mixed(torch.cat([written, context], -1))[0])
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def gnmt(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """A translator of LSTMs with additive attention."""
    with fixed_seed(dtype, seed):
        inputs = {name: tokens(batch, STEPS) for name in ("input_ids", "decoder_input_ids", "labels")}
        return Translator(SMALL), inputs
