"""Global shapes of inputs that arrive as shards of different lengths, which the ranks tell each other.

Every rank checks the shards of all, so that a wrong one is an error on each.
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

# The shape of every input by its path.
Shapes = dict[str, list[int]]
# The shapes of the shards of every input, `[*axes of the mesh, dims]`, by its path.
ShardShapes = Mapping[str, np.ndarray]


def gather_shapes(shapes: Mapping[str, Sequence[int]], hosts: HostGroups) -> ShardShapes:
    """Return the shapes of the shards of all ranks; `shapes` are those of this rank, in one order on all ranks."""
    # One message for all inputs, cut at their dims again.
    table = hosts.gather_numbers([size for shape in shapes.values() for size in shape])
    ends = np.cumsum([len(shape) for shape in shapes.values()])[:-1]
    return dict(zip(shapes, np.split(table, ends, axis=-1), strict=True))


def even_shapes(
    shapes: Mapping[str, Sequence[int]], placements: Mapping[str, Sequence[Placement]], device_mesh: DeviceMesh
) -> Shapes:
    """Return the global shapes of inputs whose shards have the same shape on every rank."""
    whole = {name: list(shape) for name, shape in shapes.items()}
    for name, shape in whole.items():
        for axis, placement in enumerate(placements[name]):
            # A number has no rows, whatever the placement of inputs that no plan has met.
            if shape and is_shard(placement):
                shape[dim_of(placement, len(shape))] *= device_mesh.size(axis)
    return whole


def whole_shapes(
    tables: ShardShapes,
    placements: Mapping[str, Sequence[Placement]],
    device_mesh: DeviceMesh,
    shares: tuple[int, Sequence[int]] | None = None,
) -> Shapes:
    """Return the global shapes of inputs whose shards have different shapes.

    Args:
        tables: the shapes of the shards of all ranks.
        placements: of every input, one per mesh axis.
        device_mesh: the mesh.
        shares: a mesh axis whose ranks have unequal shares, and the share of each.

    Raises:
        InputError: the lengths are not those of the parts that `Shard` makes of one tensor, or ranks that must have the
            same tensor have other shapes; on every rank.
    """
    whole: Shapes = {}
    for name, shards in tables.items():
        sizes, dims = shards, shards.shape[-1]
        # The last axis is joined first, as it split last.
        for axis in reversed(range(device_mesh.ndim if dims else 0)):
            placement, names = placements[name][axis], (name, _axis_name(device_mesh, axis))
            split = dim_of(placement, dims) if is_shard(placement) else None
            counts = shares[1] if shares and shares[0] == axis else None
            # The ranks along the axis, for every line of ranks: the axes behind it are joined.
            lines = sizes.reshape(-1, device_mesh.size(axis), dims).tolist()
            joined = [
                [
                    _whole_size(names, dim, lengths, dim == split, counts)
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
    """Return the number of rows of every rank along an axis with unequal shares.

    Raises:
        InputError: a rank has unequal numbers of rows of different inputs, or none; on every rank.
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
    """Raise an `InputError` unless the counts along an axis are those of the blocks that `Shard` makes."""
    _whole_size(("the batch", axis), 0, counts, True, None)


def _whole_size(
    names: tuple[str, str], dim: int, lengths: Sequence[int], is_split: bool, shares: Sequence[int] | None
) -> int:
    """Return the global size of a dim, from its lengths on the ranks along an axis; names of the input and the axis.

    If the axis splits the dim, the ranks have blocks, or the given shares.
    """
    name, axis = names
    facts = f"the ranks along axis {axis!r} were given {', '.join(map(str, lengths))} elements of dim {dim} of {name}"
    if not is_split:
        if min(lengths) != max(lengths):
            raise InputError(f"{facts}, which they hold alike: pass tensors of one size there.")
        return lengths[0]
    if shares is not None:
        return sum(shares)
    # As `torch.chunk` splits: parts of one size, of which the last ones are shorter or empty.
    total = sum(lengths)
    part = math.ceil(total / len(lengths))
    expected = [max(0, min(part, total - rank * part)) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise InputError(
            f"{facts}; the parts that Shard({dim}) makes of {total} are {', '.join(map(str, expected))}: every rank "
            f"takes {part}, and the last ones what is left. Pass such shards, or DTensors, or inputs='global'."
        )
    return total


def _axis_name(device_mesh: DeviceMesh, axis: int) -> str:
    names = device_mesh.mesh_dim_names
    return names[axis] if names else str(axis)
