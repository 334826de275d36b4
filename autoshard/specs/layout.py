"""The factor view of a spec: every tensor dim as a loop nest whose loops mesh axes may distribute (Rhino 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TypeVar

from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.size import ceil_div, is_dynamic
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import BlockShard, Spec, block_of, is_shard, shard_placement, split_factor_of

# Shapes recur layer after layer.
_CACHE_SIZE = 1 << 17

_Result = TypeVar("_Result")


def _memoize(
    function: Callable[[tuple[int, ...], Spec, MeshShape], _Result],
) -> Callable[[Sequence[int], Spec, MeshShape], _Result]:
    """Remember results by shape, spec and mesh; the shape may be any sequence."""
    # Keys are hashed fast: specs are interned, and meshes hash by their sizes alone.
    remembered = lru_cache(maxsize=_CACHE_SIZE)(function)

    @wraps(function)
    def call(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> _Result:
        return remembered(tuple(shape), spec, mesh)

    return call


@dataclass(frozen=True, slots=True)
class Segment:
    """One loop of a tensor dim.

    Attributes:
        size: number of steps.
        axis: the mesh axis that the loop is distributed over; None if it is whole on every rank.
        block, total: if the axis does not divide the loop, `block / total` is the largest fraction of it that one rank
            holds, in lowest terms unless it depends on dynamic sizes. The blocks of all ranks together are longer than
            the loop, with padding after its end. Both are 0 if the axis divides the loop.
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
    """Return the loop nest with adjacent undistributed loops merged and loops of size 1 dropped."""
    result: list[Segment] = []
    for segment in segments:
        if segment.size == 1:
            continue
        if segment.axis is None and result and result[-1].axis is None:
            result[-1] = Segment(result[-1].size * segment.size)
        else:
            result.append(segment)
    return tuple(result) or (Segment(1),)


@_memoize
def segments_of(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> Layout:
    """Return the loop nest, major to minor, of every dim of a tensor of `shape` under `spec`.

    As in torch, placements apply left to right over the mesh axes: each splits the local tensor of the axes before
    it. Axes of size 1 are ignored.

    Raises:
        ValueError: a dim is not divided evenly, or strided pieces of several axes do not nest.

    Source: Rhino 4.1, where a split is a dim with a stride.
    """
    _check_length(spec, mesh)
    dims: list[DimLayout] = [(Segment(size),) for size in shape]
    for axis, placement in enumerate(spec):
        if not is_shard(placement) or mesh.sizes[axis] == 1:
            continue
        dim = dim_of(placement, len(shape))
        # Blocks have padding, which a layout of equal parts cannot express.
        loops = None
        if not isinstance(placement, BlockShard):
            loops = _distribute(dims[dim], axis, mesh.sizes[axis], split_factor_of(placement), None)
        if loops is None:
            raise _uneven_error(shape, spec, mesh, axis, dims[dim])
        dims[dim] = loops
    return tuple(dims)


def _uneven_error(shape: tuple[int, ...], spec: Spec, mesh: MeshShape, axis: int, loops: DimLayout) -> ValueError:
    return ValueError(
        f"{spec} does not divide dim {dim_of(spec[axis], len(shape))} of a tensor of shape {shape} evenly on mesh "
        f"{mesh}: axis {mesh.names[axis]!r} of size {mesh.sizes[axis]}, split factor {split_factor_of(spec[axis])}, "
        f"does not fit into the loops {' x '.join(map(str, loops))} (size@axis). Choose sizes that divide the dim."
    )


def _distribute(segments: DimLayout, axis: int, size: int, outer: int, block: int | None) -> DimLayout | None:
    """Return `segments` with a loop of `size` steps distributed over `axis`, inside `outer` undistributed steps.

    With a `block`, every rank takes that many undistributed steps, and the last ranks hold padding after the end.

    Returns:
        None if the piece is not inside one undistributed loop, or the blocks do not cover a stretch, cut another loop,
        or meet another uneven axis.
    """
    if block is not None and (outer < 1 or block < 1 or any(segment.total for segment in segments)):
        return None
    result: list[Segment] = []
    for position, segment in enumerate(segments):
        if segment.axis is not None:
            result.append(segment)
            continue
        if outer > 1 and segment.size > 0 and outer % segment.size == 0:
            # This loop is wholly outside the distributed one: divide it out.
            outer //= segment.size
            result.append(segment)
            continue
        fraction = (0, 0)
        if block is None:
            if segment.size % (outer * size):
                return None
            steps = segment.size // (outer * size)
        else:
            # A block counts elements of the local tensor, where loops distributed over other axes have one step.
            below = math.prod(loop.size for loop in segments[position + 1 :] if loop.axis is None)
            steps, loop_steps = block // below, segment.size // outer
            if segment.size % outer or block % below or steps * size < loop_steps:
                return None
            if steps * size != loop_steps:
                # The lowest terms of dynamic sizes differ from value to value: keep the fraction as it is.
                common = 1 if is_dynamic(steps) or is_dynamic(loop_steps) else math.gcd(steps, loop_steps)
                fraction = (steps // common, loop_steps // common)
        # Split the loop in three: the steps outside, those of the axis, and those that each rank keeps.
        pieces = (Segment(outer), Segment(size, axis, *fraction), Segment(steps))
        return merge_loops([*result, *pieces, *segments[position + 1 :]])
    return None


def spec_of(layout: Layout, partial: Mapping[int, str], mesh: MeshShape) -> Spec:
    """Return the spec of a layout: the inverse of `segments_of`.

    Args:
        layout: loop nest of every dim.
        partial: reduce operation by axis, for the axes over which the tensor is partial.
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
    """Return the placement of the axis that the loop at `position` is distributed over."""
    segment, outer = segments[position], _outer_steps(segments, position)
    if not segment.total:
        return shard_placement(dim, outer)
    # Later mesh axes split this block further, so their steps are part of it.
    block = math.prod(
        loop.size for loop in segments[position + 1 :] if loop.axis is None or loop.axis > (segment.axis or 0)
    )
    alone = all(loop is segment or loop.axis is None for loop in segments)
    # Blocks of the size of torch.chunk are a plain `Shard`, which a DTensor can have.
    if alone and outer == 1 and block == ceil_div(block * segment.total // segment.block, segment.size):
        return shard_placement(dim)
    return BlockShard(dim, block, outer)


def _outer_steps(segments: DimLayout, position: int) -> int:
    """Return torch's split factor: the steps of the loops above `position` that no earlier mesh axis distributes."""
    axis = segments[position].axis
    assert axis is not None
    steps, share = 1, 1
    for loop in segments[:position]:
        if loop.axis is None or (loop.axis > axis and not loop.total):
            steps *= loop.size
        elif loop.axis > axis:
            # A later mesh axis distributes this loop: at this axis it has all of its true steps, without padding.
            steps, share = steps * loop.total, loop.block
    return steps // share


@_memoize
def canonical(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> Spec:
    """Return the normal form of a spec: equivalent specs of a tensor of `shape` have the same one.

    Raises:
        ValueError: a placement names a dim that the tensor does not have, or the spec has not one placement per axis.
    """
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
    # Only blocks have equivalents, such as a `Shard` whose chunks have the size of the blocks.
    if not normal.has_blocks:
        return normal
    try:
        layout = _padded_segments(shape, normal, mesh)
    except ValueError:
        return normal
    return spec_of(layout, {axis: normal[axis].reduce_op for axis in normal.partial_axes}, mesh)  # type: ignore[attr-defined]


@_memoize
def is_even(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> bool:
    """Return True if all ranks hold the same number of elements and pieces nest: `segments_of` succeeds."""
    try:
        segments_of(shape, spec, mesh)
    except ValueError:
        return False
    return True


def is_placeable(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> bool:
    """Return True if programs can hold local tensors of this spec, padded ones included: `local_shape` succeeds."""
    try:
        padded_segments_of(shape, spec, mesh)
    except ValueError:
        return False
    return True


@_memoize
def local_shape(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    """Return the shape of one rank's local tensor in a program, the same on every rank.

    A dim that its only axis does not divide evenly is padded to the ceiling, as in `torch.chunk`; a dim in blocks is
    padded to whole blocks. Routed rows count as spread evenly, though ranks may hold more or fewer at run time.

    Raises:
        ValueError: a dim is uneven and sharded by several axes, or strided, in other than blocks.
    """
    return tuple(
        math.prod(segment.size for segment in segments if segment.axis is None)
        for segments in padded_segments_of(shape, spec.balanced, mesh)
    )


def padded_segments_of(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> Layout:
    """Return the loop nest of the padded shape, where one axis of a dim may be distributed over an uneven loop.

    Raises:
        ValueError: a dim is uneven and sharded by several axes, or strided, in other than blocks.
    """
    return _padded_segments(shape, canonical(shape, spec, mesh), mesh)


@_memoize
def _padded_segments(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> Layout:
    _check_length(spec, mesh)
    dims: list[DimLayout] = [(Segment(size),) for size in shape]
    of_axis = {axis: dim_of(spec[axis], len(shape)) for axis in spec.shard_axes if mesh.sizes[axis] > 1}
    for axis, dim in of_axis.items():
        outer, block, size = split_factor_of(spec[axis]), block_of(spec[axis]), mesh.sizes[axis]
        if block is None and outer == 1 and list(of_axis.values()).count(dim) == 1:
            # The chunk size of torch.chunk.
            block = ceil_div(shape[dim], size)
        # A dim of size 0 is even, and no block covers it.
        loops = _distribute(dims[dim], axis, size, outer, block if shape[dim] != 0 else None)
        if loops is None:
            raise _uneven_error(shape, spec, mesh, axis, dims[dim])
        dims[dim] = loops
    for axis, dim in of_axis.items():
        if not _gathers(dims[dim]):
            raise _uneven_error(shape, spec, mesh, axis, dims[dim])
    return tuple(dims)


def _gathers(segments: DimLayout) -> bool:
    """Return True if, after a gather over an uneven loop, the true elements end at the same place on every rank."""
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
    """Return the indices, along every dim, of the elements that the rank at `coordinate` holds.

    This defines the meaning of a shard placement. `Shard` is `torch.chunk`; a strided shard splits into `split_factor`
    chunks, and each of these into one chunk per rank; for blocks see `BlockShard`. Chunks may be empty.

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
    """Return consecutive indices as a range, others as a tuple."""
    first = indices[0] if indices else 0
    # Ranges are sliced as views, without index tensors; nearly all shards are ranges.
    run = range(first, first + len(indices))
    return run if indices == list(run) else tuple(indices)


PADDING = -1
"""The index in `padded_indices` of an element that pads an uneven shard."""


def padded_indices(
    shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the padded local tensor, of shape `local_shape`; `PADDING` where it holds no element.

    Raises:
        ValueError: the spec is not placeable on this shape.
    """
    return tuple(_dim_indices(loops, coordinate) for loops in padded_segments_of(shape, spec, mesh))


def _dim_indices(segments: DimLayout, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return the indices along a dim, in the order of the local tensor."""
    # From the innermost loop to the outermost; `stride` is the number of true elements of the loops inside.
    indices, stride = [0], 1
    for loop in reversed(segments):
        steps = range(loop.size) if loop.axis is None else [coordinate[loop.axis]]
        end = stride * loop.total // loop.block if loop.total else stride * loop.size
        inner = [PADDING if index == PADDING else step * stride + index for step in steps for index in indices]
        # An index past the end of this loop would be an element of the next step of the enclosing loop.
        indices = [index if index < end else PADDING for index in inner]
        stride = end
    return tuple(indices)


def _chunk(indices: range | tuple[int, ...], chunks: int, place: int) -> range | tuple[int, ...]:
    """Return `torch.chunk(indices, chunks)[place]`, empty past the last chunk."""
    step = ceil_div(len(indices), chunks)
    return indices[place * step : (place + 1) * step]


def true_local_shape(shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return the shape, without padding, of the local tensor of the rank at `coordinate`."""
    return tuple(len(indices) for indices in local_indices(shape, spec, mesh, coordinate))


def dim_of(placement: Placement, ndim: int) -> int:
    """Return the non-negative dim of a shard placement; raise `ValueError` if there is no such dim."""
    dim: int = placement.dim  # type: ignore[attr-defined]
    if not -ndim <= dim < ndim:
        raise ValueError(f"{placement} splits dim {dim} of a tensor that has {ndim} dims.")
    return dim % ndim


def _check_length(spec: Spec, mesh: MeshShape) -> None:
    if len(spec) != mesh.ndim:
        raise ValueError(f"spec {spec} has {len(spec)} placements for the {mesh.ndim} axes of mesh {mesh}.")
