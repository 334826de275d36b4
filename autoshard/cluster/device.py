"""One device, and the link that joins it to others: figures, and the slowest of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from autoshard.cluster.curve import Curve
from autoshard.cluster.operator_curves import slowest_curves

# Which peak rate a type without one of its own runs at.
_RUNS_AS = {
    "float16": "bfloat16",
    "float8_e4m3fn": "bfloat16",
    "float8_e5m2": "bfloat16",
    "complex64": "float32",
    "complex128": "float64",
}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Seconds for which the host is busy with one call of a program before it can go on to the next.

    Attributes:
        kernel: of a call that launches a kernel.
        view: of a call that launches none.
        collective: of a call that starts a collective.
    """

    kernel: float = 0.0
    view: float = 0.0
    collective: float = 0.0

    @staticmethod
    def slowest(kinds: Sequence[Dispatch]) -> Dispatch:
        """What every host keeps."""
        return Dispatch(
            max(one.kernel for one in kinds), max(one.view for one in kinds), max(one.collective for one in kinds)
        )


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or one process's share of a host.

    Attributes:
        name: for people, such as `"H100 SXM5 80GB"`.
        memory: bytes.
        peak_flops: floating-point operations per second by the name of the dtype (`"float32"`, `"bfloat16"`, ...), as
            the data sheet has them.
        memory_bandwidth: bytes per second, likewise.
        kernel_overhead: seconds that every operator costs, however small it is, where there are no curves.
        operators: what the device reaches: seconds of operators by the work that they do. Without them, operators
            are priced by the peak rates.
        dispatch: what calls cost the host of an eager program; a device waits for its host where that is slower.
        compiled_dispatch: likewise of a compiled one.
        multiprocessors: of an accelerator; 0 where they were not counted.
        capability: major and minor version of what an accelerator computes, such as 9.0; 0 where it is not known.
        compiled: whether programs are compiled: `dispatch` is then theirs, and operators that a compiler fuses are one
            kernel.
        sources: name of a figure -> where it comes from.
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
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def peak(self, dtype: torch.dtype) -> float:
        """Operations per second in `dtype`; that of the type it is computed as where it has no rate of its own."""
        return self.rate(str(dtype).removeprefix("torch."))

    def rate(self, name: str) -> float:
        """As `peak`, of a dtype by its name."""
        if name not in self.peak_flops:
            name = _RUNS_AS.get(name, "float32")
        return self.peak_flops[name]

    @property
    def with_compiler(self) -> Device:
        """The device as compiled programs find it."""
        return self if self.compiled else replace(self, compiled=True, dispatch=self.compiled_dispatch)

    @staticmethod
    def slowest(devices: Sequence[Device]) -> Device:
        """What each of these devices keeps: the worst of every figure, which no device has to have all of.

        Where one of them has no curves, all are priced by their peak rates.
        """
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
            compiled=kinds[0].compiled,
        )


@dataclass(frozen=True, slots=True)
class BusCurve:
    """Seconds of a collective in groups of one size, by the bytes that a device sends over its link.

    Attributes:
        size: devices of a group, those of other hosts included.
        curve: seconds by the bytes that one device sends over the link in all: of S bytes that are reduced round a ring
            of n devices, 2 S (n - 1) / n. Bytes by seconds are the "bus bandwidth" that benchmarks of NCCL print.
    """

    size: int
    curve: Curve


@dataclass(frozen=True, slots=True)
class Link:
    """What joins one device to the others.

    Attributes:
        bandwidth: bytes per second and direction of one device, as far as collectives reach it.
        latency: seconds per message.
        collectives: kind of a collective -> what was measured of it; a kind that is not here costs latency and
            bandwidth.
        sources: name of a figure -> where it comes from.
    """

    bandwidth: float
    latency: float
    collectives: dict[str, BusCurve] = field(default_factory=dict, hash=False)
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @staticmethod
    def slowest(links: Sequence[Link]) -> Link:
        """What a collective over all of these links runs at."""
        kinds = list(dict.fromkeys(links))
        if len(kinds) == 1:
            return kinds[0]
        shared = [kind for kind in kinds[0].collectives if all(kind in link.collectives for link in kinds)]
        return Link(
            min(link.bandwidth for link in kinds),
            max(link.latency for link in kinds),
            {kind: _slowest([link.collectives[kind] for link in kinds]) for kind in shared},
        )


def _slowest(curves: Sequence[BusCurve]) -> BusCurve:
    return BusCurve(max(one.size for one in curves), Curve.slowest([one.curve for one in curves]))
