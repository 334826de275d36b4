"""Checks of the arguments of `parallelize` and `plan`, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autoshard.errors import InputError, MeshError, PlanError
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.module_runtime import RUNTIME
from autoshard.runtime.rank_agreement import backends
from autoshard.specs.axes import MeshShape

_WRAPPERS = (nn.DataParallel, DistributedDataParallel, FullyShardedDataParallel)


def check_module(module: object) -> None:
    """Raise an `InputError` unless `module` is a `torch.nn.Module` that is not yet distributed by another wrapper."""
    if not isinstance(module, nn.Module):
        raise InputError(f"autoshard works on a torch.nn.Module, got {type(module).__name__}.")
    # Submodules, too: a wrapper inside the module would issue its own collectives beside those of the program.
    for name, part in module.named_modules():
        if isinstance(part, _WRAPPERS):
            kind, where = type(part).__name__, name or "the module"
            raise InputError(
                f"{where} is wrapped in {kind}, which spreads it over devices in its own way. Unwrap it: pass what is "
                "in it, its attribute `module`; autoshard splits the batch, and reduces gradients, where that is best."
            )


def check_examples(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an example call; raise an `InputError` unless they are a tuple and a mapping."""
    if not isinstance(args, (tuple, list)):
        # A common mistake: a tensor is a sequence of its rows, each of which would become an argument.
        hint = ": for one argument, write example_args=(x,)" if isinstance(args, Tensor) else ""
        raise InputError(f"example_args is a tuple of positional arguments, got {type(args).__name__}{hint}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"example_kwargs is a mapping from names of arguments to values, got {type(kwargs).__name__}: for "
            "positional arguments, use example_args."
        )
    return tuple(args), dict(kwargs or {})


def check_mesh(mesh: object) -> None:
    """Raise a `MeshError` unless `mesh` is a `DeviceMesh` that this rank is on."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"parallelize needs a DeviceMesh (torch.distributed.device_mesh.init_device_mesh), got "
            f"{type(mesh).__name__}. To decide without devices, call autoshard.plan."
        )
    if not dist.is_initialized():
        raise MeshError(
            "parallelize needs a process group: call torch.distributed.init_process_group and start the program with "
            "torchrun. To decide without one, call autoshard.plan."
        )
    world = dist.get_world_size()
    if mesh.size() > world:
        raise MeshError(
            f"the mesh {MeshShape.of(mesh)} has {mesh.size()} devices, but the world has {world} ranks: start "
            f"{mesh.size()} processes (torchrun --nproc-per-node), or make the mesh smaller."
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not on the mesh {MeshShape.of(mesh)}, whose ranks are "
            f"{mesh.mesh.flatten().tolist()}: call parallelize on these ranks alone, or make a mesh of all ranks."
        )
    for axis in range(mesh.ndim):
        _check_backend(mesh, axis)


def _check_backend(mesh: DeviceMesh, axis: int) -> None:
    """Raise a `MeshError` unless the process group of an axis can send tensors on the mesh's devices."""
    sends = backends(mesh.get_group(axis))
    device = mesh.device_type
    # Checked now so that the error names the axis: the first collective would raise torch's own error.
    if device not in sends:
        present = ", ".join(f"{backend} for {kind}" for kind, backend in sends.items())
        # The backends of the group, with torch's default one for the device.
        wanted = dist.Backend.default_device_backend_map.get(device)
        pairs = ",".join(f"{kind}:{backend}" for kind, backend in {**sends, device: wanted}.items())
        advice = f'call init_process_group("{pairs}")' if wanted else f"register a backend for {device!r}"
        raise MeshError(
            f"axis {MeshShape.of(mesh).names[axis]!r} of the mesh is of {device!r} devices, and its process group has "
            f"no backend that sends their tensors (it has {present}): {advice}, or make the mesh of "
            f"{next(iter(sends))!r} devices."
        )


def check_dtypes(module: nn.Module, device_type: str) -> None:
    """Raise an `InputError` if a parameter or buffer is float64 or complex128 and the devices lack this dtype."""
    if has_float64(device_type):
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype in (torch.float64, torch.complex128):
            raise InputError(
                f"{name} is {tensor.dtype}, and {device_type!r} devices have no such numbers: call module.float() "
                f"before parallelize, or make the mesh of other devices. Nothing was moved."
            )


def has_float64(device_type: str) -> bool:
    """Return True if this rank's device of a type supports float64."""
    if device_type == "mps":
        return False
    # Intel's client GPUs do not support float64; those for data centres do.
    if device_type == "xpu" and torch.xpu.is_available():
        return bool(torch.xpu.get_device_capability().get("has_fp64", True))
    return True


def check_not_parallelized(module: nn.Module) -> None:
    """Raise a `PlanError` if the module or a submodule is parallelised, or a parameter is a `DTensor` already."""
    # Submodules, too: the program of the whole module would capture the runtime of a submodule.
    for name, part in module.named_modules():
        if RUNTIME in part.__dict__:
            raise PlanError(
                f"{name or 'the module'} is parallelised already: parallelize works in place, once. Build the module "
                "anew to place it differently."
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise PlanError(
                f"parameter {name} is a DTensor already, as if the module, or one that it is part of, had been "
                "parallelised before. Parallelize the outermost module, once, while its parameters are plain."
            )


def check_plan(plan: object, module: nn.Module, mesh: MeshShape) -> None:
    """Raise a `PlanError` unless `plan` fits this mesh and the names and shapes of the parameters.

    The graph is compared later, after its capture.
    """
    if not isinstance(plan, ShardingPlan):
        raise PlanError(
            f"plan must be a ShardingPlan, got {type(plan).__name__}: read a file with autoshard.ShardingPlan.load."
        )
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors if name in plan.placements}
    plan.check(mesh, plan.fingerprint, shapes)
