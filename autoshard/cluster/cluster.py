"""`Cluster`: the devices and the links under a mesh, from a preset or a JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from autoshard.cluster.measured import Measured
from autoshard.cluster.schema import FORMAT, VERSION, check
from autoshard.errors import MeshError

_PRESETS = resources.files("autoshard.cluster") / "presets"

CONTENTION = 0.58
"""Seconds that a second of communication costs behind compute: both want processors and memory bandwidth.

Source: Agrawal et al., "Optimizing ML Concurrent Computation and Communication with GPU DMA Engines" (2024): kernels
that are scheduled to share a device gain 42 % of what they would if they did not disturb each other, 21 % where nothing
is done about it. Lee et al., "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning" (2025), see compute slowed by 19 %, and 10 % of the time gained, on H100s and others.
"""

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
        name = str(dtype).removeprefix("torch.")
        if name not in self.peak_flops:
            name = _RUNS_AS.get(name, "float32")
        return self.peak_flops[name]


@dataclass(frozen=True, slots=True)
class Link:
    """What joins one device to the others: bytes per second and direction of one device, and seconds per message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts of equal devices, joined inside a host by one kind of link and between hosts by another.

    Attributes:
        name: of the preset, or the user's own.
        device: every device is of this kind.
        devices_per_host: consecutive ranks in groups of this size share a host.
        inside: the link between devices of one host.
        between: the link between devices of different hosts.
        source: where the figures come from.
        contention: seconds that a second of communication costs behind compute: 0 where neither disturbs the other, 1
            where nothing is gained by doing both at once.
        measured: measurements of collectives and operators by `autoshard.calibrate`; None for a cluster that its other
            figures describe, as they do the presets.
    """

    name: str
    device: Device
    devices_per_host: int
    inside: Link
    between: Link
    source: str = ""
    contention: float = CONTENTION
    measured: Measured | None = None

    @staticmethod
    def of(cluster: str | os.PathLike[str] | Cluster) -> Cluster:
        """A cluster given as itself, as the name of a preset, or as the path of a `.json` file.

        Raises:
            MeshError: no preset has this name, or the file is not a cluster.
        """
        if isinstance(cluster, Cluster):
            return cluster
        if isinstance(cluster, str) and not cluster.endswith(".json"):
            return Cluster.preset(cluster)
        return Cluster.load(cluster)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names of the presets that come with the library."""
        files = (entry.name for entry in _PRESETS.iterdir())
        return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))

    @staticmethod
    def preset(name: str) -> Cluster:
        """A cluster that comes with the library, such as `"h100"`; `MeshError` if there is none of this name."""
        known = Cluster.presets()
        if name.lower() not in known:
            raise MeshError(
                f"there is no cluster preset {name!r}; the presets are {', '.join(known)}. "
                f"Choose one of them, or describe your own in a file for Cluster.load."
            )
        return Cluster.from_json((_PRESETS / f"{name.lower()}.json").read_text("utf-8"), f"preset {name!r}")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """The cluster that `save` wrote.

        Raises:
            MeshError: the file cannot be read, or is not a cluster; the message says where and why.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MeshError(f"cluster file {os.fspath(path)!r} cannot be read: {error}.") from error
        return Cluster.from_json(text, f"cluster file {os.fspath(path)!r}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(self.to_json(), "utf-8")

    def to_json(self) -> str:
        """The cluster as a JSON text."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "source": self.source,
            "device": {
                "name": self.device.name,
                "memory": self.device.memory,
                "peak_flops": self.device.peak_flops,
                "memory_bandwidth": self.device.memory_bandwidth,
                "kernel_overhead": self.device.kernel_overhead,
            },
            "devices_per_host": self.devices_per_host,
            "inside": {"bandwidth": self.inside.bandwidth, "latency": self.inside.latency},
            "between": {"bandwidth": self.between.bandwidth, "latency": self.between.latency},
            "contention": self.contention,
        }
        if self.measured is not None:
            data["measured"] = self.measured.to_data()
        return json.dumps(data, indent=2) + "\n"

    @staticmethod
    def from_json(text: str, what: str = "cluster") -> Cluster:
        """The cluster in a JSON text; `what` names the text in errors.

        Raises:
            MeshError: the text is not JSON, does not follow the schema of a cluster, or its measurements are none:
                amounts that do not rise, seconds that fall, groups that so many devices do not make.
        """
        data: dict[str, Any] = check(text, what)
        try:
            measured = Measured.from_data(data["measured"]) if "measured" in data else None
        except ValueError as error:
            raise MeshError(f"{what} is not a cluster: at measured.{error}.") from error
        return Cluster(
            name=data["name"],
            device=Device(**data["device"]),
            devices_per_host=data["devices_per_host"],
            inside=Link(**data["inside"]),
            between=Link(**data["between"]),
            source=data.get("source", ""),
            contention=data.get("contention", CONTENTION),
            measured=measured,
        )
