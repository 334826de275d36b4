"""Shards: whole tensors split into `DTensor`s, placed in a module in place, and gathered again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoshard.errors import MeshError, PlanError, reason_of
from autoshard.names import suggestion
from autoshard.runtime import _torch
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from autoshard.specs.layout import dim_of, is_even, local_indices, true_local_shape
from autoshard.specs.spec import Spec, is_shard, shard_placement, split_factor_of
from autoshard.specs.tensors import pad_to, shard

Coordinate = Sequence[int]


def coordinate_of(device_mesh: DeviceMesh) -> Coordinate:
    """Return this rank's coordinate on every mesh axis; raise a `MeshError` if the rank is not on the mesh."""
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            f"this rank ({dist.get_rank()}) is not on the mesh {device_mesh}: call autoshard on the ranks of the mesh "
            f"alone, or build the mesh over all ranks."
        )
    return coordinate


def distribute(tensor: Tensor, device_mesh: DeviceMesh, spec: Spec) -> DTensor:
    """Return `tensor` as a leaf `DTensor` placed by `spec`, with rank 0's numbers, as in DDP.

    Args:
        tensor: the whole tensor on every rank, or a `DTensor` on the same mesh. It is read and not kept. A meta tensor
            gives a meta `DTensor`, without communication.
        device_mesh: the mesh.
        spec: one placement per mesh axis.

    Raises:
        ValueError: the spec does not fit the tensor or the mesh.
        MeshError: the rank is not on the mesh, or the `DTensor` is on another mesh.
    """
    check_fits(tensor.shape, spec, device_mesh)
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            _check_mesh(tensor, device_mesh)
            whole = gather_full_tensor(tensor)
        elif tensor.is_meta:
            whole = tensor
        else:
            whole = from_first_rank(tensor.to(device_mesh.device_type), device_mesh)
        local = cut(whole, device_mesh, spec)
    result = wrap(local, device_mesh, spec, tensor.shape, tensor.dtype)
    result.requires_grad = tensor.requires_grad
    return result


def redistribute(tensor: DTensor, placements: Sequence[Placement], async_op: bool = False) -> DTensor:
    """Return a `DTensor` with other placements, differentiably, as `DTensor.redistribute` does.

    Strided pieces are gathered to the whole tensor first: torch 2.11 refuses some of these changes, and 2.13 gives
    wrong elements if several axes are involved.
    """
    if any(split_factor_of(each) > 1 for each in (*tensor.placements, *placements) if is_shard(each)):
        return _Redistribution.apply(tensor, Spec(tuple(placements)))
    return DTensor.redistribute(tensor, tensor.device_mesh, placements, async_op=async_op)


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, spec: Spec) -> DTensor:
        ctx.spec = source = Spec(tuple(tensor.placements))
        if source.partial_axes:
            summed = [Replicate() if placement.is_partial() else placement for placement in source]
            tensor = DTensor.redistribute(tensor, tensor.device_mesh, summed)
            ctx.spec = Spec(tuple(summed))
        return distribute(tensor.detach(), tensor.device_mesh, spec)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return _Redistribution.apply(gradient, ctx.spec), None


def cut(tensor: Tensor, device_mesh: DeviceMesh, spec: Spec) -> Tensor:
    """Return a copy of this rank's part of a whole tensor that every rank has, without communication."""
    return _cut(tensor.detach(), coordinate_of(device_mesh), MeshShape.of(device_mesh), spec)


@_torch.per_rank
def _cut(tensor: Tensor, coordinate: Coordinate, mesh: MeshShape, spec: Spec) -> Tensor:
    local = shard(tensor, spec, mesh, coordinate)
    return local.clone(memory_format=torch.contiguous_format) if local is tensor else local


def from_first_rank(tensor: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """Broadcast the first rank's `tensor` over the mesh, in place if it is contiguous, and return it."""
    tensor = written_out(tensor.detach()).contiguous()
    # Axis by axis: each broadcast reaches the ranks whose later coordinates are zero.
    for axis in range(device_mesh.ndim):
        if device_mesh.size(axis) > 1:
            dist.broadcast(tensor, group=device_mesh.get_group(axis), group_src=0)
    return tensor


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a `DTensor` without partial placements, or a copy of a plain tensor."""
    # `DTensor.full_tensor` is wrong if several axes shard one dim into strided pieces.
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    spec, device_mesh = Spec(tensor.placements), tensor.device_mesh
    assert not spec.partial_axes, f"{spec} is partial: gather_full_tensor() puts shards together"
    if tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    mesh, coordinate = MeshShape.of(device_mesh), coordinate_of(device_mesh)
    value, shape = local_of(tensor), tuple(tensor.shape)
    if spec.is_replicated:
        return value.clone()
    # Axes are joined in reverse order: the last axis was split last.
    for axis in reversed(spec.shard_axes):
        split = _truncated_spec(spec, axis + 1)
        value = _pad(value, _largest_shape(shape, split, mesh))
        group = device_mesh.get_group(axis).group_name
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(value, mesh.sizes[axis], group))
        value = _assemble(gathered, shape, split, mesh, coordinate)
    return value


def _truncated_spec(spec: Spec, axes: int) -> Spec:
    """Return the spec with all axes from number `axes` on replicated."""
    return Spec.of(*spec.placements[:axes], *Spec.all_replicated(len(spec) - axes))


def _largest_shape(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    """Return the smallest shape that holds any rank's shard."""
    # Even shards are equal, so one coordinate is enough; a large mesh has many.
    coordinates = [(0,) * mesh.ndim] if is_even(shape, spec, mesh) else mesh.coordinates()
    shapes = [true_local_shape(shape, spec, mesh, coordinate) for coordinate in coordinates]
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


@_torch.per_rank
def _pad(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    return pad_to(value, shape).contiguous()


@_torch.per_rank
def _assemble(gathered: Tensor, shape: tuple[int, ...], spec: Spec, mesh: MeshShape, coordinate: Coordinate) -> Tensor:
    """Copy the padded parts of all ranks along the last shard axis, stacked in `gathered`, to their positions."""
    axis = spec.shard_axes[-1]
    dim = dim_of(spec[axis], len(shape))
    before = local_indices(shape, _truncated_spec(spec, axis), mesh, coordinate)
    position = {index: place for place, index in enumerate(before[dim])}
    result = gathered.new_empty([len(indices) for indices in before])
    for place, part in enumerate(gathered.chunk(mesh.sizes[axis]) if gathered.numel() else ()):
        indices = local_indices(shape, spec, mesh, (*coordinate[:axis], place, *coordinate[axis + 1 :]))
        part = part[tuple(slice(len(along)) for along in indices)]
        # Strided and uneven parts are not contiguous.
        where = torch.tensor([position[index] for index in indices[dim]], dtype=torch.int64, device=part.device)
        result.index_copy_(dim, where, part)
    return result


def written_out(tensor: Tensor) -> Tensor:
    """Return the tensor, materialised if it is a lazy conjugate or negative view."""
    return tensor.resolve_conj().resolve_neg()


def local_of(tensor: Tensor) -> Tensor:
    """Return the unpadded local tensor of a `DTensor`, outside autograd, sharing memory; a plain tensor itself."""
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def wrap(local: Tensor, device_mesh: DeviceMesh, spec: Spec, shape: Sequence[int], dtype: torch.dtype) -> DTensor:
    """Return a `DTensor` around a contiguous, unpadded local tensor, without checks or autograd (about 8 µs)."""
    placements = _normalize_spec(spec, len(shape)).placements
    return _torch.dtensor(local, _torch.dtensor_spec(device_mesh, placements, shape, dtype))


def wrap_like(local: Tensor, model: DTensor) -> DTensor:
    """Return a `DTensor` as `wrap` does, placed like another one, such as its parameter (about 3 µs)."""
    return _torch.dtensor(local, _torch.dtensor_spec_of(model))


@lru_cache(maxsize=1 << 14)
def _normalize_spec(spec: Spec, ndim: int) -> Spec:
    """Return the spec with dims counted from 0, as torch's operators expect."""
    for axis in spec.shard_axes:
        placement = spec[axis]
        dim = dim_of(placement, ndim)
        if placement.dim != dim:  # type: ignore[attr-defined]
            spec = spec.replace(axis, shard_placement(dim, split_factor_of(placement)))
    return spec


def check_fits(shape: Sequence[int], spec: Spec, device_mesh: DeviceMesh) -> None:
    """Raise a `ValueError` unless the spec has one placement per mesh axis, each sharding an existing dim."""
    # The indices are not used: computing them raises the errors.
    local_indices(shape, spec, MeshShape.of(device_mesh), (0,) * device_mesh.ndim)


def _check_mesh(tensor: DTensor, device_mesh: DeviceMesh) -> None:
    if tensor.device_mesh != device_mesh:
        raise MeshError(
            f"a tensor of shape {tuple(tensor.shape)} lies on the mesh {tensor.device_mesh} and can't be placed on "
            f"{device_mesh}: tensors stay on the mesh where they are."
        )


def replace_parameters(module: nn.Module, placements: Mapping[str, Spec], device_mesh: DeviceMesh) -> None:
    """Place every parameter of a module in place, so that each is an `nn.Parameter` that is a `DTensor`.

    A parameter with several names (tied weights) remains one parameter under all of them. Attributes, gradient and
    hooks are kept. Parameters that are `DTensor`s already remain the same objects with new contents, so references to
    them, such as those of optimizers and hooks, remain valid.

    Args:
        module: the module; its buffers are not changed.
        placements: the spec of every parameter, under any or all of its names.
        device_mesh: the mesh.

    Raises:
        PlanError: a parameter has no placement, or two different ones under two names; a name is not a parameter; a
            placement does not fit the parameter's shape. Nothing was changed then.
        MeshError: a parameter is on another mesh already.
    """
    for names, spec in _parameter_specs(module, placements, device_mesh):
        parameter = module.get_parameter(names[0])
        if isinstance(parameter, DTensor):
            _replace_contents(parameter, device_mesh, spec)
            continue
        placed = parameter_like(distribute(parameter, device_mesh, spec), parameter)
        if parameter.grad is not None:
            placed.grad = distribute(parameter.grad, device_mesh, spec)
        for name in names:
            set_tensor(module, name, placed)


def names_of_parameters(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of every parameter; a tied parameter has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _parameter_specs(
    module: nn.Module, placements: Mapping[str, Spec], device_mesh: DeviceMesh
) -> list[tuple[list[str], Spec]]:
    """Return all names of every parameter, with its spec."""
    # The result holds no parameters, so each can be freed as soon as it is placed.
    names_of = names_of_parameters(module)
    known = {name for names in names_of.values() for name in names}
    unknown = next((name for name in placements if name not in known), None)
    if unknown is not None:
        raise PlanError(f"{unknown!r} is placed, but is no parameter. {suggestion(unknown, known)}")
    return [(names, _spec_of(parameter, names, placements, device_mesh)) for parameter, names in names_of.items()]


def _spec_of(
    parameter: nn.Parameter, names: Sequence[str], placements: Mapping[str, Spec], device_mesh: DeviceMesh
) -> Spec:
    """Return the spec that the placements give a parameter under its names."""
    name_of_spec = {placements[name]: name for name in names if name in placements}
    if not name_of_spec:
        raise PlanError(f"there is no placement for parameter {names[0]!r}: place every parameter of the module.")
    if len(name_of_spec) > 1:
        conflict = " and ".join(f"{name!r} as {spec}" for spec, name in name_of_spec.items())
        raise PlanError(
            f"{conflict} are one tied parameter, which lies in one way: give both names the same placement."
        )
    spec, name = next(iter(name_of_spec.items()))
    try:
        check_fits(parameter.shape, spec, device_mesh)
    except ValueError as error:
        raise PlanError(f"{name!r} can't be placed as {spec}: {reason_of(error)}") from error
    if isinstance(parameter, DTensor):
        _check_mesh(parameter, device_mesh)
    return spec


def parameter_like(tensor: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return `tensor` as a parameter with the attributes and hooks of another, frozen if the other is."""
    placed = nn.Parameter(tensor, parameter.requires_grad)
    if isinstance(parameter, DTensor):
        placed.__class__ = parameter.__class__
    placed.__dict__.update(parameter.__dict__)
    for hook in _torch.gradient_hooks(parameter):
        placed.register_hook(hook)
    for hook in _torch.post_accumulate_hooks(parameter):
        placed.register_post_accumulate_grad_hook(hook)
    return placed


def _replace_contents(parameter: DTensor, device_mesh: DeviceMesh, spec: Spec) -> None:
    """Change the placements of a `DTensor` parameter and its gradient: same objects, new contents."""
    for tensor in (parameter, parameter.grad):
        if isinstance(tensor, DTensor) and tuple(tensor.placements) != _normalize_spec(spec, tensor.ndim).placements:
            placed = distribute(tensor.detach(), device_mesh, spec)
            _torch.set_local_tensor(tensor, local_of(placed), _torch.dtensor_spec_of(placed))


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Assign a parameter, buffer or other tensor by its qualified name; a buffer keeps its persistence."""
    owner, _, leaf = name.rpartition(".")
    # Not through `_parameters`: modules may watch assignments, as `nn.LSTM` does.
    setattr(module.get_submodule(owner), leaf, value)


def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a tensor; a `DTensor` gets this rank's part."""
    part = cut(value, tensor.device_mesh, Spec(tensor.placements)) if isinstance(tensor, DTensor) else value
    local_of(tensor).copy_(part)


@torch.no_grad()
def place_buffers(module: nn.Module, device_mesh: DeviceMesh) -> None:
    """Move a module's buffers to this rank's device, with the numbers of rank 0, as DDP does.

    A buffer on the device is filled in place. Other buffers are replaced under all their names, as by
    `module.to(device)`, and so are inference tensors, which cannot be changed outside inference mode. Tied buffers
    remain tied. Buffers on the meta device have no numbers yet: `materialize` fills them.
    """
    placed: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta or isinstance(buffer, DTensor):
                continue
            if buffer not in placed:
                moved = to_mesh_device(buffer, device_mesh)
                value = from_first_rank(moved, device_mesh)
                placed[buffer] = buffer.copy_(value) if moved is buffer and not buffer.is_inference() else value
            owner._buffers[name] = placed[buffer]


def to_mesh_device(tensor: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """Return the tensor on this rank's device of the mesh: the tensor itself if it is there already."""
    # A device type without an index means the rank's current device.
    return tensor.to(device_mesh.device_type)


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A box of a tensor on one rank: its ranges per dim in the whole tensor and in the local one.

    Files are written and read in such blocks.
    """

    whole: tuple[slice, ...]
    local: tuple[slice, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(place.start for place in self.whole)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(place.stop - place.start for place in self.whole)


def blocks_of(shape: Sequence[int], spec: Spec, mesh: MeshShape, coordinate: Sequence[int]) -> Iterator[ShardBlock]:
    """Yield the blocks of the rank at `coordinate`: one if nothing is strided, none if the shard is empty."""
    indices = local_indices(shape, spec, mesh, coordinate)
    # One box for every combination of runs of the dims.
    for runs in itertools.product(*(_runs(index) for index in indices)):
        yield ShardBlock(tuple(whole for whole, _ in runs), tuple(local for _, local in runs))


def _runs(indices: Sequence[int]) -> list[tuple[slice, slice]]:
    """Return runs of consecutive indices: the range of the indices, and the range of their positions."""
    # A range is one run: a large dim need not be walked.
    if isinstance(indices, range):
        return [(slice(indices.start, indices.stop), slice(0, len(indices)))] if indices else []
    breaks = [place for place in range(1, len(indices)) if indices[place] != indices[place - 1] + 1]
    edges = [0, *breaks, len(indices)]
    return [
        (slice(indices[start], indices[stop - 1] + 1), slice(start, stop))
        for start, stop in itertools.pairwise(edges)
        if start < stop
    ]
