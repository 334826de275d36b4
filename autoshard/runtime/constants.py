"""Tensors that a module holds outside its parameters and buffers: constants of its graph, which calls may set anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.joint import JointGraph, JointInput
from autoshard.errors import InputError
from autoshard.runtime.shards import to_mesh_device


def _attribute(module: nn.Module, constant: JointInput) -> tuple[dict[str, Any], str] | None:
    """Where the module holds a tensor of that shape outside its parameters and buffers: calls may set it anew."""
    owner, _, name = constant.name.rpartition(".")
    try:
        table = vars(module.get_submodule(owner))
    except AttributeError:
        return None
    held, shape = table.get(name), constant.node.meta["val"].shape
    return (table, name) if isinstance(held, torch.Tensor) and held.shape == shape and not held.is_meta else None


def place_constant(
    module: nn.Module, constant: JointInput, device_mesh: DeviceMesh
) -> tuple[dict[str, Any], str] | torch.Tensor | None:
    """Move a tensor that the graph holds to this rank's device, and tell where to find it: a table and its key, or it.

    An attribute of the module is replaced by what was moved. Any other tensor is not the module's alone: it stays.
    """
    place = _attribute(module, constant)
    if place is not None:
        table, name = place
        table[name] = to_mesh_device(table[name], device_mesh)
        return place
    return None if constant.value is None else to_mesh_device(constant.value, device_mesh)


def check_constants(graph: JointGraph, module: nn.Module) -> None:
    """`InputError` if a tensor that the module holds outside its parameters and buffers has no numbers."""
    for source in graph.inputs:
        if source.kind == "constant" and source.value is None and _attribute(module, source) is None:
            raise InputError(
                f"{source.name} is a tensor that the module holds outside its parameters and buffers, and it is on the "
                "meta device: register it as a buffer, so that materialize can fill it."
            )
