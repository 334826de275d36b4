"""Steps predicted for measured ones: the published parallelism, forced by hints and task graphs."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from experts import Scheme
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate, Shard

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.cluster.device import Link
from autoshard.specs.axes import MeshShape
from published.training import TrainingRow

DEPTHS = (2, 4)
"""Layers of the models from which deeper ones are extrapolated."""
_STAGE_DEPTHS = (2, 3)
"""The same of a stage in a pipeline."""
_ADAM = 7 * 4
"""Bytes that AdamW moves per element: parameter, gradient and two moments read, all but the gradient written."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a row.

    Attributes:
        seconds: of a step, the optimizer's update included.
        layers: of the models that were planned; two where the row's depth is extrapolated.
        planning_seconds: that all of it took.
    """

    seconds: float
    layers: tuple[int, ...]
    planning_seconds: float = 0.0

    def throughput(self, row: TrainingRow) -> float:
        """Tokens, or images, per second and GPU."""
        return row.amount / self.seconds / row.devices


def predict(row: TrainingRow, *, exact: bool = False) -> Prediction:
    """The step of a row at today's prices.

    Deep models are planned at two depths, and their steps continued along a straight line: layers are equal, and what
    is not a layer costs the same at all depths. `exact` plans all layers.
    """
    start = time.perf_counter()
    whole, depths = row.built.layers, _depths(row)
    if exact or sum(depths) >= whole:
        depths = (whole,)
    seconds = _continued(depths, [step_seconds(row, depth) for depth in depths], whole)
    return Prediction(seconds, depths, time.perf_counter() - start)


def _depths(row: TrainingRow) -> tuple[int, ...]:
    stages = row.pipeline * row.virtual
    return DEPTHS if stages == 1 else tuple(stages * depth for depth in _STAGE_DEPTHS)


def _continued(depths: tuple[int, ...], values: list[float], whole: int) -> float:
    if len(depths) == 1:
        return values[0]
    return values[0] + (whole - depths[0]) * (values[1] - values[0]) / (depths[1] - depths[0])


@functools.cache
def step_seconds(row: TrainingRow, depth: int) -> float:
    """Seconds of a step of a model of so many layers, for all samples, with one update.

    Where parameters are whole, only the last run of several reduces gradients; where they lie in shards, every run
    gathers and reduces. About half of the arithmetic run again is the mean of none and all.
    """
    if row.recomputation == "half":
        ways = [replace(row, recomputation=way) for way in ("none", "full")]
        return sum(step_seconds(way, depth) for way in ways) / len(ways)
    plan = _plan(row, depth)
    told = isinstance(plan, autoshard.ShardingPlan)
    last, update = plan.step_seconds, plan.update_seconds if told else update_seconds(row, depth)
    if row.pipeline > 1 or row.accumulation == 1:
        return last + update
    alone = replace(row, devices=row.tensor, accumulation=1)
    run = last if row.sharding != "DDP" else _plan(alone, depth).step_seconds
    return (row.accumulation - 1) * run + last + update


def update_seconds(row: TrainingRow, depth: int) -> float:
    """Seconds in which AdamW updates what a device holds, as a plan counts them; a pipeline's plan does not tell."""
    module, _ = row.built.build(depth, 1, max(1, row.sequence), 1, 1)
    elements = sum(parameter.numel() for parameter in module.parameters())
    shards = {"DDP": 1, "HSDP": row.mesh.get("dp", 1), "FSDP": row.data}[row.sharding] * row.tensor * row.pipeline
    cost = CostModel(cluster_of(row), MeshShape.of(row.mesh or {"dp": 1}))
    return cost.compute(0.0, _ADAM * elements / shards, torch.float32)


def cluster_of(row: TrainingRow) -> Cluster:
    """The row's machines, as compiled programs find them where the row's are."""
    cluster = Cluster.preset(row.cluster)
    if row.compiled:
        cluster = cluster.with_compiler
    if row.network == 1.0:
        return cluster
    return replace(cluster, between=Link(row.network * cluster.between.bandwidth, cluster.between.latency))


def _plan(row: TrainingRow, depth: int) -> autoshard.ShardingPlan | autoshard.PipelinePlan:
    """The plan of one run of the step, in a pipeline of all microbatches, in the row's layout."""
    stages = row.pipeline * row.virtual
    samples = row.data * row.microbatch * (row.accumulation if stages > 1 else 1)
    module, inputs = row.built.build(depth, samples, row.sequence, stages, row.tensor)
    mesh = row.mesh or {"dp": 1}
    data = tuple(name for name in ("replicas", "dp") if name in mesh)
    if stages == 1 and data:
        autoshard.set_default_strategy(module, autoshard.replicate(data))
    options: dict[str, Any] = {"output_placements": "planned"}
    if stages > 1:
        schedule = "Interleaved1F1B" if row.virtual > 1 else "1F1B"
        options = {"schedule": schedule, "microbatches": row.accumulation, "virtual": row.virtual}
    return autoshard.plan(
        module,
        mesh,
        (),
        inputs,
        hints=hints(row, module, data),
        cluster=cluster_of(row),
        mp_policy=MixedPrecisionPolicy(getattr(torch, row.products), getattr(torch, row.reduced)),
        optimizer=row.built.optimizer,
        recompute=row.recomputation,
        search=autoshard.Search(effort="fast"),
        **options,
    )


def hints(row: TrainingRow, module: nn.Module, data: tuple[str, ...]) -> dict[str, dict[str, Placement]]:
    """Where the parameters lie: Megatron's split over `"tp"`, and over data parallel axes whole or in shards."""
    placed = _megatron(row) if row.tensor > 1 else None
    sharded = {"DDP": (), "HSDP": ("dp",), "FSDP": data}[row.sharding]
    parts = math.prod(row.mesh.get(name, 1) for name in sharded)
    hints = {}
    for name, parameter in module.named_parameters():
        over = {} if placed is None else {"tp": placed(name, parameter.shape)}
        taken = [placement.dim for placement in over.values() if isinstance(placement, Shard)]
        free = [dim for dim, size in enumerate(parameter.shape) if dim not in taken and size % parts == 0]
        shard = Shard(free[0]) if free else Replicate()
        hints[name] = {axis: shard if axis in sharded else Replicate() for axis in data} | over
    return hints


def _megatron(row: TrainingRow) -> Callable[[str, torch.Size], Placement]:
    return Scheme("Megatron", row.built.roles, row.tensor, row.devices, row.microbatch).parameter
