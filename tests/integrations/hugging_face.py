"""Small models, data and runs of Hugging Face's packages, for one device and for ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 32
LENGTH = 8

LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=False,
)


GPT2 = GPT2Config(
    vocab_size=VOCABULARY,
    n_embd=16,
    n_layer=1,
    n_head=2,
    n_positions=LENGTH,
    attn_pdrop=0.0,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens, of which some are no labels."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
        self.masks = torch.rand((count, LENGTH), generator=generator) < 0.3

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens.masked_fill(self.masks[index], -100)}


def gpt2() -> GPT2LMHeadModel:
    """With tied and fused weights, in float64 throughout."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2).double()
    model.loss_function = loss
    return model


def llama() -> LlamaForCausalLM:
    """In float32, in which its norms and its loss compute in any case."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA)


def loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None, **others: Any) -> Tensor:
    """As that of transformers, in the dtype of the logits: theirs is in float32."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return functional.cross_entropy(logits, labels)
    return functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    """Two rows a batch, two batches a step, and clipping that clips."""
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    return TrainingArguments(**(settings | changes))


def recording(base: type[Trainer]) -> type[Trainer]:
    """A trainer that keeps the loss of every batch, which the base class rounds to float32."""

    class Recording(base):
        def training_step(self, *args: Any, **keywords: Any) -> Tensor:
            loss = super().training_step(*args, **keywords)
            self.losses = [*getattr(self, "losses", []), loss.item()]
            return loss

    return Recording


class Words(nn.Module):
    """Scores of the next word from a word alone; not a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.tokens(input_ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
