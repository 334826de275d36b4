"""Messages from host to host along the axes of a mesh, which wait for no device; among them the seeds of steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.specs.emitter import collectives


class HostGroups:
    """For every axis of a mesh, a group of this rank's line along it that sends tensors on the CPU."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self._device_mesh = device_mesh

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the groups, in the order of the axes; groups are made at the first use."""
        return tuple(host_group(self._device_mesh, axis).group_name for axis in range(self._device_mesh.ndim))

    def differ(self, text: str) -> bool:
        """Return True on every rank of the mesh if one has another text; all ranks call this together."""
        # The largest and the smallest digest, in one message of 16 bytes along each axis. With 7 bytes a digest fits
        # into an int64, and so does its negative.
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        message = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
        for group in self.names:
            message = collectives.wait_tensor(collectives.all_reduce(message, "max", group))
        largest, smallest_negated = message.tolist()
        return bool(largest != -smallest_negated)

    def gather_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the numbers of every rank, of shape `[*axes of the mesh, numbers]`; all ranks call this together."""
        gathered = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        shape: tuple[int, ...] = (len(numbers),)
        for axis in reversed(range(self._device_mesh.ndim)):
            size = self._device_mesh.size(axis)
            pending = collectives.all_gather_into_tensor(gathered.flatten(), size, self.names[axis])
            gathered = collectives.wait_tensor(pending)
            shape = (size, *shape)
        return np.array(gathered.tolist(), dtype=np.int64).reshape(shape)


def host_group(device_mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """Return the group of this rank's line along an axis, or a new one of gloo where that sends no CPU tensors.

    A process group of NCCL alone (`init_process_group("nccl")`) does not; torch's default, "cpu:gloo,cuda:nccl", does.
    """
    group = device_mesh.get_group(axis)
    if "cpu" in backends(group):
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the backend for every type of device whose tensors a group sends."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def coordinates_on(device_mesh: DeviceMesh, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return this rank's coordinate on every mesh axis, each a 0-d int64 tensor on `device`."""
    return tuple(
        torch.full((), device_mesh.get_local_rank(axis), dtype=torch.int64, device=device)
        for axis in range(device_mesh.ndim)
    )


class Seeds:
    """Seeds of the steps on a mesh: drawn from torch's default CPU generator on the first rank, equal on all ranks.

    So `torch.manual_seed` on the first rank decides the random numbers of a step. A seed is sent from host to host, so
    that neither making nor reading it waits for a device.
    """

    def __init__(self, device_mesh: DeviceMesh, hosts: HostGroups | None = None) -> None:
        self._hosts = HostGroups(device_mesh) if hosts is None else hosts
        self._coordinates = coordinates_on(device_mesh, torch.device("cpu"))

    def draw(self) -> torch.Tensor:
        """Return the next seed, a 0-d int64 tensor on the CPU; all ranks of the mesh call this together."""
        # Along each axis, the sum of the first rank's number and zeros from all others.
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")
        for coordinate, group in zip(self._coordinates, self._hosts.names, strict=True):
            seed = collectives.all_reduce(seed * (coordinate == 0), "sum", group)
            seed = collectives.wait_tensor(seed)
        return seed
