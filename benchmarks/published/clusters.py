"""The clusters of the papers: the data sheets of the devices in the library's presets, joined as the papers say.

A device keeps up the same share of the rates of its data sheet (`autoshard/cluster/presets`) in all rows, whatever the
presets say that it reaches: what the papers ran was older. A port is one
per host: its devices share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Dispatch, Link
from autoshard.cluster.worker_shares import scaled_device

PER_HOST = 8
KEPT = 0.89
"""What V100s keep up of the rates of their data sheet, as others measured it, in operations and in bytes alike.

Source: 14 of 15.7 TFLOP/s in large products of float32 matrices (github.com/mli/transformers-benchmarks); 750 GiB/s of
900 GB/s (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018). P100s are taken to
keep up as much.
"""
_GIGABIT = 1e9 / 8
_OVERHEAD = 6e-6
_PORT_LATENCY = 3e-5
_INSIDE = {"V100S": Link(16e9, 1e-5), "V100": Link(150e9, 8e-6), "P100": Link(80e9, 8e-6)}
"""Data sheets of the links, and latencies that were typical of NCCL and CUDA."""


def port(gigabits: float, devices_per_host: int = PER_HOST) -> Link:
    """What a device has of its host's port."""
    return Link(gigabits * _GIGABIT / devices_per_host, _PORT_LATENCY)


def kept_up(cluster: Cluster) -> Cluster:
    """The cluster with the rates of their data sheets that its devices keep up."""
    stretches = tuple(replace(one, device=_kept(one.device), inside=_inside(one.device)) for one in cluster.stretches)
    inside = Link.slowest([one.inside for one in stretches]) if stretches else _inside(cluster.device)
    between = replace(cluster.between, collectives={})
    return replace(cluster, device=_kept(cluster.device), inside=inside, between=between, stretches=stretches)


def _kept(device: Device) -> Device:
    plain = replace(device, operators={}, dispatch=Dispatch(), compiled_dispatch=Dispatch(), kernel_overhead=_OVERHEAD)
    return scaled_device(plain, KEPT)


def _inside(device: Device) -> Link:
    """The link inside a host of a device, by the longest name that its own begins with."""
    kind = next(kind for kind in _INSIDE if device.name.removeprefix("slowest of ").startswith(kind))
    return _INSIDE[kind]


def hosts_of_v100(name: str, gigabits: float) -> Cluster:
    """Hosts of eight V100s with NVLink and one port."""
    return replace(kept_up(Cluster.preset("v100")), name=name, between=port(gigabits))


def mixed(each: int) -> Cluster:
    """A host of so many V100s with 32 GB and one of as many P100s with 16 GB, joined by 50 Gb/s (Whale 5.2)."""
    devices = f"{each}xV100-32GB + {each}xP100-16GB"
    return kept_up(Cluster.parse(devices, devices_per_host=each, between=port(50, devices_per_host=each)))


def with_memory(cluster: Cluster, memory: int) -> Cluster:
    """The cluster with devices of so many bytes."""
    return replace(cluster, device=replace(cluster.device, memory=memory))


def all_like(cluster: Cluster, rank: int) -> Cluster:
    """The same links with the device of one rank everywhere."""
    return replace(cluster, device=cluster.device_of(rank), stretches=())


WHALE = hosts_of_v100("Whale: V100, 50 Gb/s", 50)
HOROVOD = with_memory(hosts_of_v100("TensorOpt: V100, 100 Gb/s", 100), 16 * 2**30)
TENSOROPT = replace(HOROVOD, contention=1.0)
"""Nothing is gained by communicating behind compute: a step is the sum of both (TensorOpt 2.1, Equation 3)."""
RHINO = hosts_of_v100("Rhino, platform M8: V100, 100 Gb/s", 100)

RHINO_SINGLE = replace(
    kept_up(Cluster.preset("v100s")), name="Rhino, platform S1: V100S, 100 Gb/s", between=port(100, devices_per_host=1)
)


def mesh_of(devices: int) -> Mapping[str, int]:
    """Devices of one host, or hosts by devices."""
    return {"gpus": devices} if devices <= PER_HOST else {"hosts": devices // PER_HOST, "gpus": PER_HOST}
