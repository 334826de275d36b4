"""Losses over a large vocabulary: logits stay sharded from the head to its gradients, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import autoshard
from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.operators.large_losses import loss_in_pieces, loss_operator
from autoshard.planner.module_planner import ModulePlanner
from autoshard.plans.sharding_plan import ShardingPlan
from tests.patterns.units.unit_models import llama, plan_with, worst_error
from tests.training import TOLERANCE

VOCABULARY = 64000
TOKENS = 4 * 512


class Loss(nn.Module):
    """The loss alone, as Hugging Face has it; or over shifted labels with smoothing and a label to ignore."""

    def __init__(self, model: nn.Module, smoothing: float = 0.0, ignored: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.smoothing = smoothing
        self.ignored = ignored

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if self.ignored is None:
            return self.model(input_ids=input_ids, labels=labels).loss
        logits = self.model(input_ids=input_ids).logits.float()
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            ignore_index=self.ignored,
            label_smoothing=self.smoothing,
        )


def large(name: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """One layer under a head of 65 million weights, in bfloat16, on the meta device."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    with torch.device("meta"):
        if name == "gpt2":
            config = transformers.GPT2Config(n_embd=1024, n_layer=1, n_head=16, n_positions=512, **sizes)
            module = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.LlamaConfig(
                hidden_size=1024, intermediate_size=2048, num_hidden_layers=1, num_attention_heads=16, **sizes
            )
            module = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(4, 512, dtype=torch.int64)
    return Loss(module.to(torch.bfloat16).train(), **options), {"input_ids": tokens, "labels": tokens}


def strategies_of_logits(module: nn.Module, inputs: dict[str, Any], plan: ShardingPlan) -> dict[str, str]:
    """Strategy of every operator that makes a tensor as large as the logits (less those of the last token)."""
    chosen = {decision.node: decision.strategy for decision in plan.choices}
    nodes = capture(module, (), inputs).graph.nodes
    shapes = {node.name: getattr(node.meta.get("val"), "shape", torch.Size()) for node in nodes}
    least = (TOKENS - 4) * VOCABULARY
    return {name: chosen[name] for name, shape in shapes.items() if name in chosen and shape.numel() >= least}


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", {}), ("llama", {"smoothing": 0.1, "ignored": 0})],
    ids=["gpt2, tied", "llama, smoothed"],
)
def test_logits_are_never_gathered(name: str, options: dict[str, Any]) -> None:
    module, inputs = large(name, **options)
    plan = autoshard.plan(module, {"tp": 8}, (), inputs, cluster=Cluster.preset("h100"))
    chosen = strategies_of_logits(module, inputs, plan)
    assert len(chosen) > 8, "forward and backward"
    assert {name for name, strategy in chosen.items() if "on tp" not in strategy} == set()
    largest = max(found.bytes for found in plan.collectives)
    assert largest <= TOKENS * 1024 * 4, "hidden states at most, a thirtieth of the logits"


def test_smoothed_loss_with_ignored_labels_is_that_of_one_device() -> None:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        module, inputs = llama()
        inputs["labels"][:, 3:6] = 7
        return Loss(module, smoothing=0.1, ignored=7), inputs

    assert worst_error(build, {"dp": 2, "tp": 2}) < TOLERANCE


def loss_alone() -> tuple[nn.Module, dict[str, Any]]:
    """A Llama whose vocabulary no mesh of the tests divides, with a loss of shifted labels, some of them ignored."""
    module, inputs = llama(vocab_size=50, tie_word_embeddings=True)
    inputs["labels"][:, 3:6] = 7
    return Loss(module, smoothing=0.1, ignored=7), inputs


@pytest.mark.parametrize(("mesh", "factor"), [({"dp": 4}, "dim0.0"), ({"tp": 4}, "v"), ({"dp": 2, "tp": 2}, "v")])
def test_loss_in_pieces_is_that_of_one_device(
    mesh: dict[str, int], factor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_in_pieces, "LARGE_LOGITS", 1)
    monkeypatch.setattr(ModulePlanner, "logits_room", 0.0)
    monkeypatch.setattr(loss_operator, "LEAST_STEP", 8)
    plan = plan_with(loss_alone, mesh, "logit_statistics", factor)
    strategies = [choice.strategy for choice in plan.choices if "logit_statistics" in choice.node]
    assert len(strategies) == 2, "forward and backward"
    assert all(factor in strategy for strategy in strategies)
    assert worst_error(loss_alone, mesh, plan=plan) < TOLERANCE
