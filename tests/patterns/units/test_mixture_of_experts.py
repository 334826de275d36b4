"""Mixtures of experts end to end: what the planner makes of them, and the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import Shard
from transformers.integrations import moe

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.plans.sharding_plan import ShardingPlan
from tests.patterns.units import gshard
from tests.patterns.units.unit_models import build_seeded, plan_of, worst_error
from tests.training import TOLERANCE


def mixtral(implementation: str, **changed: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Hugging Face Mixtral of one layer with four experts, two for every token."""
    config = _mixtral_config(implementation, **changed)
    module = build_seeded(lambda: transformers.MixtralForCausalLM(config))
    tokens = torch.randint(0, config.vocab_size, (4, 8), generator=torch.Generator().manual_seed(1))
    return module, {"input_ids": tokens, "labels": tokens.clone()}


def _mixtral_config(implementation: str, **changed: Any) -> transformers.MixtralConfig:
    options: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = transformers.MixtralConfig(**options | changed)
    config._experts_implementation = implementation
    return config


def large_mixtral(implementation: str) -> ShardingPlan:
    """The plan of one layer of a size that is worth sharding."""
    config = _mixtral_config(
        implementation,
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3584,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
    )
    with torch.device("meta"):
        module = transformers.MixtralForCausalLM(config).train()
    tokens = torch.zeros(8, 512, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    return autoshard.plan(module, {"tp": 8}, (), inputs, cluster=Cluster.preset("a100"))


def test_weights_of_batched_experts_are_sharded_and_stay_where_they_are() -> None:
    plan = large_mixtral("batched_mm")
    experts = [name for name in plan.placements if ".experts." in name]
    assert len(experts) == 2
    sizes = {name: 4 * torch.Size(plan.shapes[name]).numel() for name in experts}
    for name in experts:
        (placement,) = plan.placements[name]
        assert not placement.is_replicate(), (name, placement)
    moved = [found for found in plan.collectives if "experts" in found.module]
    assert any(found.kind == "reduce_scatter" for found in moved), "partial sums over the split of every expert"
    gathers = [found.bytes for found in moved if found.kind in ("all_gather", "all_to_all")]
    assert max(gathers, default=0) < min(sizes.values()) / 8, "what is exchanged is smaller than a shard of any weight"


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("by_expert", [False, True])
def test_numbers_of_one_device(implementation: str, by_expert: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own kernel has no double precision: one device runs the operator that is captured for it.
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *arguments: False)
    hints = {"*.experts.*": Shard(0)} if by_expert else {}
    assert worst_error(lambda: mixtral(implementation), {"tp": 4}, hints=hints) < TOLERANCE


def test_experts_of_gshard_exchange_tokens() -> None:
    """Tokens lie by group, experts by expert: all-to-all there and back, forward and backward, and nothing else."""
    module, inputs = gshard.large()
    plan = autoshard.plan(module, {"ep": 8}, (), inputs, cluster=Cluster.preset("h100"))
    assert plan.placements["experts.up"] == plan.placements["experts.down"] == (Shard(0),)
    exchanged = {found.phase: (found.kind, found.count) for found in plan.collectives if found.module == "experts"}
    assert exchanged == {"forward": ("all_to_all", 2), "backward": ("all_to_all", 2)}


@pytest.mark.parametrize("mesh", [{"ep": 8}, {"dp": 2, "ep": 4}])
def test_gshard_has_the_numbers_of_one_device(mesh: dict[str, int]) -> None:
    plan = plan_of(gshard.small, mesh)
    assert any(not placement.is_replicate() for placement in plan.placements["experts.up"])
    assert worst_error(gshard.small, mesh) < TOLERANCE
