"""Data axes: the mesh axes along which each rank loads its own rows of the batch, as in data parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.errors import MeshError
from autoshard.specs.axes import MeshShape

_DATA_NAMES = ("dp", "ddp", "fsdp", "hsdp", "data", "batch")
"""Names of data axes by custom; names that begin with one of them (`dp_shard`) are, too."""


def find_data_axes(mesh: MeshShape) -> tuple[str, ...]:
    """Return the names of the data axes of a mesh: those with customary names, else its only axis.

    Raises:
        MeshError: several axes have more than one rank, and no name says that ranks load rows of their own along it.
    """
    named = tuple(name for name in mesh.names if name.startswith(_DATA_NAMES))
    if named:
        return named
    long = tuple(axis.name for axis in mesh.axes if axis.size > 1) or mesh.names[:1]
    if len(long) > 1:
        raise MeshError(
            f"the mesh {mesh} has several axes, and no name says along which ranks have rows of their own: pass "
            f"data_axes=({long[0]!r},), the names of these axes. Ranks along the others pass the same rows."
        )
    return long


def check_data_axes(mesh: MeshShape, names: Iterable[str]) -> tuple[str, ...]:
    """Return the data axes of a mesh in its order; raise a `MeshError` unless they are names of axes."""
    unknown = [names] if isinstance(names, str) else [name for name in names if name not in mesh.names]
    if unknown:
        raise MeshError(f"data_axes={names!r}: it is a tuple of names of mesh axes, out of {', '.join(mesh.names)}.")
    return tuple(name for name in mesh.names if name in tuple(names))


def axes_of_rows(mesh: MeshShape, tables: Iterable[Sequence[Placement | None]]) -> tuple[str, ...]:
    """Return the names of the axes along which any of the tensors is `Shard(0)`."""
    rows = [placements for placements in tables if placements]
    return tuple(name for axis, name in enumerate(mesh.names) if any(row[axis] == Shard(0) for row in rows))


def row_placements(mesh: MeshShape, data_axes: Sequence[str], dim: int = 0) -> tuple[Placement, ...]:
    """Return the placements of a tensor whose rows, along a dim, are split over the data axes."""
    return tuple(Shard(dim) if axis.name in data_axes and axis.size > 1 else Replicate() for axis in mesh.axes)


def part_of_rows(mesh: MeshShape, data_axes: Sequence[str], coordinate: Sequence[int]) -> tuple[int, int]:
    """Return into how many parts the data axes split a batch, and the index of the part of the rank at a coordinate.

    Parts are in the order of `Shard(0)`.
    """
    count, index = 1, 0
    for axis, name in enumerate(mesh.names):
        if name in data_axes:
            count, index = count * mesh.sizes[axis], index * mesh.sizes[axis] + coordinate[axis]
    return count, index


def names_with_batch(shapes: Mapping[str, Sequence[int]], *, may_be_one: bool = False) -> frozenset[str]:
    """Return the names of the tensors with a batch dim: those whose first dim has the most common size.

    Args:
        shapes: name -> shape.
        may_be_one: True if the batch may be a single row, as on one rank: it is if the first tensor has one row.
    """
    firsts = {name: int(shape[0]) for name, shape in shapes.items() if len(shape)}
    # Tensors that are broadcast over the batch have a first dim of size 1, too, which must not count as a batch.
    smallest = 1 if may_be_one and next(iter(firsts.values()), 0) == 1 else 2
    sizes = Counter(size for size in firsts.values() if size >= smallest).most_common(1)
    return frozenset(name for name, size in firsts.items() if sizes and size == sizes[0][0])
