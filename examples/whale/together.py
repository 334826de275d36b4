"""What the examples of this folder share: train a model on the processes of torchrun, and on one, and compare."""

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
    """The loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(build: Build) -> None:
    """Train what `build(number of devices)` makes, in float64, on all processes and on one; print both.

    Args:
        build: makes the model, whose forward has Whale's primitives for so many devices and returns the loss, and a
            batch.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("devices",))

    torch.manual_seed(0)
    model, batch = build(mesh.size())
    autoshard.parallelize(model, mesh, batch)
    sharded = train(model, batch)
    if dist.get_rank() == 0:
        print(model.sharding_plan)
        torch.manual_seed(0)
        alone = train(*build(mesh.size()))
        difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(sharded, alone, strict=True))
        print(f"loss on {mesh.size()} processes {sharded[0]:.6f} -> {sharded[-1]:.6f}")
        print(f"loss on one process   {alone[0]:.6f} -> {alone[-1]:.6f}")
        print(f"largest relative difference: {difference:.1e}")
    dist.barrier()  # the others wait for the first
    dist.destroy_process_group()
