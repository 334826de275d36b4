"""Whole sizes of inputs that arrive as shards of different lengths: the ranks tell each other how long theirs are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from autoshard.errors import InputError
from autoshard.partition.hosts import backends
from autoshard.patterns.local import collectives
from autoshard.specs.layout import dim_of
from autoshard.specs.spec import is_shard

Shapes = dict[str, list[int]]
"""Shape of every input by its path."""


def whole_shapes(
    shapes: Mapping[str, Sequence[int]],
    placements: Mapping[str, Sequence[Placement]],
    device_mesh: DeviceMesh,
    *,
    uneven: bool,
    shares: tuple[int, Sequence[int]] | None = None,
) -> Shapes:
    """The shapes of the tensors of which this rank was given shards.

    Args:
        shapes: shape of this rank's shard of every input, in the same order on every rank.
        placements: how it lies, one placement per mesh axis.
        device_mesh: the mesh.
        uneven: whether shards may be of different lengths. Then there is a collective for every axis that shards an
            input, which the host waits for; otherwise none.
        shares: a mesh axis whose ranks hold what they want, and how much each does.

    Raises:
        InputError: the lengths are not those of the parts that `Shard` makes of one tensor.
    """
    whole = {name: list(shape) for name, shape in shapes.items()}
    for axis in reversed(range(device_mesh.ndim)):
        size = device_mesh.size(axis)
        sharded = {
            name: dim_of(placements[name][axis], len(shape))
            for name, shape in whole.items()
            if shape and size > 1 and is_shard(placements[name][axis])
        }
        if shares is not None and axis == shares[0]:
            for name, dim in sharded.items():
                whole[name][dim] = sum(shares[1])
            continue
        own = [whole[name][dim] for name, dim in sharded.items()]
        ranks = _lengths(own, device_mesh, axis) if uneven and own else [[length] * size for length in own]
        for (name, dim), lengths in zip(sharded.items(), ranks, strict=True):
            whole[name][dim] = _joined(name, dim, lengths, _axis_name(device_mesh, axis))
    return whole


def local_shares(
    shapes: Mapping[str, Sequence[int]],
    placements: Mapping[str, Sequence[Placement]],
    device_mesh: DeviceMesh,
    axis: int,
) -> list[int]:
    """How many rows every rank along a shared axis was given: a collective that the host waits for.

    Args:
        shapes, placements, device_mesh: as for `whole_shapes`.
        axis: whose ranks hold as many rows as they want, the same of every input that lies in shares.

    Raises:
        InputError: a rank was given other numbers of rows of different inputs, or none.
    """
    sharded = {
        name: dim_of(placements[name][axis], len(shape))
        for name, shape in shapes.items()
        if shape and is_shard(placements[name][axis])
    }
    ranks = _lengths([shapes[name][dim] for name, dim in sharded.items()], device_mesh, axis)
    first = next(iter(ranks), [])
    for name, lengths in zip(sharded, ranks, strict=True):
        if lengths != first or min(lengths) < 1:
            raise InputError(
                f"the ranks along axis {_axis_name(device_mesh, axis)!r} were given {', '.join(map(str, lengths))} "
                f"rows of {name} and {', '.join(map(str, first))} of {next(iter(sharded))}: a rank takes equally many "
                "of all inputs, and one at least."
            )
    return first


def check_blocks(counts: Sequence[int], axis: str) -> None:
    """`InputError` unless the ranks along an axis hold the blocks of a batch whose program knows no other shares."""
    _joined("the batch", 0, counts, axis)


def _lengths(own: Sequence[int], device_mesh: DeviceMesh, axis: int) -> list[list[int]]:
    """For each of this rank's lengths, those of all ranks along an axis."""
    group = device_mesh.get_group(axis)
    # Lengths are known on the host. Where hosts can tell each other, no device is waited for.
    device = "cpu" if "cpu" in backends(group) else device_mesh.device_type
    mine = torch.tensor(own, dtype=torch.int64, device=device)
    pending = collectives.all_gather_into_tensor(mine, device_mesh.size(axis), group.group_name)
    gathered = collectives.wait_tensor(pending)
    ranks: list[list[int]] = gathered.view(device_mesh.size(axis), len(own)).t().tolist()
    return ranks


def _joined(name: str, dim: int, lengths: Sequence[int], axis: str) -> int:
    """The size of the dim whose parts have these lengths."""
    total = sum(lengths)
    part = math.ceil(total / len(lengths))
    expected = [max(0, min(part, total - rank * part)) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise InputError(
            f"the ranks along axis {axis!r} were given {', '.join(map(str, lengths))} elements of dim {dim} of {name}; "
            f"the parts that Shard({dim}) makes of {total} are {', '.join(map(str, expected))}: every rank takes "
            f"{part}, and the last ones what is left. Pass such shards, or DTensors, or inputs='global'."
        )
    return total


def _axis_name(device_mesh: DeviceMesh, axis: int) -> str:
    names = device_mesh.mesh_dim_names
    return names[axis] if names else str(axis)
