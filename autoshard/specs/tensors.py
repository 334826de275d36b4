"""The executable meaning of a spec: `shard` cuts a tensor for one rank, `unshard` joins the ranks' tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import PADDING, local_indices, local_shape, padded_indices
from autoshard.specs.spec import Spec

Coordinate = tuple[int, ...]


def shard(
    tensor: Tensor,
    spec: Spec,
    mesh: MeshShape,
    coordinate: Sequence[int],
    *,
    padded: bool = False,
    padding: float = 0,
) -> Tensor:
    """Return the local tensor of the rank at `coordinate` when `tensor` is placed by `spec`.

    The first rank of an axis of partial sums holds the value and the others zeros; for a product the others hold ones;
    for an average, maximum or minimum all hold the value.

    Args:
        tensor: the global tensor.
        coordinate: the rank's place on the mesh, one number per axis.
        padded: pad uneven shards with `padding` to `local_shape`, the shape that programs work with.
        padding: the fill value.

    Returns:
        A contiguous copy, of shape `true_local_shape` (or `local_shape` where padded); the tensor itself
        where the rank holds all of it.

    Raises:
        ValueError: the spec does not fit the tensor, or reduces by an operation other than sum, avg, product, max, min.
    """
    local = _select(tensor, local_indices(tensor.shape, spec, mesh, coordinate))
    for axis in spec.partial_axes:
        neutral = _NEUTRAL[_operation(spec, axis)]
        if coordinate[axis] > 0 and neutral is not None:
            local = torch.full_like(local, neutral)
    if not padded or tuple(local.shape) == local_shape(tensor.shape, spec, mesh):
        return local
    for dim, places in enumerate(_element_places(tensor.shape, spec, mesh, coordinate)):
        local = _spread(local, dim, places, padding)
    return local


def unshard(shards: Mapping[Coordinate, Tensor], spec: Spec, mesh: MeshShape, shape: Sequence[int]) -> Tensor:
    """Return the global tensor of the local tensors `shards`: the inverse of `shard`.

    Args:
        shards: local tensor of every coordinate of the mesh, padded or not; among replicas, coordinate 0 is read.
        shape: the global shape.

    Raises:
        ValueError: a coordinate is missing, or the spec does not fit the shape.
    """
    missing = [coordinate for coordinate in mesh.coordinates() if coordinate not in shards]
    if missing:
        raise ValueError(f"no shard for coordinate {missing[0]} of mesh {mesh}: every rank's local tensor is needed.")
    # Replicas are equal: read the first rank of their axes.
    distinct = {*spec.shard_axes, *spec.partial_axes}
    places = (range(size if axis in distinct else 1) for axis, size in enumerate(mesh.sizes))
    values = {place: shards[place] for place in itertools.product(*places)}
    for axis in reversed(spec.partial_axes):
        values = _reduce_axis(values, axis, _REDUCTIONS[_operation(spec, axis)])
    # Whole on every rank: no copy needed.
    if not spec.shard_axes:
        return values[(0,) * mesh.ndim]
    result = next(iter(values.values())).new_empty(tuple(shape))
    for coordinate, value in values.items():
        real = _without_padding(value, shape, spec, mesh, coordinate)
        _put(result, local_indices(shape, spec, mesh, coordinate), real)
    return result


def _element_places(
    shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]
) -> list[tuple[list[int], int]]:
    """Return, for every dim of a padded local tensor, the positions of true elements and the length."""
    padded = padded_indices(shape, spec, mesh, coordinate)
    return [([place for place, index in enumerate(dim) if index != PADDING], len(dim)) for dim in padded]


def _spread(local: Tensor, dim: int, places: tuple[list[int], int], padding: float) -> Tensor:
    """Scatter the slices of `local` along `dim` to their positions in a longer dim, and pad the rest."""
    positions, length = places
    if len(positions) == length:
        return local
    spread = local.new_full((*local.shape[:dim], length, *local.shape[dim + 1 :]), padding)
    return spread.index_copy_(dim, torch.tensor(positions, dtype=torch.int64, device=local.device), local)


def _without_padding(
    value: Tensor, shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]
) -> Tensor:
    """Return a local tensor without its padding, if it has any."""
    sizes = [len(index) for index in local_indices(shape, spec, mesh, coordinate)]
    # Without blocks, padding is at the end of a dim.
    if not spec.has_blocks:
        return value[tuple(slice(size) for size in sizes)]
    if list(value.shape) != sizes:
        for dim, (positions, _) in enumerate(_element_places(shape, spec, mesh, coordinate)):
            value = value.index_select(dim, torch.tensor(positions, dtype=torch.int64, device=value.device))
    return value


def pad_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `tensor` padded with zeros at the end of its dims up to `shape`; itself if it has that shape."""
    missing = [size - present for size, present in zip(shape, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    # `pad` takes pairs (before, after), last dim first.
    return torch.nn.functional.pad(tensor, [size for extra in reversed(missing) for size in (0, extra)])


def _select(tensor: Tensor, indices: Sequence[range | tuple[int, ...]]) -> Tensor:
    """Return the elements at `indices`: a copy, or the tensor itself where these are all of them."""
    local = tensor
    for dim, index in enumerate(indices):
        if isinstance(index, range):
            local = local.narrow(dim, index.start if len(index) else 0, len(index))
        else:
            local = local.index_select(dim, torch.tensor(index, dtype=torch.int64, device=tensor.device))
    return tensor if local.shape == tensor.shape else local.clone(memory_format=torch.contiguous_format)


def _reduce_axis(
    values: Mapping[Coordinate, Tensor], axis: int, reduction: Callable[[Sequence[Tensor]], Tensor]
) -> dict[Coordinate, Tensor]:
    """Return the values reduced over `axis`, whose coordinate becomes 0."""
    groups: dict[Coordinate, list[Tensor]] = {}
    for coordinate, value in values.items():
        groups.setdefault((*coordinate[:axis], 0, *coordinate[axis + 1 :]), []).append(value)
    return {coordinate: reduction(group) for coordinate, group in groups.items()}


def _put(tensor: Tensor, indices: Sequence[range | tuple[int, ...]], value: Tensor) -> None:
    """Write `value` to the elements at `indices`."""
    # Ranges become views: only scattered elements need index tensors.
    for dim, index in enumerate(indices):
        if isinstance(index, range):
            tensor = tensor.narrow(dim, index.start if len(index) else 0, len(index))
    if all(isinstance(index, range) for index in indices):
        tensor.copy_(value)
    else:
        places = [range(len(index)) if isinstance(index, range) else index for index in indices]
        tensor[_open_grid(places, value.device)] = value


def _open_grid(indices: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Return index tensors, one per dim, that address the Cartesian product of `indices` (as `numpy.ix_`)."""
    return tuple(
        torch.tensor(list(index), dtype=torch.int64, device=device).view([-1] + [1] * (len(indices) - dim - 1))
        for dim, index in enumerate(indices)
    )


def _operation(spec: Spec, axis: int) -> str:
    placement = spec[axis]
    assert isinstance(placement, Partial)
    if placement.reduce_op not in _REDUCTIONS:
        raise ValueError(
            f"{spec} reduces by {placement.reduce_op!r}; a tensor can be partial in {', '.join(_REDUCTIONS)}."
        )
    return str(placement.reduce_op)


_REDUCTIONS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": lambda values: reduce(torch.add, values),
    "avg": lambda values: reduce(torch.add, values) / len(values),
    "product": lambda values: reduce(torch.mul, values),
    "max": lambda values: reduce(torch.maximum, values),
    "min": lambda values: reduce(torch.minimum, values),
}

# The neutral element, held by all ranks but the first; None where all hold the value itself.
_NEUTRAL: dict[str, float | None] = {"sum": 0, "product": 1, "avg": None, "max": None, "min": None}
