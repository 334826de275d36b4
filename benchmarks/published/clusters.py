"""The clusters of the papers: the library's presets of the devices, joined as the papers say.

A device has the figures of its data sheet (`autoshard/cluster/presets`), the same in all rows. A port is one per host:
its devices share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Link

PER_HOST = 8
_GIGABIT = 1e9 / 8


def port(gigabits: float, devices_per_host: int = PER_HOST) -> Link:
    """What a device has of its host's port."""
    return Link(gigabits * _GIGABIT / devices_per_host, Cluster.preset("v100").between.latency)


def hosts_of_v100(name: str, gigabits: float, memory: int | None = None) -> Cluster:
    """Hosts of eight V100s with NVLink and one port."""
    v100 = Cluster.preset("v100")
    device = v100.device if memory is None else replace(v100.device, memory=memory)
    return replace(v100, name=name, device=device, between=port(gigabits))


def mixed(each: int) -> Cluster:
    """A host of so many V100s with 32 GB and one of as many P100s with 16 GB, joined by 50 Gb/s (Whale 5.2)."""
    return Cluster.parse(
        f"{each}xV100-32GB + {each}xP100-16GB", devices_per_host=each, between=port(50, devices_per_host=each)
    )


def all_like(cluster: Cluster, rank: int) -> Cluster:
    """The same links with the device of one rank everywhere."""
    return replace(cluster, device=cluster.device_of(rank), stretches=())


WHALE = hosts_of_v100("Whale: V100, 50 Gb/s", 50)
TENSOROPT = hosts_of_v100("TensorOpt: V100, 100 Gb/s", 100, memory=16 * 2**30)
RHINO = hosts_of_v100("Rhino, platform M8: V100, 100 Gb/s", 100)


def mesh_of(devices: int) -> Mapping[str, int]:
    """Devices of one host, or hosts by devices."""
    return {"gpus": devices} if devices <= PER_HOST else {"hosts": devices // PER_HOST, "gpus": PER_HOST}
