"""Step time beside the hand-written peers: torchrun --nproc-per-node 2 benchmarks/step.py

One GPT under autoshard (eager), DDP, `fully_shard` and `parallelize_module`, in one run, one step of each in turn, so
that all meet the same machine. Prints the median step of each and its ratio to the best peer. Every process is given
the same global batch; the data-parallel peers take their slice of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from gpt import GPT, Shape
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoshard

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Contestant:
    """A model prepared in one way, and what was measured of it."""

    name: str
    model: nn.Module
    batch: Batch
    data_parallel: bool
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        """One training step, timed between barriers; the loss is reduced outside the timing."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        value = loss.detach().clone()
        if self.data_parallel:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        self.losses.append(value.item())


def by_autoshard(model: GPT, mesh: DeviceMesh, batch: Batch) -> Contestant:
    return Contestant("autoshard", autoshard.parallelize(model, mesh, example_args=batch), batch, data_parallel=False)


def by_ddp(model: GPT, mesh: DeviceMesh, batch: Batch) -> Contestant:
    return Contestant("DDP", DistributedDataParallel(model), local(batch), data_parallel=True)


def by_fully_shard(model: GPT, mesh: DeviceMesh, batch: Batch) -> Contestant:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return Contestant("fully_shard", fully_shard(model, mesh=mesh), local(batch), data_parallel=True)


def by_parallelize_module(model: GPT, mesh: DeviceMesh, batch: Batch) -> Contestant:
    plan: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {"attention.out": RowwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return Contestant("parallelize_module", model, batch, data_parallel=False)


def local(batch: Batch) -> Batch:
    """This rank's slice of the global batch."""
    tokens, targets = (part.chunk(dist.get_world_size())[dist.get_rank()].contiguous() for part in batch)
    return tokens, targets


def table(contestants: list[Contestant], warmup: int) -> Table:
    medians = {c.name: statistics.median(c.seconds[warmup:]) for c in contestants}
    best = min(seconds for name, seconds in medians.items() if name != "autoshard")
    first = contestants[0].losses[0]
    result = Table("", "median step, ms", "fastest, ms", "over best peer", "first loss", "last loss")
    for c in contestants:
        assert abs(c.losses[0] - first) < 1e-4 * abs(first), f"{c.name} computes another loss: {c.losses[0]} != {first}"
        median, fastest = 1e3 * medians[c.name], 1e3 * min(c.seconds[warmup:])
        ratio = medians[c.name] / best
        result.add_row(
            c.name, f"{median:.1f}", f"{fastest:.1f}", f"{ratio:.3f}", f"{c.losses[0]:.6f}", f"{c.losses[-1]:.6f}"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--plan", action="store_true", help="print autoshard's plan")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    shape = Shape(layers=args.layers, width=args.width)
    torch.manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (args.batch, shape.context))
    batch = (tokens, tokens.roll(-1, dims=1))

    makers: list[Callable[[GPT, DeviceMesh, Batch], Contestant]]
    makers = [by_autoshard, by_ddp, by_fully_shard, by_parallelize_module]
    contestants = []
    for make in makers:
        torch.manual_seed(1)
        contestants.append(make(GPT(shape), mesh, batch))
    for round_number in range(args.warmup + args.steps):
        # Nobody always goes first.
        turn = round_number % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            contestant.step()

    if dist.get_rank() == 0:
        if args.plan:
            print(contestants[0].model.sharding_plan)
        Console(width=110).print(table(contestants, args.warmup))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
