"""The cluster of the GPU at hand: its preset, or the nearest preset scaled to the properties of the device."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from typing import Protocol

import torch

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.measurements import scaled_curves

_LOGGER = logging.getLogger("autoshard")

_NAMES = (
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


class Properties(Protocol):
    """The result of `torch.cuda.get_device_properties`; older versions lack clock and width of the memory."""

    name: str
    total_memory: int
    multi_processor_count: int


def default_cluster(device_type: str | None) -> Cluster:
    """Return the cluster of a mesh whose user names no cluster.

    Args:
        device_type: of the mesh; None where a plan is made for devices that are not there.
    """
    if device_type == "cpu":
        return Cluster.preset("cpu")
    # Plans for devices that are not there are for a data centre; its most usual device stands for the unknown one.
    if device_type != "cuda" or not torch.cuda.is_available():
        return Cluster.preset("h100")
    return cluster_of(torch.cuda.get_device_properties(torch.cuda.current_device()))


def cluster_of(properties: Properties) -> Cluster:
    """Return the preset of a GPU; without one, the nearest preset with the GPU's memory and rates, and log a warning.

    Rates of operations are scaled by the number of multiprocessors, those of bytes by clock and width of the memory,
    where the device reports them. Links are the preset's.
    """
    named = next((preset for pattern, preset in _NAMES if re.search(pattern, properties.name)), None)
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
    # Kilohertz and bits; the memory moves data twice a clock.
    return 2.0 * clock * 1e3 * width / 8 if clock and width else None


def _distance(preset: Cluster, properties: Properties, bandwidth: float | None) -> float:
    """Distance of a preset from a device: by compute capability, then by the logarithms of the ratios of figures."""
    device = preset.device
    major, minor = getattr(properties, "major", 0), getattr(properties, "minor", 0)
    distance = abs(math.log(properties.multi_processor_count / device.multiprocessors))
    # Memory says less than rates.
    distance += abs(math.log(properties.total_memory / device.memory)) / 2
    if major:
        # Another generation outweighs any difference in size, and the minor version a difference of a factor of e.
        distance += 10.0 * (int(device.capability) != major) + (device.capability != major + minor / 10)
    return distance + (abs(math.log(bandwidth / device.memory_bandwidth)) if bandwidth else 0.0)


def _scale_preset(preset: Cluster, properties: Properties, bandwidth: float | None) -> Cluster:
    device = preset.device
    compute = properties.multi_processor_count / device.multiprocessors
    # Without a figure of the memory, a larger device is taken to have more of both.
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
