"""All ranks of a mesh agree on what the first one decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import errors
from autoshard.errors import AutoshardError

Made = TypeVar("Made")

_FAKE_BACKEND = "fake"  # torch's process group that stands for a world without one: there is nobody to agree with


def from_first_rank(device_mesh: DeviceMesh, make: Callable[[], str]) -> str:
    """The text that `make` returns on the first rank of the mesh, on every rank of it.

    Raises:
        AutoshardError: the one that `make` raised on the first rank, on every rank, so that none waits for the others.
    """
    if dist.get_backend(device_mesh.get_group(0)) == _FAKE_BACKEND:
        return make()
    payload: list[object] = [None, None]
    if all(coordinate == 0 for coordinate in device_mesh.get_coordinate() or ()):
        try:
            payload = ["", make()]
        except AutoshardError as error:
            payload = [type(error).__name__, str(error)]
        except Exception as error:
            _send(device_mesh, [AutoshardError.__name__, f"planning failed on the first rank: {error!r}"])
            raise
    kind, text = _send(device_mesh, payload)
    if kind:
        raise getattr(errors, str(kind))(text)
    return str(text)


def together(device_mesh: DeviceMesh, make: Callable[[], Made]) -> Made:
    """What `make` returns on this rank, once it has succeeded on every rank of the mesh.

    Raises:
        Exception: what `make` raised here; where it failed elsewhere, an AutoshardError that tells the rank.
    """
    if dist.get_backend(device_mesh.get_group(0)) == _FAKE_BACKEND:
        return make()
    try:
        made = make()
    except Exception as error:
        _gather(device_mesh, (type(error).__name__, f"rank {dist.get_rank()}: {error}"))
        raise
    failure = _gather(device_mesh, None)
    if failure is not None:
        kind, text = failure
        raise getattr(errors, kind, AutoshardError)(text)
    return made


def said_by_all(device_mesh: DeviceMesh, axis: str, said: Made) -> list[Made]:
    """What every rank along a mesh axis says, in the order of their coordinates."""
    group = device_mesh.get_group(axis)
    if dist.get_backend(group) == _FAKE_BACKEND:
        return [said] * dist.get_world_size(group)
    found: list[Made | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, said, group=group)
    return found  # type: ignore[return-value]


def _gather(device_mesh: DeviceMesh, failure: tuple[str, str] | None) -> tuple[str, str] | None:
    """The failure of the first rank that has one."""
    for axis in range(device_mesh.ndim):
        found: list[tuple[str, str] | None] = [None] * device_mesh.size(axis)
        dist.all_gather_object(found, failure, group=device_mesh.get_group(axis))
        failure = next((one for one in found if one is not None), None)
    return failure


def _send(device_mesh: DeviceMesh, payload: list[object]) -> list[object]:
    """Broadcast along one axis after the other: each reaches the ranks whose later coordinates are zero."""
    for axis in range(device_mesh.ndim):
        dist.broadcast_object_list(payload, group=device_mesh.get_group(axis), group_src=0)
    return payload
