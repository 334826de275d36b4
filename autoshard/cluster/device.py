"""Devices, links and hosts: the figures of each, and the worst figures of several."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from autoshard.cluster.measurements import Curve, slowest_curves

# Dtype without a peak rate -> the dtype at whose rate it runs.
_RUNS_AS = {
    "float16": "bfloat16",
    "float8_e4m3fn": "bfloat16",
    "float8_e5m2": "bfloat16",
    "complex64": "float32",
    "complex128": "float64",
}


HOST_BANDWIDTH = 28.6e9
"""Default bytes per second and direction over the link to the host: PCIe 4.0 with 16 lanes.

Source: PCI Express Base Specification 4.0: 16 GT/s, 128 of 130 bits, and 256 of the 282 bytes of a packet, are data.
"""


HOST_MEMORY_BANDWIDTH = 51.2e9
"""Default bytes per second that a device's share of its host's processors reads and writes.

Source: NVIDIA DGX A100, data sheet: two AMD EPYC 7742, each with eight channels of DDR4-3200, for eight devices.
"""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Seconds that the host spends on one call of a program before it goes on to the next.

    Attributes:
        kernel: of a call that launches a kernel.
        view: of a call that launches no kernel.
        collective: of a call that starts a collective.
    """

    kernel: float = 0.0
    view: float = 0.0
    collective: float = 0.0

    @staticmethod
    def slowest(kinds: Sequence[Dispatch]) -> Dispatch:
        """Return the most seconds of each kind of call."""
        return Dispatch(
            max(kind.kernel for kind in kinds), max(kind.view for kind in kinds), max(kind.collective for kind in kinds)
        )


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or one process's share of a host.

    Attributes:
        name: to display, such as `"H100 SXM5 80GB"`.
        memory: bytes.
        peak_flops: floating-point operations per second by the name of the dtype (`"float32"`, `"bfloat16"`, ...), of
            the data sheet.
        memory_bandwidth: bytes per second, likewise.
        kernel_overhead: seconds added to every operator, where there are no curves.
        operators: curves of the seconds of operators by their work. Without them, operators are priced by peak rates.
        dispatch: seconds of calls on the host of an eager program; a device waits for its host where that is slower.
        compiled_dispatch: likewise of a compiled program.
        multiprocessors: of an accelerator; 0 if unknown.
        capability: CUDA compute capability of an accelerator, such as 9.0; 0 if unknown.
        compiled: True if programs are compiled: `dispatch` is then theirs, and operators that a compiler fuses are one
            kernel.
        host_bandwidth: bytes per second and direction over the link to the host; `HOST_BANDWIDTH` if unknown.
        host_memory: bytes of the host that one device may fill; 0 if unknown.
        host_memory_bandwidth: bytes per second that the device's share of its host's processors reads and writes there;
            `HOST_MEMORY_BANDWIDTH` if unknown.
        sources: name of a figure -> its source.
    """

    name: str
    memory: int
    peak_flops: dict[str, float] = field(hash=False)
    memory_bandwidth: float
    kernel_overhead: float
    operators: dict[tuple[str, str, str], Curve] = field(default_factory=dict, hash=False)
    dispatch: Dispatch = Dispatch()
    compiled_dispatch: Dispatch = Dispatch()
    multiprocessors: int = 0
    capability: float = 0.0
    compiled: bool = False
    host_bandwidth: float = HOST_BANDWIDTH
    host_memory: int = 0
    host_memory_bandwidth: float = HOST_MEMORY_BANDWIDTH
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def peak(self, dtype: torch.dtype) -> float:
        """Return the operations per second in `dtype`, or in the dtype that it runs as."""
        return self.rate(str(dtype).removeprefix("torch."))

    def rate(self, name: str) -> float:
        """Return `peak` of a dtype by its name."""
        # Data sheets list few dtypes; integers run at the rate of float32.
        if name not in self.peak_flops:
            name = _RUNS_AS.get(name, "float32")
        return self.peak_flops[name]

    @property
    def with_compiler(self) -> Device:
        """The same device, priced for compiled programs."""
        return self if self.compiled else replace(self, compiled=True, dispatch=self.compiled_dispatch)

    @staticmethod
    def slowest(devices: Sequence[Device]) -> Device:
        """Return a device with the worst of every figure, so that none of these devices is slower.

        If one of them has no curves, all are priced by their peak rates.
        """
        # Of thousands of devices, most are equal.
        kinds = list(dict.fromkeys(devices))
        if len(kinds) == 1:
            return kinds[0]
        dtypes = dict.fromkeys(dtype for device in kinds for dtype in device.peak_flops)
        return Device(
            name=f"slowest of {', '.join(device.name for device in kinds)}",
            memory=min(device.memory for device in kinds),
            peak_flops={dtype: min(device.rate(dtype) for device in kinds) for dtype in dtypes},
            memory_bandwidth=min(device.memory_bandwidth for device in kinds),
            kernel_overhead=max(device.kernel_overhead for device in kinds),
            operators=slowest_curves([device.operators for device in kinds]),
            dispatch=Dispatch.slowest([device.dispatch for device in kinds]),
            compiled_dispatch=Dispatch.slowest([device.compiled_dispatch for device in kinds]),
            host_bandwidth=min(device.host_bandwidth for device in kinds),
            host_memory=min(device.host_memory for device in kinds),
            host_memory_bandwidth=min(device.host_memory_bandwidth for device in kinds),
            # Programs are compiled for all devices of a cluster, or for none.
            compiled=kinds[0].compiled,
        )


@dataclass(frozen=True, slots=True)
class BusCurve:
    """Seconds of a collective in groups of one size, by the bytes that a device sends over its link.

    Attributes:
        size: devices of a group, including those on other hosts.
        curve: seconds by the bytes that one device sends over the link in total: of S bytes all-reduced in a ring of n
            devices, 2 S (n - 1) / n. Bytes per second are the "bus bandwidth" that benchmarks of NCCL print.
    """

    size: int
    curve: Curve

    @staticmethod
    def slowest(buses: Sequence[BusCurve]) -> BusCurve:
        """Return the most seconds of any, in groups of the largest size."""
        return BusCurve(max(bus.size for bus in buses), Curve.slowest([bus.curve for bus in buses]))


@dataclass(frozen=True, slots=True)
class Link:
    """The link that joins one device to the others.

    Attributes:
        bandwidth: bytes per second and direction of one device that collectives reach.
        latency: seconds per message.
        collectives: kind of a collective -> its measured curve; other kinds are priced by latency and bandwidth.
        sources: name of a figure -> its source.
    """

    bandwidth: float
    latency: float
    collectives: dict[str, BusCurve] = field(default_factory=dict, hash=False)
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @staticmethod
    def slowest(links: Sequence[Link]) -> Link:
        """Return the link that determines the speed of a collective over all of these links."""
        kinds = list(dict.fromkeys(links))
        if len(kinds) == 1:
            return kinds[0]
        # If one link has no curve, all are priced by latency and bandwidth.
        shared = [kind for kind in kinds[0].collectives if all(kind in link.collectives for link in kinds)]
        return Link(
            min(link.bandwidth for link in kinds),
            max(link.latency for link in kinds),
            {kind: BusCurve.slowest([link.collectives[kind] for link in kinds]) for kind in shared},
        )


@dataclass(frozen=True, slots=True)
class Hosts:
    """Consecutive ranks on equal hosts; the first rank is the first of a host.

    Attributes:
        name: of the kind, such as `"V100-32GB"`.
        count: ranks.
        device: of every rank.
        devices_per_host: ranks of every host; the last host may have fewer.
        inside: the link between devices of one host.
        between: the link between devices of different hosts.
    """

    name: str
    count: int
    device: Device
    devices_per_host: int
    inside: Link
    between: Link


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one rank: the position of its stretch, and the number of its host in the cluster."""

    stretch: int
    host: int


def place_of(stretches: Sequence[Hosts], rank: int) -> RankPlace:
    """Return the place of a rank; `IndexError` if there are fewer ranks."""
    hosts = 0
    for position, stretch in enumerate(stretches):
        if 0 <= rank < stretch.count:
            return RankPlace(position, hosts + rank // stretch.devices_per_host)
        rank -= stretch.count
        hosts += -(-stretch.count // stretch.devices_per_host)
    raise IndexError(rank)


def stretches_of(stretches: Sequence[Hosts], places: Iterable[RankPlace]) -> tuple[Hosts, ...]:
    """Return stretches in which the ranks at these places are consecutive.

    Adjacent ranks stay on one host; ranks of one host with others in between count as on different hosts.
    """
    joined: list[Hosts] = []
    for place, run in itertools.groupby(places):
        count = len(list(run))
        # Each run of ranks on one host starts as a separate host, with as many devices as there are ranks in the run.
        host = replace(stretches[place.stretch], count=count, devices_per_host=count)
        last = joined[-1] if joined else None
        # A stretch finds hosts by division, so only its last host may be smaller than the others.
        if (
            last is not None
            and last.count % last.devices_per_host == 0
            and host.count <= last.devices_per_host
            and (host.device, host.inside, host.between) == (last.device, last.inside, last.between)
        ):
            joined[-1] = replace(last, count=last.count + host.count)
        else:
            joined.append(host)
    return tuple(joined)
