"""Whole sizes of inputs that arrive as shards of different lengths: the ranks tell each other how long theirs are.

Every rank looks at the shards of all, so that what is wrong with one is an error on each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from autoshard.errors import InputError
from autoshard.runtime.host_groups import HostGroups
from autoshard.specs.layout import dim_of
from autoshard.specs.spec import is_shard

Shapes = dict[str, list[int]]
"""Shape of every input by its path."""

ShardShapes = Mapping[str, np.ndarray]
"""The shapes of the shards of every input, `[*axes of the mesh, dims]`, by its path."""


def gather_shapes(shapes: Mapping[str, Sequence[int]], hosts: HostGroups) -> ShardShapes:
    """The shapes of the shards of all ranks: a message from host to host along every axis.

    Args:
        shapes: of this rank's shard of every input, in the same order on every rank.
        hosts: the groups of the mesh.
    """
    table = hosts.gather_numbers([size for shape in shapes.values() for size in shape])
    ends = np.cumsum([len(shape) for shape in shapes.values()])[:-1]
    return dict(zip(shapes, np.split(table, ends, axis=-1), strict=True))


def even_shapes(
    shapes: Mapping[str, Sequence[int]], placements: Mapping[str, Sequence[Placement]], device_mesh: DeviceMesh
) -> Shapes:
    """The shapes of the tensors of which every rank was given a shard of one size.

    Args:
        shapes: of this rank's shard of every input.
        placements: how inputs lie, one placement per mesh axis.
        device_mesh: the mesh.
    """
    whole = {name: list(shape) for name, shape in shapes.items()}
    for name, shape in whole.items():
        for axis, placement in enumerate(placements[name]):
            if shape and is_shard(placement):
                shape[dim_of(placement, len(shape))] *= device_mesh.size(axis)
    return whole


def whole_shapes(
    tables: ShardShapes,
    placements: Mapping[str, Sequence[Placement]],
    device_mesh: DeviceMesh,
    shares: tuple[int, Sequence[int]] | None = None,
) -> Shapes:
    """The shapes of the tensors of which the ranks were given shards of different sizes.

    Args:
        tables: the shapes of the shards of all ranks.
        placements, device_mesh: as for `even_shapes`.
        shares: a mesh axis whose ranks hold what they want, and how much each does.

    Raises:
        InputError: the lengths are not those of the parts that `Shard` makes of one tensor, or ranks that hold the same
            have other shapes; on every rank.
    """
    whole: Shapes = {}
    for name, shards in tables.items():
        sizes, dims = shards, shards.shape[-1]
        for axis in reversed(range(device_mesh.ndim if dims else 0)):
            placement, names = placements[name][axis], (name, _axis_name(device_mesh, axis))
            split = dim_of(placement, dims) if is_shard(placement) else None
            lines = sizes.reshape(-1, device_mesh.size(axis), dims).tolist()  # the axes behind are gone
            joined = [
                [
                    _whole_size(names, dim, lengths, dim == split, shares[1] if shares and shares[0] == axis else None)
                    for dim, lengths in enumerate(zip(*line, strict=True))
                ]
                for line in lines
            ]
            sizes = np.array(joined)
        whole[name] = sizes.reshape(dims).tolist() if dims else []
    return whole


def local_shares(
    tables: ShardShapes, placements: Mapping[str, Sequence[Placement]], device_mesh: DeviceMesh, axis: int
) -> list[int]:
    """How many rows every rank along a shared axis was given.

    Args:
        tables, placements, device_mesh: as for `whole_shapes`.
        axis: whose ranks hold as many rows as they want, the same of every input that lies in shares.

    Raises:
        InputError: a rank was given other numbers of rows of different inputs, or none; on every rank.
    """
    first, counts = "", list[int]()
    for name, shards in tables.items():
        if not shards.shape[-1] or not is_shard(placements[name][axis]):
            continue
        rows = np.moveaxis(shards[..., dim_of(placements[name][axis], shards.shape[-1])], axis, -1)
        for line in rows.reshape(-1, rows.shape[-1]).tolist():
            first, counts = first or name, counts or line
            if line != counts or min(line) < 1:
                raise InputError(
                    f"the ranks along axis {_axis_name(device_mesh, axis)!r} were given {', '.join(map(str, line))} "
                    f"rows of {name} and {', '.join(map(str, counts))} of {first}: a rank takes equally many "
                    "of all inputs, and one at least."
                )
    return counts


def check_blocks(counts: Sequence[int], axis: str) -> None:
    """`InputError` unless the ranks along an axis hold the blocks of a batch whose program knows no other shares."""
    _whole_size(("the batch", axis), 0, counts, True, None)


def _whole_size(
    names: tuple[str, str], dim: int, lengths: Sequence[int], is_split: bool, shares: Sequence[int] | None
) -> int:
    """The size of a dim of which the ranks along an axis were given so much.

    Args:
        names: of the input and of the axis.
        dim, lengths: the dim, and how much of it each rank was given.
        is_split: whether the axis splits it.
        shares: what each rank holds of what the axis splits, where that is no block.
    """
    name, axis = names
    given = f"the ranks along axis {axis!r} were given {', '.join(map(str, lengths))} elements of dim {dim} of {name}"
    if not is_split:
        if min(lengths) != max(lengths):
            raise InputError(f"{given}, which they hold alike: pass tensors of one size there.")
        return lengths[0]
    if shares is not None:
        return sum(shares)
    total = sum(lengths)
    part = math.ceil(total / len(lengths))
    expected = [max(0, min(part, total - rank * part)) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise InputError(
            f"{given}; the parts that Shard({dim}) makes of {total} are {', '.join(map(str, expected))}: every rank "
            f"takes {part}, and the last ones what is left. Pass such shards, or DTensors, or inputs='global'."
        )
    return total


def _axis_name(device_mesh: DeviceMesh, axis: int) -> str:
    names = device_mesh.mesh_dim_names
    return names[axis] if names else str(axis)
