"""The seeds that steps draw their random numbers from, agreed among the hosts of a mesh."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.patterns.local import collectives


def coordinates_on(device_mesh: DeviceMesh, device: torch.device) -> tuple[torch.Tensor, ...]:
    """This rank's coordinate on every mesh axis, each a 0-d int64 tensor on `device`."""
    return tuple(
        torch.full((), device_mesh.get_local_rank(axis), dtype=torch.int64, device=device)
        for axis in range(device_mesh.ndim)
    )


class Seeds:
    """The seeds of the steps on a mesh: drawn from torch's default CPU generator on the first rank, equal on all ranks.

    So `torch.manual_seed` before a step decides what the step draws, whatever the generators of other ranks hold. A
    seed is a message from host to host: no device is waited for, neither to make a seed nor to read it.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self._device_mesh = device_mesh
        self._coordinates = coordinates_on(device_mesh, torch.device("cpu"))

    @cached_property
    def _groups(self) -> tuple[str, ...]:
        """For every axis, the name of a group of this rank's line along it that sends what lies on the CPU."""
        return tuple(host_group(self._device_mesh, axis).group_name for axis in range(self._device_mesh.ndim))

    def agree(self) -> torch.Tensor:
        """The next seed, a 0-d int64 tensor on the CPU; all ranks of the mesh call this together.

        The first rank's number is what remains of a sum over each axis in which the others hold zero.
        """
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")
        for coordinate, group in zip(self._coordinates, self._groups, strict=True):
            seed = collectives.all_reduce(seed * (coordinate == 0), "sum", group)
            seed = collectives.wait_tensor(seed)
        return seed


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
