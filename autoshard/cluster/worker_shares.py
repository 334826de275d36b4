"""Shares of a batch, or of a sharded dim, for devices of different speed and memory (Whale, 3.3.1)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.measurements import scaled_curves
from autoshard.errors import BudgetError
from autoshard.units import format_bytes

# Relative difference below which two times are equal.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Worker:
    """A device with a share, or a group of devices that works as one.

    Attributes:
        speed: in any unit, the same for all, such as floating-point operations per second.
        memory: bytes.
    """

    speed: float
    memory: float = math.inf

    def __post_init__(self) -> None:
        for name in ("speed", "memory"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} of a worker: it must be above 0.")


def workers_of(cluster: Cluster, ranks: Sequence[int]) -> tuple[Worker, ...]:
    """Return the devices of some ranks as workers, with their memory and their rate of operations in single precision.

    Raises:
        MeshError: the cluster has no such rank.

    Source: Whale 3.3.1, which compares devices by these.
    """
    devices = [cluster.device_of(rank) for rank in ranks]
    return tuple(Worker(device.rate("float32"), device.memory) for device in devices)


def shares(total: int, workers: Sequence[Worker], memory_of: Callable[[int], float]) -> tuple[int, ...]:
    """Share `total` elements among workers in proportion to their speed, as far as their memory allows.

    Elements that do not fit one worker go, one by one, to the workers with room that finish first. (The paper's
    algorithm shifts a whole overload at once, which may make one other worker late.)

    Args:
        total: elements, such as the samples of a batch.
        workers: one for every share.
        memory_of: number of elements -> bytes that a worker holds; never falls.

    Returns:
        The share of every worker: integers with the sum `total` that fit the workers' memory, with the shortest time of
        the slowest worker and, among these, the smallest sum of differences from the proportions of the speeds. A
        worker that would be the slowest with a single element may get zero.

    Raises:
        ValueError: `total` is negative, or `workers` is empty.
        BudgetError: the workers have no room for so many elements.

    Source: Whale 3.3.1, Formula 1 and Algorithm 1; of its answers, the one with the shortest step.
    """
    if total < 0 or not workers:
        raise ValueError(f"total={total} among {len(workers)} workers: share some elements among one worker at least.")
    capacities = [_most_elements(total, worker.memory, memory_of) for worker in workers]
    if min(capacities) < 0 or sum(capacities) < total:
        raise _too_large_error(total, workers, capacities, memory_of)
    speeds = [worker.speed for worker in workers]
    # First the shortest time; then, with as many elements per worker as that time allows, the proportions.
    fastest = _allocate_greedily(total, capacities, lambda place, count: count / speeds[place])
    latest = max(count / speed for count, speed in zip(fastest, speeds, strict=True)) * (1 + _ROUNDING)
    capacities = [min(most, math.floor(latest * speed)) for most, speed in zip(capacities, speeds, strict=True)]
    ideal = [total * speed / sum(speeds) for speed in speeds]
    nearest = _allocate_greedily(
        total, capacities, lambda place, count: abs(count - ideal[place]) - abs(count - 1 - ideal[place])
    )
    return tuple(nearest)


def apportion(total: int, proportions: Sequence[int]) -> tuple[int, ...]:
    """Return integers with the sum `total`, in these proportions."""
    return shares(total, [Worker(share) for share in proportions], lambda _: 0)


def scaled_device(device: Device, pace: float) -> Device:
    """Return the device with `pace` times its rates: with half an equal share, a device works at twice the pace."""
    return replace(
        device,
        peak_flops={name: rate * pace for name, rate in device.peak_flops.items()},
        memory_bandwidth=device.memory_bandwidth * pace,
        operators=scaled_curves(device.operators, pace, pace),
    )


def equal_share_device(devices: Sequence[Device], shares: Sequence[int]) -> Device:
    """Return a device that takes as long with an equal share as the slowest of these with its own share.

    Args:
        devices: of every worker.
        shares: elements of every worker, at least one.

    Returns:
        The worst of every figure, scaled by the ratio of an equal share to the worker's: an operator takes as long as
        on the last worker. Work that does not grow with a share is scaled, too, which affects only the choice of
        strategies: the seconds of a plan are predicted for every worker separately. The memory is the smallest.
    """
    equal = sum(shares) / len(shares)
    return Device.slowest([scaled_device(device, equal / share) for device, share in zip(devices, shares, strict=True)])


def _allocate_greedily(total: int, capacities: Sequence[int], price: Callable[[int, int], float]) -> list[int]:
    """Assign elements one by one, each to the cheapest place, the first of equals.

    `price(place, count)` is the price of the last of `count` elements at a place, and never falls with `count`, so the
    greedy choice minimises both the sum of prices and the largest price.
    """
    counts = [0] * len(capacities)
    heap = [(price(place, 1), place) for place, most in enumerate(capacities) if most]
    heapq.heapify(heap)
    for _ in range(total):
        _, place = heapq.heappop(heap)
        counts[place] += 1
        # A full place takes no more.
        if counts[place] < capacities[place]:
            heapq.heappush(heap, (price(place, counts[place] + 1), place))
    return counts


def _most_elements(total: int, memory: float, memory_of: Callable[[int], float]) -> int:
    """Return the most elements, up to `total`, that fit a memory; -1 if not even zero elements fit."""
    # Bisection: memory never falls with the elements, and each evaluation may replay a plan.
    low, high = -1, total
    while low < high:
        middle = (low + high + 1) // 2
        if memory_of(middle) <= memory:
            low = middle
        else:
            high = middle - 1
    return low


def _too_large_error(
    total: int, workers: Sequence[Worker], capacities: Sequence[int], memory_of: Callable[[int], float]
) -> BudgetError:
    """Return the error where `total` elements do not fit."""
    if min(capacities) < 0:
        fixed_bytes = memory_of(0)
        place = capacities.index(-1)
        return BudgetError(
            f"worker {place} has {format_bytes(workers[place].memory)}, and {format_bytes(fixed_bytes)} are needed "
            "without a single element. Shard what it holds over more devices, or leave this one out.",
            peak=math.ceil(fixed_bytes),
        )
    memories = ", ".join(format_bytes(worker.memory) for worker in workers)
    return BudgetError(
        f"{total} elements do not fit: workers with {memories} have room for {', '.join(map(str, capacities))}, "
        f"{sum(capacities)} in all. Make the batch smaller by {total - sum(capacities)}, recompute more, or add "
        "devices."
    )
