"""The tensors that a program takes: those of the module, found where it holds them, and those of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture.joint import JointGraph
from autoshard.errors import InputError
from autoshard.program.localize import LocalStep, ProgramTensor
from autoshard.runtime.in_place_changes import place_constant
from autoshard.runtime.shards import local_of, redistribute, to_mesh_device, written_out

Location = tuple[dict[str, Any], str] | torch.Tensor | None
"""Where an input of a program is: a table of the module and its key, the tensor itself, or, with None, in the call."""


def locate(module: nn.Module, graph: JointGraph, border: ProgramTensor, device_mesh: DeviceMesh) -> Location:
    """Return where an input of the program of a graph is; a constant of the module is placed on the rank's device."""
    if border.kind in ("parameter", "buffer"):
        path, _, name = border.name.rpartition(".")
        owner = module.get_submodule(path)
        return (owner._parameters if border.kind == "parameter" else owner._buffers), name
    if border.kind == "constant":
        item = next(item for item in graph.inputs if item.kind == "constant" and item.name == border.name)
        return place_constant(module, item, device_mesh)
    return None


def find_tensors(
    step: LocalStep, locations: Sequence[Location], leaves: Iterable[torch.Tensor], device_mesh: DeviceMesh
) -> list[torch.Tensor]:
    """Return the tensors that the user knows, in the order of the program's inputs; those of a call are `leaves`.

    Raises:
        InputError: a parameter or buffer was replaced or deleted.
    """
    remaining, tensors = iter(leaves), []
    for border, place in zip(step.inputs, locations, strict=True):
        if isinstance(place, tuple):
            tensor = place[0].get(place[1])
            if tensor is None or (border.kind == "parameter" and not isinstance(tensor, DTensor)):
                raise replaced_error(border.name, tensor)
            # Calls and the user may assign an attribute anew, on any device.
            tensors.append(to_mesh_device(tensor.detach(), device_mesh) if border.kind == "constant" else tensor)
        elif place is not None:
            tensors.append(place)
        elif border.kind == "input":
            tensors.append(next(remaining))
    return tensors


def local_inputs(step: LocalStep, tensors: Sequence[torch.Tensor], device_mesh: DeviceMesh) -> list[torch.Tensor]:
    """Return the tensors of `find_tensors` as the program takes them: inputs local, and contiguous as in the capture.

    None is a lazy conjugate or negative of other memory: parameters are not since they were placed.

    Raises:
        InputError: a tensor is on the meta device.
    """
    pairs = zip(tensors, step.inputs, strict=False)
    taken = [
        _local_input(tensor, border, device_mesh)
        if border.kind == "input"
        else tensor
        if isinstance(tensor, DTensor)
        else written_out(tensor)
        for tensor, border in pairs
    ]
    if any(tensor.is_meta for tensor in taken):
        raise _meta_tensor_error(step.inputs, taken)
    return taken


def _local_input(tensor: torch.Tensor, border: ProgramTensor, device_mesh: DeviceMesh) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        # Without autograd's part in it, which takes time: a cache is many such inputs of every call.
        if tensor.placements == border.spec.placements and not tensor.requires_grad:
            return written_out(local_of(tensor)).contiguous()
        return written_out(redistribute(tensor, border.spec.placements).to_local())
    return written_out(tensor).contiguous()


def replaced_error(name: str, replacement: torch.Tensor | None) -> InputError:
    """Return the error about a parameter or buffer that was replaced."""
    if replacement is None:
        what = "deleted, or replaced by what is no parameter,"
    else:
        kind = "Parameter" if isinstance(replacement, nn.Parameter) else "tensor"
        what = f"replaced by a plain {kind} of shape {tuple(replacement.shape)}"
    return InputError(
        f"{name} was {what} since autoshard.parallelize, and the programs of the module read the one that they placed "
        f"on the mesh. Fill that instead, with numbers of the same shape: model.load_state_dict({{{name!r}: value}}, "
        "strict=False); or replace the whole submodule, whose parameters are placed at the next call."
    )


def _meta_tensor_error(borders: Sequence[ProgramTensor], tensors: Sequence[torch.Tensor]) -> InputError:
    """Return the error about a call with tensors on the meta device."""
    border = next(border for border, tensor in zip(borders, tensors, strict=False) if tensor.is_meta)
    if border.kind == "input":
        return InputError(f"the input {border.name} is on the meta device and has no numbers: pass a real tensor.")
    return InputError(
        f"the {border.kind} {border.name} is on the meta device and has no numbers: call autoshard.materialize(model), "
        "or autoshard.load_safetensors, first."
    )
