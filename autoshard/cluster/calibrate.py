"""Measurement of the devices of a mesh: their collectives, their operators, and the contention of both.

All processes do the same work at once, so that they contend for shared hardware as in a step: a `Stopwatch` times it, a
`Bench` makes the measurements, and `calibrate` turns them into a cluster.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import RING_TRIPS
from autoshard.cluster.device import Device, Link
from autoshard.cluster.measurements import BYTES, FLOPS, INTENSITY, Curve, Grouping, Measurements
from autoshard.cluster.samples import (
    KINDS,
    Sample,
    SampleCall,
    chain_calls,
    group,
    groupings,
    make_blocking,
    make_collective,
    make_matmul,
    samples,
)
from autoshard.errors import MeshError
from autoshard.units import parse_bytes

# Minimum seconds of a timing: many time slices where processes share a processor.
_WINDOW = 5e-2
# A timing counts as at most this many medians: in longer ones, something else ran.
_OUTLIER_FACTOR = 3.0
# Calls whose minimum is the rough estimate of one call.
_TRIES = 3
# Copies of the data of a piece of work.
_COPIES = 8
# Bytes of all copies together.
_COPY_BYTES = 2**26
# Power of two of the bytes of the smallest collective.
_SMALLEST_POWER = 8
# Least fraction of the time of compute and collective that counts as the collective's, in spite of noise.
_LEAST_SHARE = 0.01
# Bytes of the collective that is timed beside compute, so that latency hardly counts.
_OVERLAP_BYTES = 2**22

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Rotation:
    """Work on several copies of its data in turn, so that caches are as cold as in a step.

    The last results are kept, so that the allocator hands out new memory.

    Args:
        make: returns the work on a new copy of its data.
        bytes: read and written by a copy.
    """

    def __init__(self, make: Callable[[], Callable[[], Any]], bytes: float) -> None:
        copies = max(1, min(_COPIES, int(_COPY_BYTES // bytes)))
        self._works = itertools.cycle([make() for _ in range(copies)])
        self._kept: deque[Any] = deque(maxlen=copies)

    def __call__(self) -> None:
        self._kept.append(next(self._works)())


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Timings that all processes make together, with equal results.

    Attributes:
        device: that the work runs on.
        repeats: number of timings, which are averaged.
        patience: seconds of one call above which larger calls are not tried.
        clock: returns seconds since some moment; wall time by default.
    """

    device: torch.device
    repeats: int
    patience: float
    clock: Callable[[], float] = time.perf_counter

    def mean_of_ranks(self, values: Sequence[float]) -> list[float]:
        """Return the mean over all processes of each value; equal on all of them."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [value / dist.get_world_size() for value in tensor.tolist()]

    def rough_seconds(self, work: Callable[[], object]) -> float:
        """Return the minimum seconds of a few calls; the same number on all processes."""
        dist.barrier()
        return self.mean_of_ranks([min(self._time_calls(work, 1) for _ in range(_TRIES))])[0]

    def mean_seconds(self, works: Sequence[Callable[[], object]], calls: Sequence[float]) -> list[float]:
        """Return the seconds of one call of each piece of work; the same numbers on all processes.

        A timing begins when all processes are there, and ends when the last is done, like the stretch between two
        collectives of a step.

        Args:
            works: run by every process at the same time.
            calls: estimated seconds of a call; the same on all processes, so that they make equally many calls.
        """
        counts = [max(1, round(_WINDOW / seconds)) for seconds in calls]
        timings = torch.zeros(len(works), self.repeats, dtype=torch.float64)
        # Pieces of work are timed in turn, so that a disturbance affects a few timings of each, not all of one.
        for turn in range(self.repeats):
            for place, (work, count) in enumerate(zip(works, counts, strict=True)):
                dist.barrier()
                timings[place, turn] = self._time_calls(work, count) / count
        timings = timings.to(self.device)
        # A collective waits for the last rank: a step takes as long as its slowest device.
        dist.all_reduce(timings, dist.ReduceOp.MAX)
        # The mean, not the median: times of processes that share a processor vary with the order of their time slices,
        # and means add up to the time of a step.
        return [robust_mean(row) for row in timings.tolist()]

    def _time_calls(self, work: Callable[[], object], calls: int) -> float:
        self._synchronize()
        start = self.clock()
        for _ in range(calls):
            work()
        self._synchronize()
        return self.clock() - start

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def robust_mean(timings: Sequence[float]) -> float:
    """Return the mean of timings, each clamped to three medians."""
    most = _OUTLIER_FACTOR * statistics.median(timings)
    return statistics.mean(min(timing, most) for timing in timings)


@dataclass(frozen=True, slots=True)
class Bench:
    """Makes measurements on all processes together.

    Attributes:
        stopwatch: times them.
        report: called with the name of each measurement before it is made.
    """

    stopwatch: Stopwatch
    report: Callable[[str], None]

    def operators(self, dtype: torch.dtype, everything: bool = True) -> Iterator[tuple[tuple[str, str, str], Curve]]:
        """Yield the curves of all families, or of matrix products only, with keys as in `Measurements.operators`."""
        name = str(dtype).removeprefix("torch.")
        self.report(f"{'operators' if everything else 'matrix products'} in {name}")
        chosen = samples(dtype, self.stopwatch.device)[: None if everything else 1]
        timed = [times for times in map(self._time_sample, chosen) if times.seconds]
        # An operator called repeatedly finds its code in the host's caches; in a program, others run in between. The
        # difference is added to all operators but views.
        extra = self._interleaving_overhead(timed)
        for times in timed:
            sample = times.sample
            yield (sample.family, name, sample.amounts_are), times.curve(0.0 if sample.family == "view" else extra)

    def _time_sample(self, sample: Sample) -> _SampleTimes:
        """Return a sample's calls and seconds; empty where the device has no such operator in this dtype."""
        amounts: list[tuple[float, float]] = []
        rotations: list[Rotation] = []
        estimates: list[float] = []
        for size in sample.sizes:
            call = _make_call(sample, size)
            [missing] = self.stopwatch.mean_of_ranks([call is None])
            # On any process, since all must stop at the same size.
            if call is None or missing:
                break
            amounts.append(call[0].amounts())
            rotations.append(call[1])
            estimates.append(self.stopwatch.rough_seconds(rotations[-1]))
            if estimates[-1] > self.stopwatch.patience:
                break
        # Free the data of all but the smallest call: a device that is short of memory is slow.
        return _SampleTimes(sample, rotations[:1], amounts, self.stopwatch.mean_seconds(rotations, estimates))

    def _interleaving_overhead(self, timed: Sequence[_SampleTimes]) -> float:
        """Return the extra seconds of a call between calls of all other families, measured by the smallest calls."""
        # The smallest calls by intensity have many bytes, and their noise would hide the overhead.
        small = [times for times in timed if times.sample.amounts_are != INTENSITY]
        alone = sum(times.seconds[0] for times in small)
        chain = chain_calls(*[call for times in small for call in times.smallest])
        [together] = self.stopwatch.mean_seconds([chain], [alone])
        return max(0.0, together - alone) / len(small)

    def collectives(self, grouping: Grouping, largest: int) -> Iterator[tuple[tuple[str, Grouping], Curve]]:
        """Yield the curves of all collectives in one grouping, up to `largest` bytes, keyed as in `Measurements`.

        Like operators, collectives are timed in turn, on separate data.
        """
        self.report(f"collectives in groups of {grouping.size}, {grouping.stride} ranks apart")
        # A collective is timed after some compute, whose time is subtracted: in a step, too, devices arrive at
        # different times, and processes that share a processor have to be rescheduled.
        compute = make_matmul(self.stopwatch.device)
        compute_estimate = self.stopwatch.rough_seconds(compute)
        sizes = [2**power for power in range(_SMALLEST_POWER, max(_SMALLEST_POWER, largest.bit_length() - 1) + 1)]
        with group(grouping) as local:
            for kind in KINDS:
                works: list[Callable[[], object]] = [compute]
                estimates = [compute_estimate]
                for size in sizes:
                    make = functools.partial(_make_blocking_collective, kind, size, local, self.stopwatch.device)
                    works.append(chain_calls(compute, Rotation(make, size * (1 + grouping.size))))
                    estimates.append(self.stopwatch.rough_seconds(works[-1]))
                    if estimates[-1] > self.stopwatch.patience:
                        break
                alone, *together = self.stopwatch.mean_seconds(works, estimates)
                seconds = [max(combined - alone, _LEAST_SHARE * combined) for combined in together]
                yield (kind, grouping), Curve.through(sizes[: len(seconds)], seconds)

    def contention(self, grouping: Grouping) -> float:
        """Return the seconds that a second of communication adds to compute, from a collective beside matrix products.

        With equal times of compute and communication, both together take between the time of one (result 0) and the
        sum (result 1); more if they disturb each other.
        """
        self.report("collectives beside compute")
        # A difference of times needs more timings than a time.
        watch = replace(self.stopwatch, repeats=4 * self.stopwatch.repeats)
        compute = make_matmul(watch.device)
        with group(grouping) as local:
            start = make_collective("all_reduce", _OVERLAP_BYTES, local, watch.device)
            sending = make_blocking(start)
            estimates = [watch.rough_seconds(sending), watch.rough_seconds(compute)]
            # As many products as take the time of the collective.
            communication, product = watch.mean_seconds([sending, compute], estimates)
            computing = chain_calls(*[compute] * max(1, round(communication / product)))

            def overlapping() -> None:
                pending = start()
                computing()
                make_blocking(lambda: pending)()

            estimates = [communication, communication, 2 * communication]
            sent, computed, together = watch.mean_seconds([sending, computing, overlapping], estimates)
        return max(0.0, (together - max(sent, computed)) / min(sent, computed))


@dataclass(frozen=True, slots=True)
class _SampleTimes:
    """The timings of a sample.

    Attributes:
        sample: the sample.
        smallest: its smallest call, if it has any.
        amounts: operations and bytes of each call.
        seconds: of each call.
    """

    sample: Sample
    smallest: list[Rotation]
    amounts: list[tuple[float, float]]
    seconds: list[float]

    def curve(self, extra: float) -> Curve:
        """Return the curve of the seconds, with `extra` seconds for each call."""
        points = {}
        for (flops, bytes), seconds in zip(self.amounts, self.seconds, strict=True):
            match self.sample.amounts_are:
                case "flops":
                    points[flops] = seconds + extra
                case "bytes":
                    points[bytes] = seconds + extra
                # Operations per byte, and the seconds of one byte.
                case _:
                    points[flops / bytes] = (seconds + extra) / bytes
        return Curve.through(points, points.values())


def _make_call(sample: Sample, size: int) -> tuple[SampleCall, Rotation] | None:
    """Return a call of a size and copies of it; None if the operator refuses it or memory does not suffice."""
    try:
        call = sample.make(size)
        return call, Rotation(functools.partial(sample.make, size), call.amounts()[1])
    # Out of memory is a RuntimeError, too: it ends the curve, as an unsupported dtype does.
    except RuntimeError:
        return None


def _make_blocking_collective(
    kind: str, size: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], torch.Tensor]:
    return make_blocking(make_collective(kind, size, group, device))


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

    All processes call it together. Everything is measured with all devices at work, as in a training step: the groups
    of a mesh axis contend for links, and processes on one host for its processors.

    Args:
        mesh: of all processes; its device type is measured. Every grouping of the devices by an axis of some mesh is
            measured, so that the profile serves meshes of other axes, too.
        name: of the cluster in plans.
        largest: bytes per rank of the largest collective, such as `"64MiB"`.
        dtypes: of the operators to measure; dtypes that the device cannot compute in are left out. float32 is always
            measured, and of the other dtypes in `DTYPES` the rate of matrix products.
        repeats: number of timings of each piece of work, which are averaged.
        patience: seconds of a call above which larger calls are not tried.
        progress: called with the name of each measurement before it is made, on the first rank.

    Returns:
        The cluster, the same on all ranks. `Cluster.save` writes it as JSON; `cluster="my-profile.json"` plans with it.
        An axis with a grouping that was not measured is priced by latency and bandwidth, fitted to the measurements.

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
    # The samples draw random numbers, which must not advance the user's generator.
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
    """Return the figures of a roofline, from the best measured rates."""
    rates = {
        dtype: max(curve.rates)
        for (family, dtype, unit), curve in operators.items()
        if family == "mm" and unit == FLOPS
    }
    # The schema of a cluster requires these, which the device may lack.
    for dtype in ("bfloat16", "float64"):
        rates.setdefault(dtype, rates["float32"])
    # The processes of a host share its memory.
    host_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // per_host
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        memory = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    else:
        name = f"one {device.type} process"
        memory = host_memory
    adds = operators["add", "float32", BYTES]
    return Device(
        name=name,
        memory=memory,
        peak_flops=rates,
        # The largest one exceeds all caches.
        memory_bandwidth=adds.amounts[-1] / adds.seconds[-1],
        # The smallest add is all overhead.
        kernel_overhead=adds.seconds[0],
        host_memory=host_memory,
    )


def fit_links(
    collectives: Mapping[tuple[str, Grouping], Curve], devices: int, devices_per_host: int
) -> tuple[Link, Link]:
    """Return the links inside a host and between hosts that fit measured collectives best.

    Args:
        collectives: seconds by bytes.
        devices: number of measured devices.
        devices_per_host: consecutive ranks in groups of this size share a host.

    Returns:
        The two links: least squares of the relative error of the formulas of `CostModel.collective`. Where no group
        crosses hosts, or every one does, both are the same.
    """
    rows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for (kind, grouping), curve in collectives.items():
        spans = grouping.spans_hosts(devices, lambda rank: rank // devices_per_host)
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
        # Noise: fit one term alone. The other is a thousandth of its own fit, since a link needs both above zero.
        alone = [float(column.sum() / (column * column).sum()) for column in terms.T]
        latency, per_byte = max(float(latency), alone[0] * 1e-3), max(float(per_byte), alone[1] * 1e-3)
    return Link(bandwidth=1 / float(per_byte), latency=float(latency))
