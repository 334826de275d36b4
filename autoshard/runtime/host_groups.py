"""Messages from host to host along the axes of a mesh: no device is waited for."""

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
    """For every axis of a mesh, a group of this rank's line along it that sends what lies on the CPU."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self._device_mesh = device_mesh

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the groups, in the order of the axes."""
        return tuple(host_group(self._device_mesh, axis).group_name for axis in range(self._device_mesh.ndim))

    def differ(self, text: str) -> bool:
        """Return True on every rank of the mesh if one has another text; all ranks call this together.

        It takes one message of 16 bytes along each axis.
        """
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        message = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
        for group in self.names:
            message = collectives.wait_tensor(collectives.all_reduce(message, "max", group))
        largest, smallest_negated = message.tolist()
        return bool(largest != -smallest_negated)

    def gather_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        """These numbers of every rank, of shape `[*axes of the mesh, numbers]`; all ranks call this together."""
        gathered = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        shape: tuple[int, ...] = (len(numbers),)
        for axis in reversed(range(self._device_mesh.ndim)):
            size = self._device_mesh.size(axis)
            pending = collectives.all_gather_into_tensor(gathered.flatten(), size, self.names[axis])
            gathered = collectives.wait_tensor(pending)
            shape = (size, *shape)
        return np.array(gathered.tolist(), dtype=np.int64).reshape(shape)


def host_group(device_mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The group of this rank's line along an axis, or one of gloo beside it where that carries no tensors of the CPU.

    A process group of NCCL alone (`init_process_group("nccl")`) does not; torch's default, "cpu:gloo,cuda:nccl", does.
    """
    group = device_mesh.get_group(axis)
    if "cpu" in backends(group):
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """For every type of device whose tensors a group sends, the name of its backend."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}
