"""Changes in place of a call's inputs and buffers, and constants of the module.

Changes are refused if other tensors share the memory. Constants are tensors that a module holds outside its parameters
and buffers.
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
    """Raise an `InputError` if a call changes memory that several of its tensors share.

    The tensors are the caller's and the module's, in the order of the program's inputs.
    """
    changed = {border.name for border in step.outputs if border.kind == "mutation"}
    if not changed:
        return
    local_tensors = [(border, local_of(tensor)) for border, tensor in zip(step.inputs, tensors, strict=False)]
    inputs = [(border, tensor) for border, tensor in local_tensors if border.kind == "input"]
    # Compare storages first, in a set: few tensors share one.
    input_storages = {storage_of(tensor) for _, tensor in inputs}
    for border, tensor in local_tensors:
        if border.name not in changed or storage_of(tensor) not in input_storages:
            continue
        # Each element of an expanded tensor would be changed several times.
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
    """Return True if two tensors share an element, or, with different element sizes, if their byte ranges overlap."""
    if storage_of(a) != storage_of(b) or not a.numel() or not b.numel():
        return False
    (start, end), (b_start, b_end) = _bounds(a), _bounds(b)
    if a.dtype != b.dtype:
        width, b_width = a.element_size(), b.element_size()
        # Elements of different sizes have no common grid, so byte ranges decide, which may refuse too much.
        return start * width < b_end * b_width and b_start * b_width < end * width
    if start >= b_end or b_start >= end:
        return False
    # The ranges overlap, but strides may interleave: mark the elements of one, and look up those of the other.
    first = min(start, b_start)
    with outside_modes():
        marks = torch.zeros(max(end, b_end) - first, dtype=torch.bool, device="cpu")
        marks.as_strided(a.shape, a.stride(), start - first).fill_(True)
        return bool(marks.as_strided(b.shape, b.stride(), b_start - first).any())


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Return the first and the end offset of a tensor in its memory, in elements."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum(stride * (size - 1) for stride, size in _dims(tensor))


def write_back(step: LocalStep, changes: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> None:
    """Write this rank's parts of new values of buffers and inputs, which the program returns, to their tensors.

    Args:
        step: the step of the program.
        changes: the new values, by the names of the tensors.
        tensors: the caller's and the module's tensors, in the order of the program's inputs.
    """
    if not changes:
        return
    targets, values = [], []
    for source, tensor in zip(step.inputs, tensors, strict=False):
        value = changes.get(source.name)
        # If the value is the tensor's own memory, the program has written to it directly.
        if value is None or source.kind == "tangent" or value is local_of(tensor):
            continue
        # The caller's `DTensor` input may be placed differently in the program.
        placed_otherwise = isinstance(tensor, DTensor) and tensor.placements != source.spec.placements
        if isinstance(tensor, DTensor) and source.kind == "input" and placed_otherwise:
            mesh = tensor.device_mesh
            changed = wrap(value.contiguous(), mesh, source.spec, tensor.shape, tensor.dtype)
            value = local_of(redistribute(changed, tensor.placements))
        target = local_of(tensor)
        if target.is_conj() or target.is_neg():  # `_foreach_copy_` refuses them
            target.detach().copy_(value)
            continue
        targets.append(target)
        values.append(value)
    if targets:
        copy_all(targets, values)


def _attribute(module: nn.Module, constant: JointInput) -> tuple[dict[str, Any], str] | None:
    """Return the table and key of the module's attribute that holds the constant, which calls may reassign."""
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
    """Move a constant to this rank's device, and return its location: a table and its key, or the tensor."""
    # An attribute of the module is replaced. Any other tensor may be shared with others, so it is copied.
    place = _attribute(module, constant)
    if place is not None:
        table, name = place
        table[name] = to_mesh_device(table[name], device_mesh)
        return place
    return None if constant.value is None else to_mesh_device(constant.value, device_mesh)


def check_constants(graph: JointGraph, module: nn.Module) -> None:
    """Raise an `InputError` if a constant is on the meta device."""
    for source in graph.inputs:
        if source.kind == "constant" and source.value is None and _attribute(module, source) is None:
            raise InputError(
                f"{source.name} is a tensor that the module holds outside its parameters and buffers, and it is on the "
                "meta device: register it as a buffer, so that materialize can fill it."
            )
