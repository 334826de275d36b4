"""The layers that tensor parallelism splits, by the graph alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.capture.joint import JointGraph, capture
from autoshard.errors import HintError
from autoshard.operators.large_losses import loss_in_pieces
from autoshard.patterns.graph_rules import GraphRules
from autoshard.planner.layouts.tensor_parallel import TensorParallelSearch, glob_names
from autoshard.specs.axes import MeshShape
from tests import models
from tests.models.routed import sorted_experts


@functools.cache
def step(build: Callable[[], models.Model]) -> JointGraph:
    module, inputs = build()
    return capture(module, (), inputs)


def search(build: Callable[[], models.Model], size: int = 2) -> TensorParallelSearch:
    return TensorParallelSearch(GraphRules(step(build), MeshShape.of({"tp": size})), "tp", size)


def weights(*names: str) -> set[str]:
    return {f"{name}.weight" for name in names}


EXPECTED: dict[str, tuple[Callable[[], models.Model], set[str], set[str], set[str]]] = {
    "gpt": (
        models.gpt,
        weights("layers.*.attention.qkv", "layers.*.mlp.*", "head"),
        weights("layers.*.attention.out", "layers.*.mlp.*"),
        weights("tokens"),
    ),
    "bert": (
        models.hf_bert,
        weights(
            *(f"bert.encoder.layer.*.attention.self.{name}" for name in ("query", "key", "value")),
            "bert.encoder.layer.*.intermediate.dense",
            "bert.pooler.dense",
        ),
        weights("bert.encoder.layer.*.attention.output.dense", "bert.encoder.layer.*.output.dense", "classifier"),
        weights("bert.embeddings.word_embeddings"),
    ),
    # Of low-rank queries and keys, the inner dims are normalised: only the outer layers can be split.
    "deepseek_v3": (
        models.ZOO["hf_deepseek_v3"],
        weights(
            "model.layers.*.self_attn.q_b_proj",
            "model.layers.*.self_attn.kv_b_proj",
            *(f"model.layers.*.mlp.{name}" for name in ("gate_proj", "up_proj")),
            *(f"model.layers.*.mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj")),
            "lm_head",
        ),
        weights(
            "model.layers.*.self_attn.o_proj",
            "model.layers.*.mlp.down_proj",
            "model.layers.*.mlp.shared_experts.down_proj",
        ),
        weights("model.embed_tokens"),
    ),
    "mlp": (models.mlp, weights("up"), weights("down"), set()),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_columns_and_rows(name: str) -> None:
    build, columns, rows, embeddings = EXPECTED[name]
    found = search(build).tensor_parallel()
    assert set(glob_names(found.columns)) == columns
    assert set(glob_names(found.rows)) == rows
    assert set(glob_names(found.embeddings)) == embeddings


def test_shards_of_fused_and_tied_weights() -> None:
    shards = search(models.hf_gpt2).tensor_parallel().shards
    # Queries, keys and values are each split by heads; the tied table is split once, by its entries.
    assert shards["transformer.h.0.attn.c_attn.weight"] == (1, 3)
    assert shards["transformer.h.0.attn.c_attn.bias"] == (0, 3)
    assert shards["transformer.h.0.attn.c_proj.weight"] == (0, 1)
    assert shards["transformer.wte.weight"] == (0, 1)
    # Positions, norms and the biases behind sums are whole.
    whole = ("wpe.weight", "ln_f.weight", "h.0.ln_1.bias", "h.0.attn.c_proj.bias", "h.0.mlp.c_proj.bias")
    assert shards.keys().isdisjoint(f"transformer.{name}" for name in whole)


class Chain(nn.Module):
    """Linear layers and nothing else: without norms, every second one can be split by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_layers_of_a_chain_alternate() -> None:
    found = search(lambda: (Chain(), {"x": torch.randn(4, 8)})).tensor_parallel()
    assert set(found.columns) == {"layers.0.weight", "layers.2.weight"}
    assert set(found.rows) == {"layers.1.weight", "layers.3.weight"}


@pytest.mark.parametrize(("model", "size"), [(models.resnet18, 2), (models.mlp, 5)])
def test_models_without_such_layers(model: Callable[[], models.Model], size: int) -> None:
    with pytest.raises(HintError, match="no linear layer feeds another one"):
        search(model, size).tensor_parallel()


def test_experts() -> None:
    assert search(sorted_experts).expert_parallel() == {"up": (0, 1), "down": (0, 1)}
    mixture = search(models.ZOO["gshard"])
    assert mixture.has_experts
    assert mixture.expert_parallel() == {"experts.up": (0, 1), "experts.down": (0, 1)}
    with pytest.raises(HintError, match="tp=3 does not divide the 4 experts"):
        search(models.ZOO["gshard"], 3).expert_parallel()
    dense = search(models.mlp)
    assert not dense.has_experts
    with pytest.raises(HintError, match="no parameter has a matrix for each"):
        dense.expert_parallel()


class LanguageModel(nn.Module):
    """One feed-forward layer between a table and a head, with the loss of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        hidden = hidden + self.down(functional.gelu(self.up(hidden)))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def test_a_head_is_split_whether_or_not_its_loss_is_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = LanguageModel(), {"tokens": torch.zeros(4, 6, dtype=torch.int64)}
    monkeypatch.setattr(loss_in_pieces, "LARGE_LOGITS", 1)
    graphs = [capture(module, (), inputs, devices=devices) for devices in (None, 1)]
    rules = [GraphRules(graph, MeshShape.of({"tp": 2})) for graph in graphs]
    whole, pieces = (TensorParallelSearch(each, "tp", 2).tensor_parallel() for each in rules)
    assert pieces == whole
    assert pieces.shards["head.weight"] == (0, 1)
