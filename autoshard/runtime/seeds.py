"""The seeds that steps draw their random numbers from, agreed among the hosts of a mesh."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.host_groups import HostGroups
from autoshard.specs.emitter import collectives


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

    def __init__(self, device_mesh: DeviceMesh, hosts: HostGroups | None = None) -> None:
        self._hosts = HostGroups(device_mesh) if hosts is None else hosts
        self._coordinates = coordinates_on(device_mesh, torch.device("cpu"))

    def draw(self) -> torch.Tensor:
        """The next seed, a 0-d int64 tensor on the CPU; all ranks of the mesh call this together.

        The first rank's number is what remains of a sum over each axis in which the others hold zero.
        """
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")
        for coordinate, group in zip(self._coordinates, self._hosts.names, strict=True):
            seed = collectives.all_reduce(seed * (coordinate == 0), "sum", group)
            seed = collectives.wait_tensor(seed)
        return seed
