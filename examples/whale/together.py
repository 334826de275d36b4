"""Shared by the examples of this folder: train a model on the processes of torchrun and on one, and compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard

Build = Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]
STEPS = 3


def train(model: nn.Module, batch: tuple[Tensor, ...]) -> list[float]:
    """Train for some steps and return the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        if isinstance(model, autoshard.PipelineModule):
            loss = model.train_step(*batch)
        else:
            loss = model(*batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(build: Build, *, stages: int = 1, microbatches: int | str = "auto") -> None:
    """Train the model of `build(number of devices)` in float64 on all processes and on one; print the losses of both.

    Args:
        build: returns the model and a batch. The model's forward has Whale's primitives for this number of devices and
            returns the loss.
        stages: number of pipeline stages, one per pipeline rank. If there are more devices, the pipeline is replicated
            (nested data parallelism).
        microbatches: number of microbatches in a step of the pipeline.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    devices = dist.get_world_size()
    if stages == 1:
        mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("devices",))
    else:
        mesh = init_device_mesh("cpu", (stages, devices // stages), mesh_dim_names=("pp", "dp"))

    torch.manual_seed(0)
    model, batch = build(devices)
    model = autoshard.parallelize(model, mesh, batch, pipeline=autoshard.Pipeline(microbatches=microbatches))
    sharded = train(model, batch)
    if dist.get_rank() == 0:
        print(model.sharding_plan)
        torch.manual_seed(0)
        alone = train(*build(devices))
        difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(sharded, alone, strict=True))
        print(f"loss on {devices} processes {sharded[0]:.6f} -> {sharded[-1]:.6f}")
        print(f"loss on one process   {alone[0]:.6f} -> {alone[-1]:.6f}")
        print(f"largest relative difference: {difference:.1e}")
    dist.barrier()  # the others wait for the first
    dist.destroy_process_group()
