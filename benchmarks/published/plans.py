"""Plans of the papers' systems: our own choice, one scheme forced on all axes, pipelines with replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from architectures import Example
from experts import Roles, Scheme, expert_plan, pin_activations
from torch.distributed.tensor import Replicate
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.pipeline.simulation import simulate
from autoshard.pipeline.tasks import task_graph
from autoshard.pipelined.plan import PipelinePlan
from autoshard.plan import ShardingPlan

_CLASSIFIER = Roles(vocabulary=("classifier",))


def free(example: Example, mesh: Mapping[str, int], cluster: Cluster, **options: Any) -> ShardingPlan:
    """Our own plan, which nothing forces."""
    module, inputs = example
    made = autoshard.plan(module, mesh, (), inputs, output_placements="planned", cluster=cluster, **options)
    assert isinstance(made, ShardingPlan), "a mesh without a pipeline axis"
    return made


def forced(example: Example, batch: int, scheme: str, mesh: Mapping[str, int], cluster: Cluster) -> ShardingPlan:
    """The plan that follows one scheme on all axes."""
    return expert_plan(example, batch, _CLASSIFIER, (scheme,) * len(mesh), mesh, {"cluster": cluster})


def pipeline(
    example: Example, batch: int, mesh: Mapping[str, int], cluster: Cluster, *, microbatches: int, **options: Any
) -> PipelinePlan:
    """Stages along the axis `"pp"`, one on every rank; over another axis, if there is one, whole replicas of them."""
    module, inputs = example
    replicas = {name: size for name, size in mesh.items() if name != "pp"}
    hints = {"*": dict.fromkeys(replicas, Replicate())} if replicas else None
    samples = batch // microbatches
    over = [Scheme("DDP", Roles(), size, math.prod(mesh.values()), samples) for size in replicas.values()]
    if over:
        pin_activations(module, over)
    options |= {"microbatches": microbatches, "virtual": 1, "cluster": cluster, "hints": hints}
    made = autoshard.plan(module, mesh, (), inputs, **options)
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
    return simulate(task_graph(plan.schedule, costs), plan.contention).seconds


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
