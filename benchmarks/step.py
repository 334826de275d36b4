"""Step time beside the hand-written peers: torchrun --nproc-per-node 2 benchmarks/step.py

One GPT under autoshard (eager), DDP, `fully_shard` and `parallelize_module`, in one run, one step of each in turn, so
that all meet the same machine. Prints the median step of each and its ratio to the best peer. Every process is given
the same global batch; the data-parallel peers take their slice of it.

With `--shell 400`, it times the host instead: what a call and a backward take for each of so many small parameters,
what the programs in them take, and the rest, the shell around these. Time is that of the thread, without waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

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
from autoshard.runtime.module_runtime import RUNTIME

Batch = tuple[Tensor, Tensor]
Result = TypeVar("Result")


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


class HostClock:
    """Times parts of a step by the thread's clock, and the programs of a parallelised module in them."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: dict[str, list[tuple[float, float]]] = {}
        self._programs = self._start = 0.0
        for served in model.__dict__[RUNTIME].programs.table.values():
            for half in (served.program.halves.forward, served.program.halves.backward):
                half.register_forward_pre_hook(self._enter)
                half.register_forward_hook(self._leave)

    def time(self, name: str, run: Callable[[], Result]) -> Result:
        self._programs, start = 0.0, time.thread_time()
        result = run()
        self.rows.setdefault(name, []).append((time.thread_time() - start, self._programs))
        return result

    def _enter(self, *_: object) -> None:
        self._start = time.thread_time()

    def _leave(self, *_: object) -> None:
        self._programs += time.thread_time() - self._start


def time_shell(parameters: int, mesh: DeviceMesh, steps: int, warmup: int) -> Table:
    """The host's time for each parameter of a deep and narrow model."""
    torch.manual_seed(1)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2))), torch.randn(8, 8)
    autoshard.parallelize(model, mesh, example_args=(x,))
    clock = HostClock(model)
    for _ in range(warmup + steps):
        model.zero_grad()
        loss = clock.time("call", lambda: model(x).sum())
        clock.time("backward", loss.backward)
    result, total, inside = Table("", "µs a parameter", "of programs", "of the shell"), 0.0, 0.0
    for name, pairs in clock.rows.items():
        whole, programs = (1e6 / parameters * statistics.median(each) for each in zip(*pairs[warmup:], strict=True))
        result.add_row(name, f"{whole:.1f}", f"{programs:.1f}", f"{whole - programs:.1f}")
        total, inside = total + whole, inside + programs
    result.add_row("both", f"{total:.1f}", f"{inside:.1f}", f"{total - inside:.1f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--shell", type=int, metavar="PARAMETERS", help="time the host of a call of so many instead")
    parser.add_argument("--plan", action="store_true", help="print autoshard's plan")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    if args.shell:
        result = time_shell(args.shell, mesh, args.steps, args.warmup)
        if dist.get_rank() == 0:
            Console(width=110).print(result)
        dist.destroy_process_group()
        return
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
