"""Plans of Hugging Face's mixtures of experts at real width: tokens go to the ranks of their experts, and come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import Shard

from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.planner.planning_problem import Constraints
from autoshard.plans.plan_data import Collective
from autoshard.plans.sharding_plan import ShardingPlan
from benchmarks import architectures
from benchmarks.architectures import Example
from tests.planner.steps import planner_of

BATCH, SEQUENCE = 8, 4096
BFLOAT16 = 2


def mixtral() -> Example:
    """One layer of Mixtral-8x7B: 8 experts, 2 for every token."""
    return architectures.mixtral_8x7b(layers=1, batch=BATCH, sequence=SEQUENCE)


def qwen3_moe() -> Example:
    """One layer of Qwen3-30B-A3B, with a smaller vocabulary: 128 experts, 8 for every token, and a balancing loss."""
    config = transformers.Qwen3MoeConfig(
        **_sizes(width=2048),
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        output_router_logits=True,
    )
    return _model(transformers.Qwen3MoeForCausalLM, config)


def deepseek_v3() -> Example:
    """DeepSeek-V3's block, narrower: 64 experts in 8 groups, 8 for every token, beside a shared one."""
    config = transformers.DeepseekV3Config(
        **_sizes(width=2048),
        num_attention_heads=16,
        num_key_value_heads=16,
        moe_intermediate_size=1024,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=0,
        q_lora_rank=512,
        kv_lora_rank=256,
    )
    return _model(transformers.DeepseekV3ForCausalLM, config)


def gpt_oss() -> Example:
    """One layer of GPT-OSS-20B, with a smaller vocabulary: 32 experts with biases, 4 for every token."""
    config = transformers.GptOssConfig(
        **_sizes(width=2880) | {"intermediate_size": 2880},
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    )
    return _model(transformers.GptOssForCausalLM, config)


def _sizes(width: int) -> dict[str, Any]:
    return {
        "vocab_size": 32000,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 1,
        "max_position_embeddings": SEQUENCE,
        "use_cache": False,
    }


def _model(build: Callable[[Any], torch.nn.Module], config: Any) -> Example:
    with torch.device("meta"):
        tokens = torch.empty(BATCH, SEQUENCE, dtype=torch.long)
        return build(config).to(torch.bfloat16).train(), {"input_ids": tokens, "labels": tokens.clone()}


ROWS = {mixtral: (2, 4096), qwen3_moe: (8, 2048), deepseek_v3: (8, 2048), gpt_oss: (4, 2880)}
"""Rows that every token becomes, and their width."""


@cache
def planned(build: Callable[[], Example], **mesh: int) -> ShardingPlan:
    module, inputs = build()
    constraints = Constraints(planned_outputs=True)
    return planner_of(capture(module, (), inputs), mesh, constraints, Cluster.preset("h100")).plan()


def moved(plan: ShardingPlan, *, least: int = 2**16) -> Counter[tuple[str, str, str, int]]:
    """Return the exchanges of experts without the counts of rows: phase, kind, axis and bytes of a rank before."""
    found: Counter[tuple[str, str, str, int]] = Counter()
    for record in _of_experts(plan):
        if record.bytes >= least:
            found[record.phase, record.kind, record.axis, record.bytes] += record.count
    return found


def _of_experts(plan: ShardingPlan) -> list[Collective]:
    return [record for record in plan.collectives if "experts" in record.module and "shared" not in record.module]


@pytest.mark.parametrize("build", ROWS, ids=lambda build: build.__name__)
def test_tokens_go_to_the_ranks_of_their_experts(build: Callable[[], Example]) -> None:
    """Two all-to-alls of rows in each half, as by hand, in the model's precision; weights and gradients stay."""
    plan = planned(build, ep=8)
    names = [name for name in plan.placements if ".experts." in name]
    assert len(names) == (4 if build is gpt_oss else 2)
    assert {plan.placements[name] for name in names} == {(Shard(0),)}
    choices, width = ROWS[build]
    sent = BATCH * SEQUENCE * choices * width * BFLOAT16 // 8
    assert moved(plan) == {("forward", "all_to_all", "ep", sent): 2, ("backward", "all_to_all", "ep", sent): 2}


@pytest.mark.slow
def test_experts_on_one_axis_of_two() -> None:
    """With experts split over the first axis, rows are sent over it, and what is inside every expert is split too."""
    module, inputs = mixtral()
    names = [name for name, _ in module.named_parameters() if "experts." in name]
    constraints = Constraints(planned_outputs=True, pinned=dict.fromkeys(names, (Shard(0), None)))
    graph = capture(module, (), inputs)
    # By the sum of seconds: to gather weights behind compute is as fast here, by a fifth of a percent.
    plan = planner_of(graph, {"outer": 2, "inner": 4}, constraints, Cluster.preset("h100"), effort="fast").plan()
    sent = Counter(
        record.phase for record in _of_experts(plan) if (record.kind, record.axis) == ("all_to_all", "outer")
    )
    assert sent == {"forward": 2, "backward": 1}, "counts and rows, and rows"
    least = min(torch.Size(plan.shapes[name]).numel() for name in names) * BFLOAT16 // 8
    gathers = [record.bytes for record in _of_experts(plan) if record.kind == "all_gather"]
    assert max(gathers, default=0) < least, "no weight of an expert is gathered"


def test_the_counts_of_rows_are_told_once() -> None:
    (counts,) = (record for record in _of_experts(planned(mixtral, ep=8)) if record.bytes < 2**16)
    assert (counts.kind, counts.phase, counts.count) == ("all_to_all", "forward", 1)
