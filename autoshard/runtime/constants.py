"""Constants of a graph: tensors that a module holds outside its parameters and buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.joint import JointGraph, JointInput
from autoshard.errors import InputError
from autoshard.runtime.shards import to_mesh_device


def _attribute(module: nn.Module, constant: JointInput) -> tuple[dict[str, Any], str] | None:
    """Return the table and key of a module's attribute that holds the constant, which calls may assign anew."""
    owner, _, name = constant.name.rpartition(".")
    try:
        table = vars(module.get_submodule(owner))
    except AttributeError:
        return None
    value, shape = table.get(name), constant.node.meta["val"].shape
    return (table, name) if isinstance(value, torch.Tensor) and value.shape == shape and not value.is_meta else None


def place_constant(
    module: nn.Module, constant: JointInput, device_mesh: DeviceMesh
) -> tuple[dict[str, Any], str] | torch.Tensor | None:
    """Move a constant to this rank's device, and return where to find it: a table and its key, or the tensor."""
    # An attribute of the module is replaced. Another tensor may not be the module's alone, and is copied.
    place = _attribute(module, constant)
    if place is not None:
        table, name = place
        table[name] = to_mesh_device(table[name], device_mesh)
        return place
    return None if constant.value is None else to_mesh_device(constant.value, device_mesh)


def check_constants(graph: JointGraph, module: nn.Module) -> None:
    """Raise an `InputError` if a constant has no numbers."""
    for source in graph.inputs:
        if source.kind == "constant" and source.value is None and _attribute(module, source) is None:
            raise InputError(
                f"{source.name} is a tensor that the module holds outside its parameters and buffers, and it is on the "
                "meta device: register it as a buffer, so that materialize can fill it."
            )
