"""A plan such as the planner makes for a small transformer, for the tests of everything that shows or stores plans."""

from __future__ import annotations

import dataclasses

from torch.distributed.tensor import Replicate, Shard

from autoshard.memory.footprint import Memory
from autoshard.plans.plan_data import Collective, Decision
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import shard_placement

LAYERS = 6


def sample_plan(**changes: object) -> ShardingPlan:
    """Twelve placed parameters on a (2, 4) mesh; `changes` replace fields."""
    placements = {"embed.weight": (Replicate(), Shard(0))}
    shapes = {"embed.weight": (1024, 64)}
    for layer in range(LAYERS):
        placements[f"h.{layer}.attn.qkv.weight"] = (Replicate(), shard_placement(0, 3))
        placements[f"h.{layer}.mlp.up.weight"] = (Shard(1) if layer >= 4 else Replicate(), Shard(0))
        shapes[f"h.{layer}.attn.qkv.weight"] = (192, 64)
        shapes[f"h.{layer}.mlp.up.weight"] = (256, 64)
    sums = [Collective("all_reduce", "tp", 1 << 20, 1, f"h.{layer}.mlp", "forward", 1e-4) for layer in range(LAYERS)]
    products = [
        Decision(f"mm_{layer}", "aten.mm", f"h.{layer}.mlp", "forward", "S(0) R, R S(1) -> S(0) S(1)", 3e-5)
        for layer in range(LAYERS)
    ]
    plan = ShardingPlan(
        mesh=MeshShape.of({"dp": 2, "tp": 4}),
        placements=placements,
        shapes=shapes,
        input_placements={"input_ids": (Shard(0), Replicate())},
        output_placements={"loss": (Replicate(), Replicate())},
        step_seconds=0.0123,
        memory=Memory(parameters=2**30, gradients=2**30, optimizer=2**31, activations=2**29, peak=9 * 2**29),
        collectives=(*sums, Collective("all_gather", "dp", 4096, 3, "", "backward", 2e-3)),
        cost=0.0123,
        lower_bound=0.012,
        method="alternate",
        timings={"capture": 1.25, "solve": 0.5},
        fingerprint="ab" * 32,
        cluster="h100",
        versions={"autoshard": "0.1.0", "torch": "2.13.0"},
        decisions={"mm_0": [1, 2], "mm_1": [0]},
        choices=tuple(products),
        hints={"h.*.mlp": "tp: S(0)"},
        options={"method": "auto", "time_limit": 30.0, "memory_limit": None},
    )
    return dataclasses.replace(plan, **changes)
