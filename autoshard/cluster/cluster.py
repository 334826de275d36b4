"""`Cluster`: the devices and the links under a mesh, from a preset, a text, a JSON file, or the GPU at hand."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from autoshard.cluster import cluster_file
from autoshard.cluster.cluster_text import collective_table, hosts_lines
from autoshard.cluster.device import Device, Hosts, Link, RankPlace, place_of, stretches_of
from autoshard.cluster.measurements import Measurements, scaled_curves
from autoshard.errors import BudgetError, MeshError, file_problem, reason_of
from autoshard.report import Facts, HasReport, Report
from autoshard.units import format_bytes, parse_bytes

_PRESETS = resources.files("autoshard.cluster") / "presets"
_LOGGER = logging.getLogger("autoshard")
_PART = re.compile(r"(?P<count>\d+)\s*[xX*×]\s*(?P<kind>[A-Za-z]\w*)(?:-(?P<memory>[\d.]+\s*\w+))?")

_PRESET_OF_NAME = (
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100.*(HBM2e|9[4-6]GB)", "h100_500w"),
    (r"H100 80GB HBM3", "h100"),
    (r"A100-SXM.-40GB", "a100_40gb"),
    (r"A100-SXM.-80GB", "a100"),
    (r"V100S", "v100s"),
    (r"V100-SXM", "v100"),
    (r"P100-SXM", "p100"),
    (r"\bT4\b", "t4"),
    (r"\bL40S\b", "l40s"),
    (r"MI300X", "mi300x"),
)
"""Pattern of the names that drivers report -> preset. The first match counts: narrower patterns come first."""

CONTENTION = 0.58
"""Seconds that a second of communication adds to concurrent compute: both use multiprocessors and bandwidth.

Source: Agrawal et al., "Optimizing ML Concurrent Computation and Communication with GPU DMA Engines" (2024): kernels
that are scheduled to share a device gain 42 % of what they would if they did not disturb each other, 21 % where nothing
is done about it. Lee et al., "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning" (2025), see compute slowed by 19 %, and 10 % of the time gained, on H100s and others.
"""


@dataclass(frozen=True, slots=True)
class Cluster(HasReport):
    """Hosts of devices, connected inside a host by one kind of link and between hosts by another.

    Devices are equal, and as many as a mesh has, unless `stretches` lists them. Then `device`, `inside` and `between`
    have the worst figures of all, so that every device meets predictions made with them.

    Attributes:
        name: of the preset, or the user's own.
        device: every device is of this kind, or no slower and no smaller.
        devices_per_host: consecutive ranks in groups of this size share a host; where hosts differ, the smallest.
        inside: the link between devices of one host.
        between: the link between devices of different hosts.
        source: of the figures.
        contention: seconds that a second of communication adds to concurrent compute: 0 if neither disturbs the other,
            1 if nothing is gained by concurrency.
        measured: measurements of collectives and operators by `autoshard.calibrate`; None for a cluster that its other
            figures describe, such as a preset.
        stretches: the ranks of a cluster with a fixed number of devices, in their order; empty for any number.
        sources: name of a figure of the cluster itself -> its source.
    """

    name: str
    device: Device
    devices_per_host: int
    inside: Link
    between: Link
    source: str = ""
    contention: float = CONTENTION
    measured: Measurements | None = None
    stretches: tuple[Hosts, ...] = ()
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def __repr__(self) -> str:
        kind = self.device.name if self.is_uniform else "devices of different kinds, the smallest"
        count = "" if self.count is None else f"{self.count} x "
        memory = format_bytes(self.device.memory)
        return f"Cluster({self.name}: {count}{kind} {memory}, {self.devices_per_host} on a host; print it to see more)"

    def report(self) -> Report:
        """Return the figures, and the measured collectives at a few sizes as a table."""
        lines = [
            line
            for hosts in self.stretches or (self,)
            for line in hosts_lines(hosts.count, hosts.device, hosts.devices_per_host, hosts.inside, hosts.between)
        ]
        lines.append(("overlap", f"a second of communication behind compute costs {self.contention:.2f} s"))
        lines.append(("source", self.source))
        measured = [] if self.measured is None else [collective_table(self.measured)]
        return Report.of(f"Cluster {self.name}", (Facts.of(lines), *measured))

    @staticmethod
    def of(cluster: str | os.PathLike[str] | Cluster) -> Cluster:
        """Return a cluster given as itself, by a preset's name, a text for `parse`, or the path of a `.json` file.

        Raises:
            MeshError: the value is of another type, no preset has this name, or the text or file is not a cluster.
        """
        if isinstance(cluster, Cluster):
            return cluster
        if not isinstance(cluster, (str, os.PathLike)):
            raise MeshError(
                f"cluster={cluster!r} is {type(cluster).__name__}: pass a Cluster, a preset's name such as "
                f'"h100" ({", ".join(Cluster.presets())}), or the path of a file that Cluster.save wrote.'
            )
        # Only a text with the suffix .json is a path; others are a preset or a list of devices.
        if isinstance(cluster, str) and not cluster.endswith(".json"):
            return Cluster.parse(cluster) if is_devices(cluster) else Cluster.preset(cluster)
        return Cluster.load(cluster)

    @staticmethod
    def parse(text: str, *, devices_per_host: int | None = None, between: Link | None = None) -> Cluster:
        """Return the cluster of the devices that a text names, such as `"8xV100-32GB + 8xP100-16GB"`.

        Args:
            text: parts joined by `+`, each a count, `x`, a preset's name in any case, and, behind a hyphen, the memory
                of a device where it is not the preset's. Ranks are numbered in the order of the parts, and every part
                begins a host.
            devices_per_host: of all parts; by default those of each preset.
            between: the link between all hosts; by default the slowest of those of the presets.

        Raises:
            MeshError: a part does not parse, there is no such preset, or `devices_per_host` is below one.

        Source: Whale 3.3, training over devices of different kinds.
        """
        if devices_per_host is not None and devices_per_host < 1:
            raise MeshError(f"devices_per_host={devices_per_host}: a host has one device at least.")
        parts = [(Cluster.preset(devices.kind), devices) for devices in parse_devices(text)]
        stretches = tuple(_stretch(preset, devices, devices_per_host, between) for preset, devices in parts)
        sources = dict.fromkeys(preset.source for preset, _ in parts)
        return _join_stretches(stretches, "; ".join(sources), max(preset.contention for preset, _ in parts))

    @property
    def count(self) -> int | None:
        """The number of devices; None for a cluster of any number."""
        return sum(stretch.count for stretch in self.stretches) or None

    @property
    def with_compiler(self) -> Cluster:
        """The same cluster, priced for compiled programs."""
        stretches = tuple(replace(stretch, device=stretch.device.with_compiler) for stretch in self.stretches)
        return replace(self, device=self.device.with_compiler, stretches=stretches)

    @property
    def is_uniform(self) -> bool:
        """True if all devices are equal."""
        return len({stretch.device for stretch in self.stretches}) <= 1

    def device_of(self, rank: int) -> Device:
        """Return the device of one rank; `MeshError` if there is no such rank."""
        place = self._place(rank)
        return self.stretches[place.stretch].device if self.stretches else self.device

    def host_of(self, rank: int) -> int:
        """Return the number of the host of one rank; `MeshError` if there is no such rank."""
        return self._place(rank).host

    def link(self, first: int, second: int) -> Link:
        """Return the link between two ranks: of two hosts, the slower one; `MeshError` if there is no such rank."""
        places = self._place(first), self._place(second)
        hosts = [self.stretches[place.stretch] if self.stretches else self for place in places]
        if places[0].host == places[1].host:
            return hosts[0].inside
        return Link.slowest([end.between for end in hosts])

    def slowest(self, ranks: Sequence[int]) -> Device:
        """Return a device with the worst of every figure of these ranks; `MeshError` if there is no such rank."""
        return Device.slowest([self.device_of(rank) for rank in ranks])

    def of_ranks(self, ranks: Sequence[int]) -> Cluster:
        """Return the cluster of only these ranks, renumbered in this order.

        Consecutive ranks of one host share a host there; others count as on different hosts.

        Raises:
            MeshError: there is no such rank, or `ranks` is empty.
        """
        if not ranks:
            raise MeshError(f"no rank of cluster {self.name} was given: a cluster has one device at least.")
        places = [self._place(rank) for rank in ranks]
        if not self.stretches and list(ranks) == list(range(len(ranks))):
            return self
        # A cluster of any number of devices becomes one stretch that is long enough for these ranks.
        all_ranks = Hosts(self.name, max(ranks) + 1, self.device, self.devices_per_host, self.inside, self.between)
        stretches = stretches_of(self.stretches or (all_ranks,), places)
        if self.stretches or len(stretches) > 1:
            return _join_stretches(stretches, self.source, self.contention)
        # Collectives were measured in groups of ranks a fixed stride apart; gaps between the ranks change the strides.
        apart = any(after - before != 1 for before, after in pairwise(ranks))
        measured = replace(self.measured, collectives={}) if self.measured is not None and apart else self.measured
        return replace(self, devices_per_host=stretches[0].devices_per_host, measured=measured)

    def first(self, devices: int) -> Cluster:
        """Return the cluster of the first ranks, `devices` of them; `MeshError` if there are fewer."""
        if self.count is not None and devices > self.count:
            raise MeshError(
                f"the mesh has {devices} devices and cluster {self.name} {self.count}: make the mesh smaller, or name "
                "more devices."
            )
        return self if devices == self.count else self.of_ranks(range(devices))

    def _place(self, rank: int) -> RankPlace:
        if rank < 0 or (self.count is not None and rank >= self.count):
            raise MeshError(f"cluster {self.name} has no rank {rank}: it has {self.count or 'any number of'} devices.")
        return place_of(self.stretches, rank) if self.stretches else RankPlace(0, rank // self.devices_per_host)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Return the names of the presets that come with the library."""
        files = (entry.name for entry in _PRESETS.iterdir())
        return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))

    @staticmethod
    def preset(name: str) -> Cluster:
        """Return a cluster that comes with the library, such as `"h100"`; `MeshError` if no preset has this name."""
        presets = Cluster.presets()
        if name.lower() not in presets:
            raise MeshError(
                f"there is no cluster preset {name!r}; the presets are {', '.join(presets)}. "
                f"Choose one of them, or describe your own in a file for Cluster.load."
            )
        return _read_preset(name.lower())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Return the cluster that `save` wrote.

        Raises:
            MeshError: the file cannot be read, or is not a cluster; the message says where and why.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MeshError(f"cluster file {os.fspath(path)!r} cannot be read: {file_problem(error)}.") from error
        return Cluster.from_json(text, f"cluster file {os.fspath(path)!r}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(self.to_json(), "utf-8")

    def to_json(self) -> str:
        """Return the cluster as a JSON text."""
        data: dict[str, Any] = {"format": cluster_file.FORMAT, "version": cluster_file.VERSION}
        data |= {"name": self.name, "source": self.source}
        if self.stretches:
            data["stretches"] = [cluster_file.stretch_data(stretch) for stretch in self.stretches]
        else:
            data |= cluster_file.hosts_data(self.device, self.devices_per_host, self.inside, self.between)
        data["contention"] = self.contention
        if self.sources:
            data["sources"] = self.sources
        if self.measured is not None:
            data["measured"] = self.measured.to_data()
        return json.dumps(data, indent=2) + "\n"

    @staticmethod
    def from_json(text: str, what: str = "cluster") -> Cluster:
        """Return the cluster in a JSON text; `what` names the text in errors.

        Raises:
            MeshError: the text is not JSON, does not follow the schema of a cluster, or its measurements are not valid:
                amounts do not rise, seconds fall, or the devices cannot be split into the groups.
        """
        data = cluster_file.read(text, what)
        try:
            return _cluster_of(data)
        except ValueError as error:
            raise MeshError(f"{what} is not a cluster: at {reason_of(error)}.") from error


@functools.cache
def _read_preset(name: str) -> Cluster:
    return Cluster.from_json((_PRESETS / f"{name}.json").read_text("utf-8"), f"preset {name!r}")


def _stretch(preset: Cluster, devices: Devices, devices_per_host: int | None, between: Link | None) -> Hosts:
    """Return the ranks of one part of a text."""
    device = preset.device
    if devices.memory not in (None, device.memory):
        # Such as the 16 GB version of a V100: its rates are those of the preset.
        device = replace(device, name=devices.text, memory=devices.memory)
    per_host = devices_per_host or preset.devices_per_host
    return Hosts(devices.text, devices.count, device, per_host, preset.inside, between or preset.between)


def _cluster_of(data: dict[str, Any]) -> Cluster:
    """Return the cluster in data that follows the schema; `ValueError` if a curve in it is not valid."""
    measured = Measurements.from_data(data["measured"]) if "measured" in data else None
    source, contention = data.get("source", ""), data.get("contention", CONTENTION)
    if "stretches" in data:
        stretches = tuple(map(cluster_file.stretch_of, data["stretches"]))
        return replace(_join_stretches(stretches, source, contention), name=data["name"], measured=measured)
    return Cluster(
        name=data["name"],
        **cluster_file.hosts_fields(data),
        source=source,
        contention=contention,
        measured=measured,
        sources=data.get("sources", {}),
    )


def _join_stretches(stretches: tuple[Hosts, ...], source: str, contention: float) -> Cluster:
    """Return the cluster of these ranks, with the worst figures of all devices and links."""
    return Cluster(
        name=" + ".join(f"{stretch.count}x{stretch.name}" for stretch in stretches),
        device=Device.slowest([stretch.device for stretch in stretches]),
        # A stretch may be shorter than a host.
        devices_per_host=min(min(stretch.devices_per_host, stretch.count) for stretch in stretches),
        inside=Link.slowest([stretch.inside for stretch in stretches]),
        between=Link.slowest([stretch.between for stretch in stretches]),
        source=source,
        contention=contention,
        stretches=stretches,
    )


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one kind, as in a text.

    Attributes:
        count: number of devices, at least 1.
        kind: name of a preset, in lower case.
        memory: bytes of each; None for those of the preset.
        text: the part of the text, without the count.
    """

    count: int
    kind: str
    memory: int | None
    text: str


def is_devices(text: str) -> bool:
    """Return True if a text counts devices, False if it may be the name of a preset."""
    return "+" in text or text.strip()[:1].isdigit()


def parse_devices(text: str) -> tuple[Devices, ...]:
    """Return the devices that a text names, in its order (`Cluster.parse`).

    Raises:
        MeshError: a part does not parse; the message quotes it.
    """
    return tuple(_parse_part(part.strip(), text) for part in text.split("+"))


def _parse_part(part: str, text: str) -> Devices:
    example = 'write a count and a preset, such as "8xV100" or "8xV100-16GB", and + between kinds'
    match = _PART.fullmatch(part)
    if match is None:
        raise MeshError(f"{part!r} in the cluster {text!r} names no devices: {example}.")
    count = int(match["count"])
    if count < 1:
        raise MeshError(f"{part!r} in the cluster {text!r} is no device at all: the count must be 1 or more.")
    try:
        memory = None if match["memory"] is None else parse_bytes(match["memory"])
    except BudgetError as error:
        raise MeshError(f"{part!r} in the cluster {text!r}: {error}") from error
    name = match["kind"] if match["memory"] is None else f"{match['kind']}-{match['memory']}"
    return Devices(count, match["kind"].lower(), memory, name)


class Properties(Protocol):
    """The result of `torch.cuda.get_device_properties`; older versions lack clock and width of the memory."""

    name: str
    total_memory: int
    multi_processor_count: int


def default_cluster(device_type: str | None) -> Cluster:
    """Return the cluster of a mesh whose user names no cluster.

    Args:
        device_type: of the mesh; None for a plan without a mesh of real devices.
    """
    if device_type == "cpu":
        return Cluster.preset("cpu")
    # Without real devices, assume the most usual device of data centres.
    if device_type != "cuda" or not torch.cuda.is_available():
        return Cluster.preset("h100")
    return cluster_of(torch.cuda.get_device_properties(torch.cuda.current_device()))


def cluster_of(properties: Properties) -> Cluster:
    """Return the preset of a GPU; without one, the nearest preset with the GPU's memory and rates, and log a warning.

    Rates of operations are scaled by the number of multiprocessors, those of bytes by clock and width of the memory,
    where the device reports them. Links are the preset's.
    """
    named = next((preset for pattern, preset in _PRESET_OF_NAME if re.search(pattern, properties.name)), None)
    if named is not None:
        return Cluster.preset(named)
    bandwidth = _bandwidth(properties)
    presets = [Cluster.preset(name) for name in Cluster.presets()]
    # Presets of CPUs have no multiprocessors to scale by.
    candidates = [preset for preset in presets if preset.device.multiprocessors]
    nearest = min(candidates, key=lambda preset: _distance(preset, properties, bandwidth))
    scaled = _scale_preset(nearest, properties, bandwidth)
    speed = "" if bandwidth is None else f", {bandwidth / 1e9:.0f} GB/s"
    _LOGGER.warning(
        f"no preset knows {properties.name} ({properties.total_memory / 2**30:.0f} GiB{speed}, "
        f"{properties.multi_processor_count} multiprocessors): prices are those of {nearest.name}, scaled. Measure "
        "yours by autoshard.calibrate, or name a preset by cluster=."
    )
    return scaled


def _bandwidth(properties: Properties) -> float | None:
    """Return bytes per second of the device's memory; None where the device does not report its clock and width."""
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    # Kilohertz and bits, at double data rate.
    return 2.0 * clock * 1e3 * width / 8 if clock and width else None


def _distance(preset: Cluster, properties: Properties, bandwidth: float | None) -> float:
    """Return the distance of a preset from a device: compute capability first, then logarithms of ratios."""
    device = preset.device
    major, minor = getattr(properties, "major", 0), getattr(properties, "minor", 0)
    distance = abs(math.log(properties.multi_processor_count / device.multiprocessors))
    # Memory size weighs less than rates.
    distance += abs(math.log(properties.total_memory / device.memory)) / 2
    if major:
        # Another generation outweighs any difference in size; another minor version counts as a factor of e.
        distance += 10.0 * (int(device.capability) != major) + (device.capability != major + minor / 10)
    return distance + (abs(math.log(bandwidth / device.memory_bandwidth)) if bandwidth else 0.0)


def _scale_preset(preset: Cluster, properties: Properties, bandwidth: float | None) -> Cluster:
    device = preset.device
    compute = properties.multi_processor_count / device.multiprocessors
    # Without the bandwidth of the memory, scale it like compute.
    memory = compute if bandwidth is None else bandwidth / device.memory_bandwidth
    scaled = replace(
        device,
        name=f"{properties.name}, scaled from {device.name}",
        memory=properties.total_memory,
        peak_flops={name: rate * compute for name, rate in device.peak_flops.items()},
        memory_bandwidth=device.memory_bandwidth * memory,
        operators=scaled_curves(device.operators, compute, memory),
        multiprocessors=properties.multi_processor_count,
    )
    source = f"{preset.name}, scaled by multiprocessors and bandwidth; {preset.source}"
    return replace(preset, name=f"{preset.name} scaled", device=scaled, source=source)
