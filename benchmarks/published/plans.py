"""Plans of the papers' systems: our own choice, Whale's primitives, pipelines with replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from architectures import Example
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.costs import simulate
from autoshard.plans.sharding_plan import ShardingPlan


def free(example: Example, mesh: Mapping[str, int], cluster: Cluster, **options: Any) -> ShardingPlan:
    """Our own plan, which nothing forces."""
    module, inputs = example
    made = autoshard.plan(module, mesh, (), inputs, output_placements="planned", cluster=cluster, **options)
    assert isinstance(made, ShardingPlan), "a mesh without a pipeline axis"
    return made


def data_parallel(example: Example, mesh: Mapping[str, int], cluster: Cluster) -> ShardingPlan:
    """The plan in which all operators split the batch and nothing else, so that all gradients are all-reduced."""
    autoshard.set_default_strategy(example[0], autoshard.replicate())
    return free(example, mesh, cluster)


def pipeline(
    example: Example,
    mesh: Mapping[str, int],
    cluster: Cluster,
    *,
    schedule: str = "auto",
    microbatches: int | str = "auto",
    **options: Any,
) -> PipelinePlan:
    """Stages along the axis `"pp"`, one on every rank; over another axis, if there is one, whole replicas of them."""
    module, inputs = example
    replicas = tuple(name for name in mesh if name != "pp")
    if replicas:
        autoshard.set_default_strategy(module, autoshard.replicate(replicas))
    stages = autoshard.Pipeline(virtual=1, schedule=schedule, microbatches=microbatches)
    made = autoshard.plan(module, mesh, (), inputs, pipeline=stages, cluster=cluster, **options)
    assert isinstance(made, PipelinePlan), "a mesh with a pipeline axis"
    return made


def at_speeds(plan: PipelinePlan, speeds: list[float]) -> float:
    """Seconds of a step whose stages run on devices of other speeds than they were planned for.

    Args:
        plan: with one stage per pipeline rank.
        speeds: of the ranks, in times of the device that it was planned for.
    """
    costs = [
        replace(
            one,
            forward_seconds=one.forward_seconds / speed,
            input_backward_seconds=one.input_backward_seconds / speed,
            weight_backward_seconds=one.weight_backward_seconds / speed,
        )
        for one, speed in zip(plan.costs, speeds, strict=True)
    ]
    return simulate(plan.schedule, costs, plan.contention).seconds


def flops_per_sample(example: Example) -> float:
    """Operations of a training step, forward and backward, by sample: those of matrix products and convolutions."""
    module, inputs = example
    with FlopCounterMode(display=False) as counter:
        module(**inputs).backward()
    module.zero_grad()
    batch = next(iter(inputs.values())).shape[0]
    return counter.get_total_flops() / batch


def layers(depth: float, published: int, least: int = 1) -> int:
    """How many of the published layers there are at some depth."""
    return max(least, math.ceil(depth * published))
