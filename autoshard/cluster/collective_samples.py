"""The collectives that programs issue, on groups of a mesh axis, to be timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from autoshard.cluster._torch import collectives
from autoshard.cluster.measurements import Grouping

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "shift")


def groupings(devices: int) -> list[Grouping]:
    """Return all ways in which an axis of some mesh of so many devices splits them into groups, larger than one."""
    sizes = [size for size in range(devices, 1, -1) if devices % size == 0]
    return [
        Grouping(size, stride)
        for size in sizes
        for stride in range(1, devices // size + 1)
        if devices // size % stride == 0
    ]


def groups_of(grouping: Grouping, devices: int) -> list[list[int]]:
    """Return the ranks of every group."""
    size, stride = grouping.size, grouping.stride
    firsts = [rank for rank in range(devices) if rank // stride % size == 0]
    return [[first + place * stride for place in range(size)] for first in firsts]


@contextlib.contextmanager
def group(grouping: Grouping) -> Iterator[dist.ProcessGroup]:
    """Context with this process's group of a grouping of all processes, which enter and leave it together."""
    local, _ = dist.new_subgroups_by_enumeration(groups_of(grouping, dist.get_world_size()))
    assert local is not None
    try:
        yield local
    finally:
        # A group must not go while another of its processes is still in a collective.
        dist.barrier()
        dist.destroy_process_group(local)


def make_collective(
    kind: str, bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Return a function that starts a collective on `bytes` per rank, rounded up to equal parts for all ranks.

    Its result has to be awaited.
    """
    size, name = group.size(), group.group_name
    # float32 elements, as many for every rank
    rows = max(1, -(-bytes // 4 // size)) * size
    tensor = torch.ones(rows, device=device)
    rank, ranks = group.rank(), range(size)
    # Whole-tensor splits to one peer and from one: an all-to-all in which each rank sends to the next.
    received, sent = ([rows * (peer == (rank + step) % size) for peer in ranks] for step in (-1, 1))
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather": (collectives.all_gather_into_tensor.default, size),
        "all_reduce": (collectives.all_reduce.default, "sum"),
        "reduce_scatter": (collectives.reduce_scatter_tensor.default, "sum", size),
        "all_to_all": (collectives.all_to_all_single.default, *[[rows // size] * size] * 2),
        # All goes to the next rank.
        "shift": (collectives.all_to_all_single.default, received, sent),
    }
    op, *settings = arguments[kind]
    return lambda: op(tensor, *settings, name)


def make_blocking(start: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a function that starts a collective and waits for it."""
    return lambda: collectives.wait_tensor.default(start())


def make_matmul(device: torch.device) -> Callable[[], object]:
    """Return a function with a short stretch of compute, behind which a collective can start."""
    left, right = torch.rand(2, 256, 256, device=device)
    return lambda: torch.mm(left, right)


def chain_calls(*works: Callable[[], object]) -> Callable[[], None]:
    """Return a function that runs pieces of work one after another."""

    def run() -> None:
        for work in works:
            work()

    return run
