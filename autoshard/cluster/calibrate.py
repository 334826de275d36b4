"""Measuring the machine that a mesh runs on: its collectives, its operators, and the contention of both."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.cluster.bench import Bench
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.collective_samples import groupings
from autoshard.cluster.cost import RING_TRIPS
from autoshard.cluster.curve import Curve
from autoshard.cluster.device import Device, Link
from autoshard.cluster.measurements import Grouping, Measurements
from autoshard.cluster.operator_curves import BYTES, FLOPS
from autoshard.cluster.stopwatch import Stopwatch
from autoshard.errors import MeshError
from autoshard.units import parse_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def calibrate(
    mesh: DeviceMesh,
    *,
    name: str = "measured",
    largest: int | str = "64MiB",
    dtypes: Sequence[torch.dtype] = DTYPES,
    repeats: int = 5,
    patience: float = 0.03,
    progress: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure the devices of a mesh and the links between them.

    All processes call it together. Everything is measured with all devices at work at once, as they are in a training
    step: the groups of a mesh axis contend for links, and processes that share processors for these.

    Args:
        mesh: of all processes; its device type is measured. Every grouping of the devices by an axis of some mesh is
            measured, so that the profile serves meshes of other axes as well.
        name: of the cluster in plans.
        largest: bytes per rank of the largest collective, such as `"64MiB"`.
        dtypes: of the operators to measure; dtypes that the device cannot compute in are left out. float32 is always
            measured, and of the other dtypes in `DTYPES` the rate of matrix products.
        repeats: number of timings of each piece of work, whose mean counts.
        patience: seconds of a call above which larger calls are not tried.
        progress: called with the name of each measurement before it is made, on the first rank.

    Returns:
        The cluster, the same on all ranks. `Cluster.save` writes it as JSON; `cluster="my-profile.json"` plans with it.
        An axis that groups devices as no measured one does is priced by the formula of latency and bandwidth, with the
        latency and bandwidth that fit the measurements best.

    Raises:
        MeshError: the mesh does not hold all processes of the group, there is only one process, or hosts differ.
        BudgetError: `largest` is not an amount of bytes.

    Source: TensorOpt 3.2, "Improving cost estimation accuracy": bandwidth is measured for every partitioning of the
    devices and for powers of two of bytes, with all groups at once.
    """
    devices = mesh.size()
    if not dist.is_initialized() or devices != dist.get_world_size() or devices < 2:
        world = dist.get_world_size() if dist.is_initialized() else 1
        raise MeshError(
            f"the mesh has {devices} devices and the job {world} processes: calibrate measures all processes of a job "
            "at once, two at least. Start it by torchrun, on a mesh over all processes."
        )
    bytes = parse_bytes(largest)
    device = torch.device(mesh.device_type)
    per_host = _devices_per_host(devices)
    report = progress if progress is not None and dist.get_rank() == 0 else lambda _: None
    bench = Bench(Stopwatch(device, repeats, patience), report)
    # float32 first: operators without a curve are priced by its "add". `fromkeys` keeps the order and drops repeats.
    measured_dtypes = dict.fromkeys((torch.float32, *dtypes, *DTYPES))
    # The samples draw random numbers; the user's generator must go on as if nothing had been measured.
    with torch.no_grad(), torch.random.fork_rng():
        operators = {
            key: curve
            for dtype in measured_dtypes
            for key, curve in bench.operators(dtype, everything=dtype == torch.float32 or dtype in dtypes)
        }
        collectives = {
            key: curve for grouping in groupings(devices) for key, curve in bench.collectives(grouping, bytes)
        }
        contention = bench.contention(Grouping(devices, 1))
    inside, between = fit_links(collectives, devices, per_host)
    day = datetime.datetime.now(datetime.UTC).date()
    setting = f"{devices} {device.type} devices, {torch.get_num_threads()} threads each, torch {torch.__version__}"
    return Cluster(
        name=name,
        device=_device(operators, device, per_host),
        devices_per_host=per_host,
        inside=inside,
        between=between,
        source=f"measured by autoshard.calibrate on {day}: {setting}",
        contention=contention,
        measured=Measurements(devices, collectives, operators),
    )


def _devices_per_host(devices: int) -> int:
    """Return the number of consecutive ranks that share a host."""
    hosts: list[str | None] = [None] * devices
    dist.all_gather_object(hosts, socket.gethostname())
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    if len(set(counts)) > 1 or any(hosts[rank] != hosts[rank - rank % counts[0]] for rank in range(devices)):
        raise MeshError(
            f"hosts run {', '.join(map(str, counts))} processes: a cluster has equally many devices on every host, "
            "with consecutive ranks. Start the job with the same number of processes on each."
        )
    return counts[0]


def _device(operators: dict[tuple[str, str, str], Curve], device: torch.device, per_host: int) -> Device:
    """Return the figures of a roofline, from the best rates that were measured."""
    rates = {
        dtype: max(curve.rates)
        for (family, dtype, unit), curve in operators.items()
        if family == "mm" and unit == FLOPS
    }
    # Which the device may lack, and the schema of a cluster asks for.
    for dtype in ("bfloat16", "float64"):
        rates.setdefault(dtype, rates["float32"])
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        memory = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    else:
        # The processes of a host share its memory.
        name = f"one {device.type} process"
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // per_host
    adds = operators["add", "float32", BYTES]
    return Device(
        name=name,
        memory=memory,
        peak_flops=rates,
        # The largest one is behind all caches.
        memory_bandwidth=adds.amounts[-1] / adds.seconds[-1],
        # The smallest add is all overhead.
        kernel_overhead=adds.seconds[0],
    )


def fit_links(
    collectives: Mapping[tuple[str, Grouping], Curve], devices: int, devices_per_host: int
) -> tuple[Link, Link]:
    """Return the links inside a host and between hosts that explain measured collectives best.

    Args:
        collectives: seconds by bytes.
        devices: number of devices that were measured.
        devices_per_host: consecutive ranks in groups of this size share a host.

    Returns:
        The two links: least squares of the relative error of the formulas of `CostModel.collective`. Where no group
        crosses hosts, or every one does, both are the same.
    """
    rows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for (kind, grouping), curve in collectives.items():
        spans = _spans_hosts(grouping, devices, devices_per_host)
        for bytes, seconds in zip(curve.amounts, curve.seconds, strict=True):
            messages, volume = _terms(kind, bytes, grouping.size)
            # Each equation is divided by its measured seconds, so that the squares are those of relative errors.
            rows[spans].append((messages / seconds, volume / seconds))
    inside, between = (_link(rows[spans]) if rows[spans] else None for spans in (False, True))
    any_link = inside or between
    assert any_link is not None, "no collective was measured"
    return inside or any_link, between or any_link


def _terms(kind: str, bytes: float, size: int) -> tuple[float, float]:
    """Return messages that a collective waits for, and bytes through one device's link."""
    if kind == "shift":
        return 1.0, bytes
    hops = RING_TRIPS[kind] * (size - 1)
    return hops, hops * (bytes if kind == "all_gather" else bytes / size)


def _link(rows: list[tuple[float, float]]) -> Link:
    """Return the latency and bandwidth by least squares of the relative errors of all rows."""
    terms = np.array(rows)
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)[0]
    if latency <= 0 or per_byte <= 0:
        # Noise: one of the terms alone explains the seconds. The other is kept above zero, at a thousandth of what it
        # would be alone, for a link needs both.
        alone = [float(column.sum() / (column * column).sum()) for column in terms.T]
        latency, per_byte = max(float(latency), alone[0] * 1e-3), max(float(per_byte), alone[1] * 1e-3)
    return Link(bandwidth=1 / float(per_byte), latency=float(latency))


def _spans_hosts(grouping: Grouping, devices: int, devices_per_host: int) -> bool:
    """Return True if any group holds ranks of different hosts."""
    reach = grouping.stride * (grouping.size - 1)
    firsts = (rank for rank in range(devices) if rank // grouping.stride % grouping.size == 0)
    return any(rank // devices_per_host != (rank + reach) // devices_per_host for rank in firsts)
