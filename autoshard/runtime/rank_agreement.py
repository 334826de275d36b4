"""Agreement of all ranks of a mesh on the first rank's decisions, arguments and batches, sizes and seeds.

Objects are sent by the mesh's own groups. Numbers of every call are sent between hosts, without waiting for a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autoshard import errors
from autoshard.errors import AutoshardError, InputError, summary_of
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives

Value = TypeVar("Value")

# The number of ranks that an error names.
_SHOWN = 8
# Torch's process group for a world of one process, where there is no rank to agree with.
_FAKE_BACKEND = "fake"


def is_alone(device_mesh: DeviceMesh) -> bool:
    """Return True if there is no other rank."""
    return device_mesh.size() == 1 or dist.get_backend(device_mesh.get_group(0)) == _FAKE_BACKEND


def process_rank() -> int:
    """Return this process's rank in the world: one number even if it simulates all ranks."""
    # From torch 2.14 on, `dist.get_rank` then returns a number per rank, which cannot be a dict key.
    assert dist.group.WORLD is not None
    return dist.group.WORLD.rank()


def is_first_rank(device_mesh: DeviceMesh) -> bool:
    """Return True on the rank that decides for the mesh."""
    return all(coordinate == 0 for coordinate in device_mesh.get_coordinate() or ())


def gather_from_axis(device_mesh: DeviceMesh, axis: int | str, value: Value) -> list[Value]:
    """Return the values of all ranks along a mesh axis, in the order of their coordinates."""
    group = device_mesh.get_group(axis)
    values = [value] * dist.get_world_size(group)
    if dist.get_backend(group) != _FAKE_BACKEND:
        dist.all_gather_object(values, value, group=group)
    return values


def gather_from_mesh(device_mesh: DeviceMesh, value: Value) -> dict[int, Value]:
    """Return the values of all ranks of the mesh, in the order of the ranks."""
    if is_alone(device_mesh):
        return {process_rank(): value}
    ranks = [(process_rank(), value)]
    # Along each axis, ranks pass on what they received along earlier axes: no group of the whole mesh is needed.
    for axis in range(device_mesh.ndim):
        ranks = [pair for pairs in gather_from_axis(device_mesh, axis, ranks) for pair in pairs]
    return dict(sorted(ranks, key=lambda pair: pair[0]))


def _broadcast(device_mesh: DeviceMesh, payload: list[object]) -> list[object]:
    """Broadcast the first rank's payload to every rank."""
    # Axis by axis: each broadcast reaches the ranks whose later coordinates are zero.
    for axis in range(device_mesh.ndim):
        dist.broadcast_object_list(payload, group=device_mesh.get_group(axis), group_src=0)
    return payload


def from_first_rank(device_mesh: DeviceMesh, make: Callable[[], str]) -> str:
    """Return on every rank of the mesh the text that `make` returns on the first rank.

    Raises:
        AutoshardError: raised by `make` on the first rank, then on every rank, so that no rank waits for the others.
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
            _broadcast(
                device_mesh, [AutoshardError.__name__, f"planning failed on the first rank: {summary_of(error)}"]
            )
            raise
    kind, text = _broadcast(device_mesh, payload)
    if kind:
        raise getattr(errors, str(kind))(text)
    return str(text)


def on_all_ranks(device_mesh: DeviceMesh, make: Callable[[], Value]) -> Value:
    """Return the result of `make` on this rank, once it has succeeded on every rank of the mesh.

    Raises:
        Exception: the error of `make` on this rank; if it failed on another, an AutoshardError that names the rank.
    """
    if is_alone(device_mesh):
        return make()
    try:
        result = make()
    except Exception as error:
        gather_from_mesh(device_mesh, (type(error).__name__, f"rank {process_rank()}: {_text_of(error)}"))
        raise
    failures = gather_from_mesh(device_mesh, None).values()
    failure: tuple[str, str] | None = next(filter(None, failures), None)
    if failure is not None:
        kind, text = failure
        raise getattr(errors, kind, AutoshardError)(text)
    return result


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, AutoshardError) else summary_of(error)


def on_first_rank(device_mesh: DeviceMesh, act: Callable[[], object]) -> None:
    """Call a function on the first rank of the mesh; the others wait until it succeeds.

    Raises:
        Exception: the error of `act` on the first rank; on the others, an AutoshardError that names the rank.
    """
    on_all_ranks(device_mesh, lambda: act() if is_first_rank(device_mesh) else None)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 3" or "ranks 1, 2"."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def check_ranks_agree(device_mesh: DeviceMesh, texts: Mapping[str, str], advice: str) -> None:
    """Compare texts over all ranks of the mesh, which call this together.

    Args:
        device_mesh: the mesh.
        texts: for every subject, this rank's text, to compare and to show.
        advice: the end of the error text: what to change.

    Raises:
        InputError: the texts differ; raised on every rank, with all of them.
    """
    check_texts_agree(gather_from_mesh(device_mesh, dict(texts)), advice)


def check_texts_agree(texts_by_rank: Mapping[int, Mapping[str, str]], advice: str) -> None:
    """Compare the texts of ranks, as `check_ranks_agree` does.

    Raises:
        InputError: the texts of a subject differ; the error shows those of all ranks.
    """
    for subject in dict.fromkeys(subject for rank_texts in texts_by_rank.values() for subject in rank_texts):
        by_text: dict[str, list[int]] = {}
        for rank, rank_texts in texts_by_rank.items():
            by_text.setdefault(rank_texts.get(subject, "nothing"), []).append(rank)
        if len(by_text) > 1:
            answers = "; ".join(f"{text} on {ranks_text(members)}" for text, members in by_text.items())
            raise InputError(f"the ranks differ in {subject}: {answers}. {advice}")


# The number of weighted sums that identify a batch of numbers; few suffice, since others hardly have equal ones.
_SUMS = 4
# The tolerance of such sums, relative to the tensor's norm: different devices round differently. A guess that works.
_TOLERANCE = 1e-2
Summary = str | tuple[float, ...]


def check_same_inputs(
    device_mesh: DeviceMesh,
    inputs: Mapping[str, torch.Tensor],
    placements: Mapping[str, Sequence[Placement]] | None = None,
) -> None:
    """Compare a call's inputs over all ranks with the same part: integers exactly, other numbers by weighted sums.

    Args:
        device_mesh: the mesh.
        inputs: this rank's inputs.
        placements: the placements of local inputs; None if every rank passes whole ones.

    Raises:
        InputError: a rank's numbers differ from those of the first rank with the same part; on every rank.
    """
    if is_alone(device_mesh):
        return
    summaries = {name: _summary(tensor) for name, tensor in inputs.items() if not isinstance(tensor, DTensor)}
    ranks = gather_from_mesh(device_mesh, summaries)
    coordinates = {int(rank): place for place, rank in np.ndenumerate(device_mesh.mesh.numpy())}
    for name in summaries:
        row = (placements or {}).get(name, ())
        split = [axis for axis, placement in enumerate(row) if not placement.is_replicate()]
        # The first rank of each part, by the coordinates on the axes that shard the input.
        first_ranks: dict[tuple[int, ...], int] = {}
        for rank, summary in ranks.items():
            first = first_ranks.setdefault(tuple(coordinates[rank][axis] for axis in split), rank)
            if _is_close(summary[name], ranks[first][name]):
                continue
            facts = f"the input {name} has other numbers on rank {rank} than on rank {first}, although "
            if placements is None:
                raise InputError(
                    f'{facts}inputs="global" asks every rank for the same whole batch: each would compute with its '
                    "part of another one. Where every rank loads samples of its own, as with a DistributedSampler, "
                    'pass inputs="local" to parallelize; else give all ranks the same seed.'
                )
            axes = ", ".join(repr(MeshShape.of(device_mesh).names[axis]) for axis in split) or "no axis"
            raise InputError(
                f"{facts}both pass the same part of it: it is split over {axes}. If these ranks load samples of their "
                "own, name all axes along which ranks do (data_axes=...), or say how this input lies "
                f"(input_placements={{{name!r}: Shard(0)}}); else have them load the same, with the same seed, such as "
                "by autoshard.shard_dataloader."
            )


def _summary(tensor: torch.Tensor) -> Summary:
    """Return a digest of integers; for other numbers, the maximum, the norm, and weighted sums."""
    flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    if not flat.is_floating_point():
        plain = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        return hashlib.blake2b(plain.cpu().numpy().tobytes(), digest_size=16).hexdigest()
    flat = flat.nan_to_num().cpu().double()
    largest = flat.abs().max().item() if len(flat) else 0.0
    # Masks contain the largest numbers of their dtype, whose sums would overflow.
    flat = flat / largest if largest else flat
    place = torch.arange(len(flat), dtype=torch.float64)
    sums = (torch.dot(flat, torch.cos(place * (0.7 + number))).item() for number in range(_SUMS))
    return largest, flat.norm().item(), *sums


def _is_close(summary: Summary, expected: Summary) -> bool:
    if isinstance(summary, str) or isinstance(expected, str):
        return summary == expected
    (largest, *sums), (expected_largest, norm, *_) = summary, expected
    same_size = abs(largest - expected_largest) <= _TOLERANCE * expected_largest
    return same_size and all(
        abs(value - expected_value) <= _TOLERANCE * norm
        for value, expected_value in zip(sums, expected[1:], strict=True)
    )


class HostGroups:
    """For every mesh axis, the group of this rank's line along the axis for CPU tensors."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self._device_mesh = device_mesh

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the groups, in the order of the axes; groups are created at the first use."""
        return tuple(host_group(self._device_mesh, axis).group_name for axis in range(self._device_mesh.ndim))

    def differ(self, *texts: str) -> list[bool]:
        """Return for every text whether any rank of the mesh has a different one; all ranks call this together."""
        # Reduce the maximum and the minimum of the digests: one message per axis, 16 bytes per text. A digest of 7
        # bytes and its negative fit into an int64.
        digests = [hashlib.blake2b(text.encode(), digest_size=7).digest() for text in texts]
        numbers = [int.from_bytes(digest, "big") for digest in digests]
        message = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64, device="cpu")
        for group in self.names:
            message = collectives.wait_tensor(collectives.all_reduce(message, "max", group))
        extremes: list[int] = message.tolist()
        return [most != -least for most, least in zip(extremes[: len(texts)], extremes[len(texts) :], strict=True)]

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
    """Return the group of this rank's line along an axis, or a new gloo group if that one cannot send CPU tensors.

    A process group of NCCL only (`init_process_group("nccl")`) cannot; torch's default, "cpu:gloo,cuda:nccl", can.
    """
    group = device_mesh.get_group(axis)
    if "cpu" in backends(group):
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of a group's backend for every device type that the group supports."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def coordinates_on(device_mesh: DeviceMesh, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return this rank's coordinate on every mesh axis, each a 0-d int64 tensor on `device`."""
    return tuple(
        torch.full((), device_mesh.get_local_rank(axis), dtype=torch.int64, device=device)
        for axis in range(device_mesh.ndim)
    )


class Seeds:
    """Seeds of steps, equal on all ranks of a mesh: drawn from torch's default CPU generator on the first rank.

    So `torch.manual_seed` on the first rank determines the random numbers of a step. A seed is sent between hosts, so
    neither drawing nor reading it waits for a device.
    """

    def __init__(self, device_mesh: DeviceMesh, hosts: HostGroups | None = None) -> None:
        self._hosts = HostGroups(device_mesh) if hosts is None else hosts
        self._coordinates = coordinates_on(device_mesh, torch.device("cpu"))

    def draw(self) -> torch.Tensor:
        """Return the next seed, a 0-d int64 tensor on the CPU; all ranks of the mesh call this together."""
        # Along each axis, sum the first rank's number and zeros from all others.
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")
        for coordinate, group in zip(self._coordinates, self._hosts.names, strict=True):
            seed = collectives.all_reduce(seed * (coordinate == 0), "sum", group)
            seed = collectives.wait_tensor(seed)
        return seed
