"""One device, and the link that joins it to others: figures, and the slowest of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

# Which peak rate a type without one of its own runs at.
_RUNS_AS = {
    "float16": "bfloat16",
    "float8_e4m3fn": "bfloat16",
    "float8_e5m2": "bfloat16",
    "complex64": "float32",
    "complex128": "float64",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or one process's share of a host.

    Attributes:
        name: for people, such as `"H100 SXM5 80GB"`.
        memory: bytes.
        peak_flops: floating-point operations per second by the name of the dtype (`"float32"`, `"bfloat16"`, ...).
        memory_bandwidth: bytes per second.
        kernel_overhead: seconds that every operator costs, however small it is.
    """

    name: str
    memory: int
    peak_flops: dict[str, float] = field(hash=False)
    memory_bandwidth: float
    kernel_overhead: float

    def peak(self, dtype: torch.dtype) -> float:
        """Operations per second in `dtype`; that of the type it is computed as where it has no rate of its own."""
        return self.rate(str(dtype).removeprefix("torch."))

    def rate(self, name: str) -> float:
        """As `peak`, of a dtype by its name."""
        if name not in self.peak_flops:
            name = _RUNS_AS.get(name, "float32")
        return self.peak_flops[name]

    @staticmethod
    def slowest(devices: Sequence[Device]) -> Device:
        """What each of these devices keeps: the worst of every figure, which no device has to have all of."""
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
        )


@dataclass(frozen=True, slots=True)
class Link:
    """What joins one device to the others: bytes per second and direction of one device, and seconds per message."""

    bandwidth: float
    latency: float

    @staticmethod
    def slowest(links: Sequence[Link]) -> Link:
        """What a collective over all of these links runs at."""
        return Link(min(link.bandwidth for link in links), max(link.latency for link in links))
