"""Tensors of a call besides parameters: changes in place of inputs and buffers, and constants of the module.

Changes are refused where other tensors share the memory. Constants are tensors that a module holds outside its
parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import outside_modes, storage_of
from autoshard.capture.joint import JointGraph, JointInput
from autoshard.errors import InputError
from autoshard.program.localize import LocalStep
from autoshard.runtime._torch import copy_all
from autoshard.runtime.shards import local_of, redistribute, to_mesh_device, wrap


def check_changes(step: LocalStep, tensors: Sequence[Tensor]) -> None:
    """Raise an `InputError` if a call changes memory that several of its tensors use.

    The tensors are those of the caller and of the module, in the order of the program's inputs.
    """
    changed = {border.name for border in step.outputs if border.kind == "mutation"}
    if not changed:
        return
    local_tensors = [(border, local_of(tensor)) for border, tensor in zip(step.inputs, tensors, strict=False)]
    inputs = [(border, tensor) for border, tensor in local_tensors if border.kind == "input"]
    # Storages are compared first, in a set, since few tensors share one.
    input_storages = {storage_of(tensor) for _, tensor in inputs}
    for border, tensor in local_tensors:
        if border.name not in changed or storage_of(tensor) not in input_storages:
            continue
        # The elements of an expanded tensor would be changed several times.
        if border.kind == "input" and any(not stride and size > 1 for stride, size in _dims(tensor)):
            raise InputError(
                f"forward changes the input {border.name} in place, and several of its elements are in one place of "
                f"memory, as those of an expanded tensor are: pass {border.name}.clone()."
            )
        for second, second_tensor in local_tensors if border.kind == "input" else inputs:
            if second is not border and has_overlap(tensor, second_tensor):
                passed_name = second.name if second.kind == "input" else border.name
                raise InputError(
                    f"forward changes the {border.kind} {border.name} in place, and the {second.kind} {second.name} "
                    "looks at the same memory in this call: on one device both would change, and the program of a "
                    f"parallelised module knows each by itself. Pass a copy, such as {passed_name}.clone()."
                )


def _dims(tensor: Tensor) -> zip[tuple[int, int]]:
    return zip(tensor.stride(), tensor.shape, strict=True)


def has_overlap(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have an element in common; of unlike dtypes, if the ranges of their bytes overlap."""
    if storage_of(a) != storage_of(b) or not a.numel() or not b.numel():
        return False
    (start, end), (b_start, b_end) = _bounds(a), _bounds(b)
    if a.dtype != b.dtype:
        width, b_width = a.element_size(), b.element_size()
        # Elements of unlike sizes have no common grid: ranges of bytes decide, which may refuse too much.
        return start * width < b_end * b_width and b_start * b_width < end * width
    if start >= b_end or b_start >= end:
        return False
    # Ranges overlap, but strides may interleave: mark the elements of one, and look at those of the other.
    first = min(start, b_start)
    with outside_modes():
        marks = torch.zeros(max(end, b_end) - first, dtype=torch.bool, device="cpu")
        marks.as_strided(a.shape, a.stride(), start - first).fill_(True)
        return bool(marks.as_strided(b.shape, b.stride(), b_start - first).any())


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its memory, in elements."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum(stride * (size - 1) for stride, size in _dims(tensor))


def write_back(step: LocalStep, changes: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> None:
    """Write this rank's parts of the new values of buffers and inputs, outputs of the program, to their tensors.

    Args:
        step: the step of the program.
        changes: the new values, by the names of the tensors.
        tensors: those of the caller and of the module, in the order of the program's inputs.
    """
    if not changes:
        return
    targets, values = [], []
    for source, tensor in zip(step.inputs, tensors, strict=False):
        value = changes.get(source.name)
        # The program may have written into it.
        if value is None or source.kind == "tangent" or value is local_of(tensor):
            continue
        # The caller has placed a `DTensor` that is an input; the program may place it otherwise.
        placed_otherwise = isinstance(tensor, DTensor) and tensor.placements != source.spec.placements
        if isinstance(tensor, DTensor) and source.kind == "input" and placed_otherwise:
            mesh = tensor.device_mesh
            changed = wrap(value.contiguous(), mesh, source.spec, tensor.shape, tensor.dtype)
            value = local_of(redistribute(changed, tensor.placements))
        target = local_of(tensor)
        if target.is_conj() or target.is_neg():  # the copy of many refuses them
            target.detach().copy_(value)
            continue
        targets.append(target)
        values.append(value)
    if targets:
        copy_all(targets, values)


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
