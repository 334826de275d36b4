"""The tensors of a program: those of the module, looked up where it holds them, and those of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture.joint import JointGraph
from autoshard.errors import InputError
from autoshard.program.localize import LocalStep, ProgramTensor
from autoshard.runtime._torch import DTensorSpec, dtensor_spec_of
from autoshard.runtime.in_place_changes import place_constant
from autoshard.runtime.shards import local_of, names_of_parameters, redistribute, to_mesh_device, written_out


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module holds a tensor.

    Attributes:
        table: the table of parameters or buffers.
        key: the key in the table.
        spec: the spec of a parameter; None for others.
        ties: other tables and keys with the same parameter.
    """

    table: dict[str, Any]
    key: str
    spec: DTensorSpec | None = None
    ties: tuple[tuple[dict[str, Any], str], ...] = ()

    def holds(self, parameter: Any) -> bool:
        """Return True for a parameter that the program can use: its spec and its names are unchanged."""
        if not isinstance(parameter, DTensor) or self.spec is None:
            return False
        spec = dtensor_spec_of(parameter)
        if spec is not self.spec and (spec.placements, spec.shape) != (self.spec.placements, self.spec.shape):
            return False
        return not self.ties or all(table.get(key) is parameter for table, key in self.ties)


Location = Place | torch.Tensor | None
"""Where an input of a program is: a place in the module, the tensor itself, or None for the call."""


def locate(
    module: nn.Module, graph: JointGraph, borders: Sequence[ProgramTensor], device_mesh: DeviceMesh
) -> tuple[Location, ...]:
    """Return the locations of the inputs of a graph's program; move the module's constants to the rank's device."""
    parameters = {parameter: names for parameter, names in names_of_parameters(module).items() if len(names) > 1}
    return tuple(_locate(module, graph, border, device_mesh, parameters) for border in borders)


def _locate(
    module: nn.Module,
    graph: JointGraph,
    border: ProgramTensor,
    device_mesh: DeviceMesh,
    tied: Mapping[nn.Parameter, list[str]],
) -> Location:
    def place(name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return module.get_submodule(path), key

    if border.kind == "buffer":
        owner, key = place(border.name)
        return Place(owner._buffers, key)
    if border.kind == "parameter":
        owner, key = place(border.name)
        parameter = owner._parameters[key]
        assert isinstance(parameter, DTensor)
        others = [place(name) for name in tied.get(parameter, ()) if name != border.name]
        ties = tuple((other._parameters, name) for other, name in others)
        return Place(owner._parameters, key, dtensor_spec_of(parameter), ties)
    if border.kind == "constant":
        item = next(item for item in graph.inputs if item.kind == "constant" and item.name == border.name)
        held = place_constant(module, item, device_mesh)
        return Place(*held) if isinstance(held, tuple) else held
    return None


def find_tensors(
    step: LocalStep, locations: Sequence[Location], leaves: Iterable[torch.Tensor], device_mesh: DeviceMesh
) -> list[torch.Tensor]:
    """Return the user's tensors, in the order of the program's inputs; those of a call are `leaves`.

    Raises:
        InputError: a parameter or buffer was replaced or deleted.
    """
    remaining, tensors = iter(leaves), []
    for border, place in zip(step.inputs, locations, strict=True):
        if isinstance(place, Place):
            tensor = place.table.get(place.key)
            if tensor is None or (border.kind == "parameter" and not place.holds(tensor)):
                raise replaced_error(border.name, tensor)
            # Calls and the user may reassign an attribute, on any device.
            tensors.append(to_mesh_device(tensor.detach(), device_mesh) if border.kind == "constant" else tensor)
        elif place is not None:
            tensors.append(place)
        elif border.kind == "input":
            tensors.append(next(remaining))
    return tensors


def local_inputs(step: LocalStep, tensors: Sequence[torch.Tensor], device_mesh: DeviceMesh) -> list[torch.Tensor]:
    """Return the tensors of `find_tensors` for the program: inputs local, and contiguous as in the capture.

    No result is a lazy conjugate or negative view; placement has materialised such parameters.

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
        # Skip autograd, which takes time: a cache has many such inputs per call.
        if tensor.placements == border.spec.placements and not tensor.requires_grad:
            return written_out(local_of(tensor)).contiguous()
        return written_out(redistribute(tensor, border.spec.placements).to_local())
    return written_out(tensor).contiguous()


def replaced_error(name: str, replacement: torch.Tensor | None) -> InputError:
    """Return the error about a replaced parameter or buffer."""
    if replacement is None:
        what = "deleted, or replaced by what is no parameter,"
    elif isinstance(replacement, DTensor):
        what = (
            f"tied, untied, or replaced by another of shape {tuple(replacement.shape)} that lies as "
            f"{tuple(replacement.placements)} on the mesh,"
        )
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
