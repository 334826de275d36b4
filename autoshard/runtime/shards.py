"""Parameters as shards: whole tensors cut into `DTensor`s, put into a module in place, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import MeshError, PlanError
from autoshard.names import suggestion
from autoshard.runtime import _torch
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from autoshard.specs.layout import dim_of, is_even, local_indices, true_local_shape
from autoshard.specs.spec import Spec, shard_placement, split_factor_of
from autoshard.specs.tensors import pad_to, shard

Coordinate = Sequence[int]


def coordinate_of(device_mesh: DeviceMesh) -> Coordinate:
    """This rank's coordinate on every mesh axis; `MeshError` where the rank is not on the mesh."""
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            f"this rank ({dist.get_rank()}) is not on the mesh {device_mesh}: call autoshard on the ranks of the mesh "
            f"alone, or build the mesh over all ranks."
        )
    return coordinate


def distribute(tensor: Tensor, device_mesh: DeviceMesh, spec: Spec) -> DTensor:
    """`tensor` as a `DTensor` placed by `spec`. Rank 0's numbers win, as in DDP.

    Args:
        tensor: the whole tensor on every rank, or a `DTensor` on the same mesh, or a tensor on the meta device, whose
            shard is then on the meta device too, without communication. It is read and not kept.
        device_mesh: the mesh.
        spec: one placement per mesh axis.

    Returns:
        A leaf that requires a gradient if `tensor` does.

    Raises:
        ValueError: the spec does not fit the tensor or the mesh.
        MeshError: the rank is not on the mesh, or a `DTensor` is on another one.
    """
    check_fits(tensor.shape, spec, device_mesh)
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            local = _reshard_local(tensor, device_mesh, spec)
        elif tensor.is_meta:
            local = cut(tensor, device_mesh, spec)
        else:
            local = cut(from_first_rank(tensor.to(device_mesh.device_type), device_mesh), device_mesh, spec)
    result = wrap(local, device_mesh, spec, tensor.shape, tensor.dtype)
    result.requires_grad = tensor.requires_grad
    return result


def cut(tensor: Tensor, device_mesh: DeviceMesh, spec: Spec) -> Tensor:
    """This rank's part of a whole tensor that every rank has: a copy in memory of its own, without communication."""
    return _cut(tensor.detach(), coordinate_of(device_mesh), MeshShape.of(device_mesh), spec)


@_torch.per_rank
def _cut(tensor: Tensor, coordinate: Coordinate, mesh: MeshShape, spec: Spec) -> Tensor:
    local = shard(tensor, spec, mesh, coordinate)
    return local.clone(memory_format=torch.contiguous_format) if local is tensor else local


def from_first_rank(tensor: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """The numbers that the first rank of the mesh has in `tensor`: one broadcast per mesh axis, in place if it can."""
    tensor = tensor.detach().contiguous()
    for axis in range(device_mesh.ndim):
        if device_mesh.size(axis) > 1:
            dist.broadcast(tensor, group=device_mesh.get_group(axis), group_src=0)
    return tensor


def gather_full_tensor(tensor: DTensor) -> Tensor:
    """The whole tensor of a `DTensor` on every rank, in memory of its own; nothing partial is reduced.

    `DTensor.full_tensor` does the same, and is wrong where several axes split one dim into strided pieces.
    """
    spec, device_mesh = Spec(tensor.placements), tensor.device_mesh
    assert not spec.partial_axes, f"{spec} is partial: whole() puts shards together"
    if tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    mesh, coordinate = MeshShape.of(device_mesh), coordinate_of(device_mesh)
    value = local_of(tensor)
    if spec.is_replicated:
        return value.clone()
    for axis in reversed(spec.shard_axes):
        value = _gather_last_axis(value, tensor.shape, _truncated_spec(spec, axis + 1), device_mesh, mesh, coordinate)
    return value


def _truncated_spec(spec: Spec, axes: int) -> Spec:
    """The spec with everything replicated from axis number `axes` on."""
    return Spec.of(*spec.placements[:axes], *Spec.all_replicated(len(spec) - axes))


def _gather_last_axis(
    value: Tensor, shape: Sequence[int], spec: Spec, device_mesh: DeviceMesh, mesh: MeshShape, coordinate: Coordinate
) -> Tensor:
    """`value`, which lies by `spec`, with the last axis that shards it joined."""
    axis = spec.shard_axes[-1]
    value = _pad(value, _largest_shape(shape, spec, mesh))
    group = device_mesh.get_group(axis).group_name
    gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(value, mesh.sizes[axis], group))
    return _assemble(gathered, tuple(shape), spec, mesh, coordinate)


def _largest_shape(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    """The least shape that holds the shard of any rank."""
    coordinates = [(0,) * mesh.ndim] if is_even(shape, spec, mesh) else mesh.coordinates()
    shapes = [true_local_shape(shape, spec, mesh, coordinate) for coordinate in coordinates]
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


@_torch.per_rank
def _pad(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    return pad_to(value, shape).contiguous()


@_torch.per_rank
def _assemble(gathered: Tensor, shape: tuple[int, ...], spec: Spec, mesh: MeshShape, coordinate: Coordinate) -> Tensor:
    """The padded parts of all ranks along the last shard axis, which `gathered` stacks, each at its place."""
    axis = spec.shard_axes[-1]
    dim = dim_of(spec[axis], len(shape))
    before = local_indices(shape, _truncated_spec(spec, axis), mesh, coordinate)
    position = {index: place for place, index in enumerate(before[dim])}
    result = gathered.new_empty([len(indices) for indices in before])
    for place, part in enumerate(gathered.chunk(mesh.sizes[axis]) if gathered.numel() else ()):
        own = local_indices(shape, spec, mesh, (*coordinate[:axis], place, *coordinate[axis + 1 :]))
        part = part[tuple(slice(len(indices)) for indices in own)]
        where = torch.tensor([position[index] for index in own[dim]], dtype=torch.int64, device=part.device)
        result.index_copy_(dim, where, part)
    return result


def local_of(tensor: DTensor) -> Tensor:
    """This rank's local tensor, outside autograd: unpadded, and shared with the `DTensor`."""
    return _torch.local_tensor(tensor)


def wrap(local: Tensor, device_mesh: DeviceMesh, spec: Spec, shape: Sequence[int], dtype: torch.dtype) -> DTensor:
    """A `DTensor` around a rank's contiguous, unpadded local tensor, without checks or autograd (about 8 µs)."""
    return _torch.dtensor(
        local, _torch.dtensor_spec(device_mesh, _normalize_spec(spec, len(shape)).placements, shape, dtype)
    )


def wrap_like(local: Tensor, model: DTensor) -> DTensor:
    """As `wrap`, lying like another `DTensor`: of a gradient, say, like its parameter (about 3 µs)."""
    return _torch.dtensor(local, _torch.dtensor_spec_of(model))


@lru_cache(maxsize=1 << 14)
def _normalize_spec(spec: Spec, ndim: int) -> Spec:
    """The spec with dims counted from 0, as torch's operators expect them."""
    for axis in spec.shard_axes:
        placement = spec[axis]
        dim = dim_of(placement, ndim)
        if placement.dim != dim:  # type: ignore[attr-defined]
            spec = spec.replace(axis, shard_placement(dim, split_factor_of(placement)))
    return spec


def check_fits(shape: Sequence[int], spec: Spec, device_mesh: DeviceMesh) -> None:
    """`ValueError` unless the spec has a placement per mesh axis, each splitting a dim that there is."""
    local_indices(shape, spec, MeshShape.of(device_mesh), (0,) * device_mesh.ndim)


def _reshard_local(tensor: DTensor, device_mesh: DeviceMesh, spec: Spec) -> Tensor:
    """A new local tensor of a `DTensor` under another spec."""
    _check_mesh(tensor, device_mesh)
    return cut(gather_full_tensor(tensor), device_mesh, spec)


def _check_mesh(tensor: DTensor, device_mesh: DeviceMesh) -> None:
    if tensor.device_mesh != device_mesh:
        raise MeshError(
            f"a tensor of shape {tuple(tensor.shape)} lies on the mesh {tensor.device_mesh} and can't be placed on "
            f"{device_mesh}: tensors stay on the mesh where they are."
        )


def replace_parameters(module: nn.Module, placements: Mapping[str, Spec], device_mesh: DeviceMesh) -> None:
    """Place every parameter of a module, in place: afterwards each is an `nn.Parameter` that is a `DTensor`.

    A parameter under several names (tied weights) stays one parameter under all of them. Attributes, gradient and
    hooks stay. Parameters that are `DTensor`s already stay the same objects and change their contents, so that
    optimizers, hooks and other references made before go on.

    Args:
        module: the module; its buffers are not touched.
        placements: spec of every parameter, under one of its names or all.
        device_mesh: the mesh.

    Raises:
        PlanError: a parameter has no placement, or two different ones under two names; a name is no parameter; a
            placement does not fit the parameter's shape. Nothing is changed then.
        MeshError: a parameter lies on another mesh already.
    """
    for names, spec in _tied_names(module, placements, device_mesh):
        parameter = module.get_parameter(names[0])
        if isinstance(parameter, DTensor):
            _replace_contents(parameter, device_mesh, spec)
            continue
        placed = _sharded_parameter(parameter, device_mesh, spec)
        for name in names:
            set_parameter(module, name, placed)


def _tied_names(
    module: nn.Module, placements: Mapping[str, Spec], device_mesh: DeviceMesh
) -> list[tuple[list[str], Spec]]:
    """All names of every parameter, with its spec. It holds no parameter: each can be freed as soon as it is placed."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    unknown = [name for name in placements if name not in parameters]
    if unknown:
        raise PlanError(f"{unknown[0]!r} is placed, but is no parameter. {suggestion(unknown[0], tuple(parameters))}")
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(parameter, []).append(name)
    return [(names, _spec_of(parameter, names, placements, device_mesh)) for parameter, names in groups.items()]


def _spec_of(
    parameter: nn.Parameter, names: Sequence[str], placements: Mapping[str, Spec], device_mesh: DeviceMesh
) -> Spec:
    """The one spec that the placements give to a parameter under any of its names."""
    known = {placements[name]: name for name in names if name in placements}
    if not known:
        raise PlanError(f"there is no placement for parameter {names[0]!r}: place every parameter of the module.")
    if len(known) > 1:
        told = " and ".join(f"{name!r} as {spec}" for spec, name in known.items())
        raise PlanError(f"{told} are one tied parameter, which lies in one way: give both names the same placement.")
    spec, name = next(iter(known.items()))
    try:
        check_fits(parameter.shape, spec, device_mesh)
    except ValueError as error:
        raise PlanError(f"{name!r} can't be placed as {spec}: {error}") from error
    if isinstance(parameter, DTensor):
        _check_mesh(parameter, device_mesh)
    return spec


def _sharded_parameter(parameter: nn.Parameter, device_mesh: DeviceMesh, spec: Spec) -> nn.Parameter:
    """A parameter like a plain one, with its attributes, gradient and hooks, that is a `DTensor`."""
    placed = parameter_like(distribute(parameter, device_mesh, spec), parameter)
    if parameter.grad is not None:
        placed.grad = distribute(parameter.grad, device_mesh, spec)
    return placed


def parameter_like(tensor: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """`tensor` as a parameter with the attributes and hooks of another, and frozen if that is."""
    placed = nn.Parameter(tensor, parameter.requires_grad)
    placed.__dict__.update(parameter.__dict__)
    for hook in _torch.gradient_hooks(parameter):
        placed.register_hook(hook)
    for hook in _torch.post_accumulate_hooks(parameter):
        placed.register_post_accumulate_grad_hook(hook)
    return placed


def _replace_contents(parameter: DTensor, device_mesh: DeviceMesh, spec: Spec) -> None:
    """Place a `DTensor` parameter anew, and its gradient: the same objects with other contents."""
    for tensor in (parameter, parameter.grad):
        if isinstance(tensor, DTensor) and tuple(tensor.placements) != _normalize_spec(spec, tensor.ndim).placements:
            placed = distribute(tensor.detach(), device_mesh, spec)
            _torch.set_local_tensor(tensor, local_of(placed), _torch.dtensor_spec_of(placed))


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a qualified name, by assignment: modules may watch theirs (`nn.LSTM` does)."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def get_full(module: nn.Module, name: str) -> Tensor:
    """The whole parameter or buffer under a qualified name, on every rank, detached and in memory of its own."""
    tensor = _get_tensor(module, name)
    return gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach().clone()


def set_full(module: nn.Module, name: str, value: Tensor) -> None:
    """Fill the parameter or buffer under a qualified name, in place, with a whole tensor that every rank has.

    Raises:
        ValueError: the shapes differ.
    """
    tensor = _get_tensor(module, name)
    if value.shape != tensor.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the value has shape {tuple(value.shape)}.")
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            local_of(tensor).copy_(cut(value, tensor.device_mesh, Spec(tensor.placements)))
        else:
            tensor.copy_(value)


def _get_tensor(module: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor = getattr(module.get_submodule(owner), leaf)
    assert isinstance(tensor, Tensor), f"{name} is {type(tensor).__name__}, not a tensor"
    return tensor


@torch.no_grad()
def place_buffers(module: nn.Module, device_mesh: DeviceMesh) -> None:
    """Move the buffers of a module to this rank's device, with the numbers that they have on rank 0, as DDP does.

    A buffer that lies on the device already is filled in place. Another one is replaced under all its names, as
    `module.to(device)` replaces buffers; tied ones stay tied. Buffers on the meta device have no numbers yet: they are
    left to `materialize`.
    """
    placed: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta and not isinstance(buffer, DTensor):
                if buffer not in placed:
                    placed[buffer] = _place_buffer(buffer, device_mesh)
                owner._buffers[name] = placed[buffer]


def _place_buffer(buffer: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """The buffer itself, filled with rank 0's numbers; another tensor where it is not on this rank's device."""
    moved = to_mesh_device(buffer, device_mesh)
    value = from_first_rank(moved, device_mesh)
    return buffer.copy_(value) if moved is buffer else value


def to_mesh_device(tensor: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """The tensor on this rank's device of the mesh: itself where it lies there already."""
    return tensor.to(device_mesh.device_type)  # a type without an index is the rank's current device
