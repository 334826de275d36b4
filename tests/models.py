"""Small models built from configurations, shared by all tests: each returns a module and its keyword arguments.

Batch 12, sequences of 12, hidden sizes divisible by 2, 3 and 4, two layers; seeded: two calls build the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

BATCH = 12
SEQUENCE = 12
VOCABULARY = 48
HIDDEN = 48

Model = tuple[nn.Module, dict[str, Any]]


@contextlib.contextmanager
def _seeded(dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Build under `dtype` as default and with a fixed seed, leaving the global random state as it was."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _tokens(batch: int = BATCH, sequence: int = SEQUENCE) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, sequence))


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
    with _seeded(dtype, seed):
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
    heads: int = 12,
    layers: int = 2,
    dropout: float = 0.0,
) -> Model:
    """A small GPT; `split` says how the fused projection is cut: "view", "chunk" or "split"."""
    with _seeded(dtype, seed):
        module = Gpt(HIDDEN, heads, layers, split, tied, dropout)
        return module, {"input_ids": _tokens(batch, sequence), "labels": _tokens(batch, sequence)}


def hf_gpt2(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, dropout: float = 0.0) -> Model:
    """Hugging Face GPT-2 language model; its head is tied to its embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return _language_model(transformers.GPT2LMHeadModel, config, dtype, seed, batch)


def hf_llama(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face Llama with 4 query heads over 2 key and value heads."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return _language_model(transformers.LlamaForCausalLM, config, dtype, seed, batch)


def _language_model(build: Callable[[Any], nn.Module], config: Any, dtype: torch.dtype, seed: int, batch: int) -> Model:
    with _seeded(dtype, seed):
        module = build(config)
        tokens = _tokens(batch)
        return module.train(), {"input_ids": tokens, "labels": tokens.clone()}


def hf_bert(
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    batch: int = BATCH,
    task: str = "classification",
    dropout: float = 0.0,
) -> Model:
    """Hugging Face BERT for `task` "classification" (of sequences, 3 classes) or "masked" (language model)."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
        problem_type="single_label_classification",
    )
    with _seeded(dtype, seed):
        if task == "masked":
            module, labels = transformers.BertForMaskedLM(config), _tokens(batch)
        else:
            module, labels = transformers.BertForSequenceClassification(config), torch.randint(0, 3, (batch,))
        mask = torch.ones(batch, SEQUENCE, dtype=torch.long)
        return module.train(), {"input_ids": _tokens(batch), "attention_mask": mask, "labels": labels}


def hf_vit(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """Hugging Face ViT: images of 12 by 12 in patches of 4 by 4, 3 classes."""
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        image_size=12,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        problem_type="single_label_classification",
    )
    with _seeded(dtype, seed):
        module = transformers.ViTForImageClassification(config)
        return module.train(), {"pixel_values": torch.randn(batch, 3, 12, 12), "labels": torch.randint(0, 3, (batch,))}


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet of basic blocks, two to a stage: logits, or a dict of loss and logits when there are labels."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, 3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages = []
        for index, width in enumerate(widths):
            inputs, stride = (widths[index - 1], 2) if index else (width, 1)
            stages.append(nn.Sequential(Residual(inputs, width, stride), Residual(width, width, 1)))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        features = functional.adaptive_avg_pool2d(self.stages(self.stem(pixel_values)), 1).flatten(1)
        logits = self.classifier(features)
        if labels is None:
            return logits
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def resnet18(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, size: int = 32) -> Model:
    """ResNet-18 (eight basic blocks in four stages), narrow, for small images and 12 classes."""
    with _seeded(dtype, seed):
        module = ResNet((12, 12, 24, 24), 12)
        inputs = {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 12, (batch,))}
        return module, inputs


ALL: dict[str, Callable[..., Model]] = {
    "mlp": mlp,
    "gpt": gpt,
    "hf_gpt2": hf_gpt2,
    "hf_llama": hf_llama,
    "hf_bert": hf_bert,
    "hf_vit": hf_vit,
    "resnet18": resnet18,
}
