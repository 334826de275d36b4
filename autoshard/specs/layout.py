"""The factor view of a spec: every tensor dim as a loop nest whose loops mesh axes may distribute (Rhino 4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec, is_shard, shard_placement, split_factor_of

_CACHE_SIZE = 1 << 17


@dataclass(frozen=True, slots=True)
class Segment:
    """One loop of a tensor dim: `size` steps, distributed over mesh axis `axis`, or whole on every rank (None)."""

    size: int
    axis: int | None = None

    def __str__(self) -> str:
        return f"{self.size}" if self.axis is None else f"{self.size}@{self.axis}"


DimLayout = tuple[Segment, ...]
Layout = tuple[DimLayout, ...]


def merged(segments: Sequence[Segment]) -> DimLayout:
    """The same loop nest with neighbouring undistributed loops made one, and loops of one step left out."""
    result: list[Segment] = []
    for segment in segments:
        if segment.size == 1:
            continue
        if segment.axis is None and result and result[-1].axis is None:
            result[-1] = Segment(result[-1].size * segment.size)
        else:
            result.append(segment)
    return tuple(result) or (Segment(1),)


def segments_of(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> Layout:
    """The loop nest, major to minor, of every dim of a tensor of `shape` under `spec`.

    Placements are read as torch reads them: left to right over the mesh axes, each splitting the tensor that the
    axes before it left local. Axes of size 1 leave no trace.

    Raises:
        ValueError: a dim is not divided evenly, or strided pieces of several axes do not nest.

    Source: Rhino 4.1, where a split is a dim with a stride.
    """
    return _segments_of(tuple(shape), spec, mesh)


@lru_cache(maxsize=_CACHE_SIZE)
def _segments_of(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> Layout:
    _check_length(spec, mesh)
    dims: list[DimLayout] = [(Segment(size),) for size in shape]
    for axis, placement in enumerate(spec):
        if not is_shard(placement) or mesh.sizes[axis] == 1:
            continue
        dim = dim_of(placement, len(shape))
        carved = _carve(dims[dim], axis, mesh.sizes[axis], split_factor_of(placement))
        if carved is None:
            raise ValueError(
                f"{spec} does not divide dim {dim} of a tensor of shape {shape} evenly on mesh {mesh}: axis "
                f"{mesh.names[axis]!r} of size {mesh.sizes[axis]}, split factor {split_factor_of(placement)}, does not "
                f"fit into the loops {' x '.join(map(str, dims[dim]))} (size@axis). Choose sizes that divide the dim."
            )
        dims[dim] = carved
    return tuple(dims)


def _carve(segments: DimLayout, axis: int, size: int, outer: int) -> DimLayout | None:
    """`segments` with `size` steps given to `axis`, below `outer` steps of the undistributed loops.

    Returns None where the piece would not lie inside one undistributed loop.
    """
    result: list[Segment] = []
    for position, segment in enumerate(segments):
        if segment.axis is not None:
            result.append(segment)
        elif outer > 1 and segment.size > 0 and outer % segment.size == 0:
            outer //= segment.size
            result.append(segment)
        elif segment.size % (outer * size) == 0:
            pieces = (Segment(outer), Segment(size, axis), Segment(segment.size // (outer * size)))
            return merged([*result, *pieces, *segments[position + 1 :]])
        else:
            return None
    return None


def spec_of(layout: Layout, partial: Mapping[int, str], mesh: MeshShape) -> Spec:
    """The spec of a layout: the inverse of `segments_of`.

    Args:
        layout: loop nest of every dim.
        partial: reduce operation of every axis over which the tensor is still to be reduced.
        mesh: the mesh whose axes the layout names.

    Returns:
        The spec in normal form: split factor 1 is `Shard`, axes of size 1 are `Replicate`.
    """
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for axis, operation in partial.items():
        if mesh.sizes[axis] > 1:
            placements[axis] = Partial(operation)
    for dim, segments in enumerate(layout):
        for position, segment in enumerate(segments):
            if segment.axis is not None and segment.size > 1:
                placements[segment.axis] = shard_placement(dim, _outer(segments, position))
    return Spec.of(*placements)


def _outer(segments: DimLayout, position: int) -> int:
    """Steps of the loops above `position` that belong to no earlier mesh axis: torch's split factor."""
    own = segments[position].axis
    assert own is not None
    return math.prod(loop.size for loop in segments[:position] if loop.axis is None or loop.axis > own)


def canonical(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> Spec:
    """The one spec, among those that place a tensor of `shape` alike, in which others are compared and looked up.

    Raises:
        ValueError: a placement names a dim that the tensor has not, or there is not one placement per axis.
    """
    return _canonical(tuple(shape), spec, mesh)


@lru_cache(maxsize=_CACHE_SIZE)
def _canonical(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> Spec:
    _check_length(spec, mesh)
    placements: list[Placement] = []
    for placement, size in zip(spec, mesh.sizes, strict=True):
        if size == 1:
            placements.append(Replicate())
        elif is_shard(placement):
            placements.append(shard_placement(dim_of(placement, len(shape)), split_factor_of(placement)))
        else:
            placements.append(placement)
    return Spec.of(*placements)


def is_even(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> bool:
    """Whether every rank holds equally much and the pieces nest, so that `segments_of` has an answer."""
    return _is_even(tuple(shape), spec, mesh)


@lru_cache(maxsize=_CACHE_SIZE)
def _is_even(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> bool:
    try:
        _segments_of(shape, spec, mesh)
    except ValueError:
        return False
    return True


def local_shape(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of one rank's local tensor in a program, the same on every rank.

    A dim that its only axis does not divide evenly is padded to the ceiling, as in `torch.chunk`.

    Raises:
        ValueError: a dim is uneven and sharded by several axes, or strided.
    """
    return _local_shape(tuple(shape), spec, mesh)


@lru_cache(maxsize=_CACHE_SIZE)
def _local_shape(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    return tuple(
        math.prod(segment.size for segment in segments if segment.axis is None)
        for segments in padded_segments_of(shape, spec, mesh)
    )


def padded_segments_of(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> Layout:
    """As `segments_of`, of the shape in which dims sharded unevenly by one axis alone are padded to a multiple.

    Raises:
        ValueError: a dim is uneven and sharded by several axes, or strided.
    """
    spec = canonical(shape, spec, mesh)
    padded = list(shape)
    for axis in spec.shard_axes:
        dim = dim_of(spec[axis], len(shape))
        alone = all(other == axis or dim_of(spec[other], len(shape)) != dim for other in spec.shard_axes)
        if alone and split_factor_of(spec[axis]) == 1:
            padded[dim] = math.ceil(shape[dim] / mesh.sizes[axis]) * mesh.sizes[axis]
    return _segments_of(tuple(padded), spec, mesh)


def local_indices(
    shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]
) -> tuple[range | tuple[int, ...], ...]:
    """Indices, along every dim, of the elements that the rank at `coordinate` holds.

    This is the definition of what a shard placement means: `torch.chunk` for `Shard`, and for a strided shard first
    into `split_factor` chunks, then each of these into one chunk per rank. Chunks may be empty.
    """
    _check_length(spec, mesh)
    indices: list[range | tuple[int, ...]] = [range(size) for size in shape]
    for placement, size, place in zip(spec, mesh.sizes, coordinate, strict=True):
        if is_shard(placement):
            dim = dim_of(placement, len(shape))
            outer = split_factor_of(placement)
            if outer == 1:
                indices[dim] = _chunk(indices[dim], size, place)
            else:
                groups = (_chunk(indices[dim], outer, group) for group in range(outer))
                indices[dim] = tuple(index for group in groups for index in _chunk(group, size, place))
    return tuple(indices)


def _chunk(indices: range | tuple[int, ...], chunks: int, place: int) -> range | tuple[int, ...]:
    """Chunk number `place` of `chunks`, sized as `torch.chunk` does."""
    step = math.ceil(len(indices) / chunks)
    return indices[place * step : (place + 1) * step]


def true_local_shape(shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Shape of the local tensor, without padding, of the rank at `coordinate`: uneven and empty shards included."""
    return tuple(len(indices) for indices in local_indices(shape, spec, mesh, coordinate))


def dim_of(placement: Placement, ndim: int) -> int:
    """The dim, counted from 0, that a shard placement splits in a tensor of `ndim` dims; `ValueError` if not there."""
    dim: int = placement.dim  # type: ignore[attr-defined]
    if not -ndim <= dim < ndim:
        raise ValueError(f"{placement} splits dim {dim} of a tensor that has {ndim} dims.")
    return dim % ndim


def _check_length(spec: Spec, mesh: MeshShape) -> None:
    if len(spec) != mesh.ndim:
        raise ValueError(f"spec {spec} has {len(spec)} placements for the {mesh.ndim} axes of mesh {mesh}.")
