"""Whole tensors of a parallelised module: gathered to the CPU of one rank, and loaded from there."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import InputError
from autoshard.runtime.materialize import allocate
from autoshard.runtime.rank_agreement import from_first_rank, is_first_rank
from autoshard.runtime.safetensors import IncompatibleKeys
from autoshard.runtime.shards import fill, gather_full_tensor, local_of
from autoshard.runtime.shards import from_first_rank as tensor_from_first_rank


def gather_state(model: nn.Module, names: Container[str] | None, rank0_only: bool) -> dict[str, Any]:
    """Gather a module's state, as documented in `autoshard.full_state_dict`."""
    keep = is_first_rank(mesh_of(model)) or not rank0_only
    tensors = model.state_dict(keep_vars=True)
    return gather_tensors({name: value for name, value in tensors.items() if names is None or name in names}, keep)


def gather_tensors(tensors: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Return whole tensors in newly allocated CPU memory, and other values unchanged; an empty dict if `keep` is False.

    All ranks of a mesh call this together. A tensor with several names remains one tensor.
    """
    whole_of: dict[Tensor, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            if value not in whole_of:
                if local_of(value).is_meta:
                    raise InputError(
                        f"{name!r} is on the meta device and has no numbers: call autoshard.materialize(model), or "
                        "autoshard.load_safetensors, first."
                    )
                whole = gather_full_tensor(value)
                whole_of[value] = whole.detach().cpu() if keep else torch.empty(0)
            value = whole_of[value]
        if keep:
            state[name] = value
    return state


def load_state(
    model: nn.Module, state: Mapping[str, Any] | None, strict: bool, device: torch.device | str | None
) -> IncompatibleKeys:
    """Load the first rank's state into a module, as documented in `autoshard.load_full_state_dict`."""
    mesh = mesh_of(model)
    targets = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    given = {name: value for name, value in (state or {}).items() if isinstance(value, Tensor)}
    shapes: dict[str, list[int]] = json.loads(
        from_first_rank(mesh, lambda: json.dumps({name: list(value.shape) for name, value in given.items()}))
    )
    stored = {id(value) for name, value in targets.items() if name in shapes}
    missing = [name for name, value in targets.items() if id(value) not in stored]
    keys = IncompatibleKeys(missing, [name for name in shapes if name not in targets])
    problems = [
        f"size mismatch for {name}: the shape is {shapes[name]} in the state, and {list(value.shape)} in the model."
        for name, value in targets.items()
        if name in shapes and shapes[name] != list(value.shape)
    ]
    if strict:
        problems += [f"Missing key(s): {', '.join(keys.missing_keys)}."] if keys.missing_keys else []
        problems += [f"Unexpected key(s): {', '.join(keys.unexpected_keys)}."] if keys.unexpected_keys else []
    if problems:
        raise InputError("the state does not fit the model:\n" + "\n".join(f"  {line}" for line in problems))
    allocate(model, torch.device(device or mesh.device_type), shapes)
    with torch.no_grad():
        for name, target in model.state_dict(keep_vars=True).items():
            if name in shapes:
                value = given[name] if is_first_rank(mesh) else torch.empty(shapes[name])
                # Cast to the model's dtype, which all ranks know.
                value = value.detach().to(device=mesh.device_type, dtype=target.dtype)
                fill(target, tensor_from_first_rank(value, mesh))
    return keys


def mesh_of(model: nn.Module) -> DeviceMesh:
    """Return the mesh of a parallelised module's parameters; raise an `InputError` if there is none."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    raise InputError("the model has no DTensor parameters: call autoshard.parallelize(model, mesh) first.")
