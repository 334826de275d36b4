"""The factor view of a spec: every tensor dim as a loop nest whose loops mesh axes may distribute (Rhino 4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.size import ceil_div, is_dynamic
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import BlockShard, Spec, block_of, is_shard, shard_placement, split_factor_of

_CACHE_SIZE = 1 << 17


@dataclass(frozen=True, slots=True)
class Segment:
    """One loop of a tensor dim: `size` steps, distributed over mesh axis `axis`, or whole on every rank (None).

    Where an axis does not divide a loop, `block` / `total`, in lowest terms unless it depends on dynamic sizes, is the
    share of it that one rank holds at most: the ranks' blocks together are longer than the loop, and what is missing
    behind its end is padding. Both are 0 where the axis divides.
    """

    size: int
    axis: int | None = None
    block: int = 0
    total: int = 0

    def __str__(self) -> str:
        uneven = f"({self.block}/{self.total})" if self.total else ""
        return f"{self.size}" if self.axis is None else f"{self.size}@{self.axis}{uneven}"


DimLayout = tuple[Segment, ...]
Layout = tuple[DimLayout, ...]


def merge_loops(segments: Sequence[Segment]) -> DimLayout:
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
        carved = None
        if not isinstance(placement, BlockShard):
            carved = _distribute(dims[dim], axis, mesh.sizes[axis], split_factor_of(placement))
        if carved is None:
            raise _uneven_error(shape, spec, mesh, axis, dims[dim])
        dims[dim] = carved
    return tuple(dims)


def _uneven_error(shape: tuple[int, ...], spec: Spec, mesh: MeshShape, axis: int, loops: DimLayout) -> ValueError:
    return ValueError(
        f"{spec} does not divide dim {dim_of(spec[axis], len(shape))} of a tensor of shape {shape} evenly on mesh "
        f"{mesh}: axis {mesh.names[axis]!r} of size {mesh.sizes[axis]}, split factor {split_factor_of(spec[axis])}, "
        f"does not fit into the loops {' x '.join(map(str, loops))} (size@axis). Choose sizes that divide the dim."
    )


def _distribute(segments: DimLayout, axis: int, size: int, outer: int) -> DimLayout | None:
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
            return merge_loops([*result, *pieces, *segments[position + 1 :]])
        else:
            return None
    return None


def _distribute_blocks(segments: DimLayout, axis: int, size: int, outer: int, block: int) -> DimLayout | None:
    """As `_distribute`, with blocks of `block` undistributed steps, behind whose end the last ranks hold padding.

    Returns None where blocks do not cover a stretch, would cut another loop, or another axis is uneven already.
    """
    if outer < 1 or block < 1 or any(segment.total for segment in segments):
        return None
    result: list[Segment] = []
    for position, segment in enumerate(segments):
        if segment.axis is not None:
            result.append(segment)
        elif outer > 1 and outer % segment.size == 0:
            outer //= segment.size
            result.append(segment)
        else:
            below = math.prod(loop.size for loop in segments[position + 1 :] if loop.axis is None)
            steps, whole = block // below, segment.size // outer
            if segment.size % outer or block % below or steps * size < whole:
                return None
            share = (0, 0) if steps * size == whole else _fraction(steps, whole)
            pieces = (Segment(outer), Segment(size, axis, *share), Segment(steps))
            return merge_loops([*result, *pieces, *segments[position + 1 :]])
    return None


def _fraction(block: int, total: int) -> tuple[int, int]:
    """In lowest terms, where these are the same whatever the sizes."""
    common = 1 if is_dynamic(block) or is_dynamic(total) else math.gcd(block, total)
    return block // common, total // common


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
                placements[segment.axis] = _placement(dim, segments, position)
    return Spec.of(*placements)


def _placement(dim: int, segments: DimLayout, position: int) -> Placement:
    """The placement of the axis that is distributed over the loop at `position`."""
    own, outer = segments[position], _outer_steps(segments, position)
    if not own.total:
        return shard_placement(dim, outer)
    block = math.prod(
        loop.size for loop in segments[position + 1 :] if loop.axis is None or loop.axis > (own.axis or 0)
    )
    alone = all(loop is own or loop.axis is None for loop in segments)
    if alone and outer == 1 and block == ceil_div(block * own.total // own.block, own.size):
        return shard_placement(dim)
    return BlockShard(dim, block, outer)


def _outer_steps(segments: DimLayout, position: int) -> int:
    """Steps of the loops above `position` that belong to no earlier mesh axis: torch's split factor."""
    own = segments[position].axis
    assert own is not None
    steps, share = 1, 1
    for loop in segments[:position]:
        if loop.axis is None or (loop.axis > own and not loop.total):
            steps *= loop.size
        elif loop.axis > own:  # not yet split when `own` is: its loop has all its true steps
            steps, share = steps * loop.total, loop.block
    return steps // share


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
            dim, outer, block = dim_of(placement, len(shape)), split_factor_of(placement), block_of(placement)
            placements.append(shard_placement(dim, outer) if block is None else BlockShard(dim, block, outer))
        else:
            placements.append(placement)
    normal = Spec.of(*placements)
    if not normal.has_blocks:
        return normal
    try:
        layout = _padded_segments_of(shape, normal, mesh)
    except ValueError:
        return normal
    return spec_of(layout, {axis: normal[axis].reduce_op for axis in normal.partial_axes}, mesh)  # type: ignore[attr-defined]


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


def is_placeable(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> bool:
    """Whether programs know local tensors of this spec, padded ones included, so that `local_shape` has an answer."""
    try:
        padded_segments_of(shape, spec, mesh)
    except ValueError:
        return False
    return True


def local_shape(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of one rank's local tensor in a program, the same on every rank.

    A dim that its only axis does not divide evenly is padded to the ceiling, as in `torch.chunk`, and one in blocks to
    whole blocks. Of routed rows, it is the balanced share: when the program runs, ranks may hold more or fewer.

    Raises:
        ValueError: a dim is uneven and sharded by several axes, or strided, in other than blocks.
    """
    return _local_shape(tuple(shape), spec, mesh)


@lru_cache(maxsize=_CACHE_SIZE)
def _local_shape(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    return tuple(
        math.prod(segment.size for segment in segments if segment.axis is None)
        for segments in padded_segments_of(shape, spec.balanced, mesh)
    )


def padded_segments_of(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> Layout:
    """As `segments_of`, of the padded shape: uneven loops may be distributed over one axis of a dim.

    Raises:
        ValueError: a dim is uneven and sharded by several axes, or strided, in other than blocks.
    """
    return _padded_segments_of(tuple(shape), canonical(shape, spec, mesh), mesh)


@lru_cache(maxsize=_CACHE_SIZE)
def _padded_segments_of(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> Layout:
    _check_length(spec, mesh)
    dims: list[DimLayout] = [(Segment(size),) for size in shape]
    of_axis = {axis: dim_of(spec[axis], len(shape)) for axis in spec.shard_axes if mesh.sizes[axis] > 1}
    for axis, dim in of_axis.items():
        outer, block, size = split_factor_of(spec[axis]), block_of(spec[axis]), mesh.sizes[axis]
        if block is None and outer == 1 and list(of_axis.values()).count(dim) == 1:
            block = ceil_div(shape[dim], size)  # torch.chunk's
        even = block is None or shape[dim] == 0
        loops = dims[dim]
        carved = (
            _distribute(loops, axis, size, outer) if even else _distribute_blocks(loops, axis, size, outer, block or 0)
        )
        if carved is None:
            raise _uneven_error(shape, spec, mesh, axis, loops)
        dims[dim] = carved
    for axis, dim in of_axis.items():
        if not _gathers(dims[dim]):
            raise _uneven_error(shape, spec, mesh, axis, dims[dim])
    return tuple(dims)


def _gathers(segments: DimLayout) -> bool:
    """Whether the loops below an uneven one, gathered over its axis, end where the dim does on every rank."""
    uneven = next((segment for segment in segments if segment.total), None)
    if uneven is None:
        return True
    steps = 1
    for segment in segments[segments.index(uneven) + 1 :]:
        if segment.axis is None:
            steps *= segment.size
        elif steps * uneven.total % uneven.block:
            return False
    return True


def local_indices(
    shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]
) -> tuple[range | tuple[int, ...], ...]:
    """Indices, along every dim, of the elements that the rank at `coordinate` holds.

    This is the definition of what a shard placement means: `torch.chunk` for `Shard`, and for a strided shard first
    into `split_factor` chunks, then each of these into one chunk per rank; for blocks see `BlockShard`. Chunks may be
    empty.

    Raises:
        ValueError: the spec does not fit the shape.
    """
    _check_length(spec, mesh)
    if spec.has_blocks:
        padded = padded_indices(shape, spec, mesh, coordinate)
        return tuple(_as_range([index for index in dim if index != PADDING]) for dim in padded)
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


def _as_range(indices: list[int]) -> range | tuple[int, ...]:
    """Indices as a range where each follows the one before."""
    first = indices[0] if indices else 0
    found = range(first, first + len(indices))
    return found if indices == list(found) else tuple(indices)


PADDING = -1
"""What stands in `padded_indices` for an element that pads an uneven shard."""


def padded_indices(
    shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """As `local_indices`, of the padded local tensor, of shape `local_shape`: `PADDING` where it holds no element.

    Raises:
        ValueError: no program places a tensor of this shape so.
    """
    return tuple(_dim_indices(loops, coordinate) for loops in padded_segments_of(shape, spec, mesh))


def _dim_indices(segments: DimLayout, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Indices along a dim, from the innermost loop to the outermost."""
    indices, stride = [0], 1
    for loop in reversed(segments):
        steps = range(loop.size) if loop.axis is None else [coordinate[loop.axis]]
        end = stride * loop.total // loop.block if loop.total else stride * loop.size
        inner = [PADDING if index == PADDING else step * stride + index for step in steps for index in indices]
        indices = [index if index < end else PADDING for index in inner]
        stride = end
    return tuple(indices)


def _chunk(indices: range | tuple[int, ...], chunks: int, place: int) -> range | tuple[int, ...]:
    """Chunk number `place` of `chunks`, sized as `torch.chunk` does."""
    step = ceil_div(len(indices), chunks)
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
