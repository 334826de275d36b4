"""All ranks of a mesh agree on what the first one decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import errors
from autoshard.errors import AutoshardError, InputError

Made = TypeVar("Made")

_SHOWN = 8  # ranks that an error names
_FAKE_BACKEND = "fake"  # torch's process group that stands for a world without one: there is nobody to agree with


def is_alone(device_mesh: DeviceMesh) -> bool:
    """Whether there is no other rank to talk to."""
    return device_mesh.size() == 1 or dist.get_backend(device_mesh.get_group(0)) == _FAKE_BACKEND


def is_first_rank(device_mesh: DeviceMesh) -> bool:
    """Whether this is the rank that decides for all of the mesh."""
    return all(coordinate == 0 for coordinate in device_mesh.get_coordinate() or ())


def from_first_rank(device_mesh: DeviceMesh, make: Callable[[], str]) -> str:
    """The text that `make` returns on the first rank of the mesh, on every rank of it.

    Raises:
        AutoshardError: the one that `make` raised on the first rank, on every rank, so that none waits for the others.
    """
    if is_alone(device_mesh):
        return make()
    payload: list[object] = [None, None]
    if is_first_rank(device_mesh):
        try:
            payload = ["", make()]
        except AutoshardError as error:
            payload = [type(error).__name__, str(error)]
        except Exception as error:
            _broadcast(device_mesh, [AutoshardError.__name__, f"planning failed on the first rank: {error!r}"])
            raise
    kind, text = _broadcast(device_mesh, payload)
    if kind:
        raise getattr(errors, str(kind))(text)
    return str(text)


def on_all_ranks(device_mesh: DeviceMesh, make: Callable[[], Made]) -> Made:
    """What `make` returns on this rank, once it has succeeded on every rank of the mesh.

    Raises:
        Exception: what `make` raised here; where it failed elsewhere, an AutoshardError that tells the rank.
    """
    if is_alone(device_mesh):
        return make()
    try:
        made = make()
    except Exception as error:
        _first_failure(device_mesh, (type(error).__name__, f"rank {dist.get_rank()}: {error}"))
        raise
    failure = _first_failure(device_mesh, None)
    if failure is not None:
        kind, text = failure
        raise getattr(errors, kind, AutoshardError)(text)
    return made


def check_ranks_agree(device_mesh: DeviceMesh, said: Mapping[str, str], advice: str) -> None:
    """Have all ranks of the mesh say the same of what they are about to do.

    Args:
        device_mesh: the mesh; every rank of it calls this.
        said: what each rank says, by what it is about, as texts to compare and to show.
        advice: what to change, the end of the error.

    Raises:
        InputError: ranks say different things, on every rank; it tells which rank says what.
    """
    ranks = gather_from_mesh(device_mesh, dict(said))
    for subject in dict.fromkeys(subject for one in ranks.values() for subject in one):
        by_text: dict[str, list[int]] = {}
        for rank, one in ranks.items():
            by_text.setdefault(one.get(subject, "nothing"), []).append(rank)
        if len(by_text) > 1:
            told = "; ".join(f"{text} on {ranks_text(some)}" for text, some in by_text.items())
            raise InputError(f"the ranks differ in {subject}: {told}. {advice}")


def gather_from_mesh(device_mesh: DeviceMesh, said: Made) -> dict[int, Made]:
    """What every rank of the mesh says, in the order of the ranks."""
    if is_alone(device_mesh):
        return {dist.get_rank(): said}
    ranks = [(dist.get_rank(), said)]
    for axis in range(device_mesh.ndim):
        found: list[list[tuple[int, Made]]] = [[]] * device_mesh.size(axis)
        dist.all_gather_object(found, ranks, group=device_mesh.get_group(axis))
        ranks = [one for some in found for one in some]
    return dict(sorted(ranks, key=lambda one: one[0]))


def ranks_text(ranks: Sequence[int]) -> str:
    """Such as "rank 3" or "ranks 1, 2"."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def gather_from_axis(device_mesh: DeviceMesh, axis: str, said: Made) -> list[Made]:
    """What every rank along a mesh axis says, in the order of their coordinates."""
    group = device_mesh.get_group(axis)
    if dist.get_backend(group) == _FAKE_BACKEND:
        return [said] * dist.get_world_size(group)
    found: list[Made | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, said, group=group)
    return found  # type: ignore[return-value]


def _first_failure(device_mesh: DeviceMesh, failure: tuple[str, str] | None) -> tuple[str, str] | None:
    """The failure of the first rank that has one."""
    for axis in range(device_mesh.ndim):
        found: list[tuple[str, str] | None] = [None] * device_mesh.size(axis)
        dist.all_gather_object(found, failure, group=device_mesh.get_group(axis))
        failure = next((one for one in found if one is not None), None)
    return failure


def _broadcast(device_mesh: DeviceMesh, payload: list[object]) -> list[object]:
    """Broadcast along one axis after the other: each reaches the ranks whose later coordinates are zero."""
    for axis in range(device_mesh.ndim):
        dist.broadcast_object_list(payload, group=device_mesh.get_group(axis), group_src=0)
    return payload
