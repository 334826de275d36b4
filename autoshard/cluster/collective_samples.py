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
    """Every way in which an axis of some mesh of so many devices splits them into groups, but groups of one."""
    sizes = [size for size in range(devices, 1, -1) if devices % size == 0]
    return [
        Grouping(size, stride)
        for size in sizes
        for stride in range(1, devices // size + 1)
        if devices // size % stride == 0
    ]


def groups_of(grouping: Grouping, devices: int) -> list[list[int]]:
    """The ranks of every group."""
    size, stride = grouping.size, grouping.stride
    firsts = [rank for rank in range(devices) if rank // stride % size == 0]
    return [[first + place * stride for place in range(size)] for first in firsts]


@contextlib.contextmanager
def group(grouping: Grouping) -> Iterator[dist.ProcessGroup]:
    """This process's group among those of a grouping of all processes; entered and left by all of them together."""
    mine, _ = dist.new_subgroups_by_enumeration(groups_of(grouping, dist.get_world_size()))
    assert mine is not None
    try:
        yield mine
    finally:
        dist.barrier()
        dist.destroy_process_group(mine)


def make_collective(
    kind: str, bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Starts a collective on so many bytes per rank before it, or a few more where ranks do not divide them.

    What it returns has to be awaited.
    """
    size, name = group.size(), group.group_name
    rows = max(1, -(-bytes // 4 // size)) * size
    tensor = torch.ones(rows, device=device)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather": (collectives.all_gather_into_tensor.default, size),
        "all_reduce": (collectives.all_reduce.default, "sum"),
        "reduce_scatter": (collectives.reduce_scatter_tensor.default, "sum", size),
        "all_to_all": (collectives.all_to_all_single.default, *[[rows // size] * size] * 2),
        "shift": (collectives.all_to_all_single.default, *_shift_splits(rows, group)),
    }
    op, *settings = arguments[kind]
    return lambda: op(tensor, *settings, name)


def make_blocking(start: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Starts a collective and waits for it."""
    return lambda: collectives.wait_tensor.default(start())


def make_matmul(device: torch.device) -> Callable[[], object]:
    """A short stretch of compute, for a collective to stand behind."""
    left, right = torch.rand(2, 256, 256, device=device)
    return lambda: torch.mm(left, right)


def chain_calls(*works: Callable[[], object]) -> Callable[[], None]:
    """Pieces of work one after another."""

    def run() -> None:
        for work in works:
            work()

    return run


def _shift_splits(rows: int, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Rows that a rank receives from every rank, and sends to every rank, where all goes to the next one."""
    rank, size = group.rank(), group.size()
    return (
        [rows * (other == (rank - 1) % size) for other in range(size)],
        [rows * (other == (rank + 1) % size) for other in range(size)],
    )
