"""What a call changes in place: tensors of the caller's, and buffers; refused where their memory is that of others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import outside_modes, storage_of
from autoshard.errors import InputError
from autoshard.program.localize import LocalStep, ProgramTensor
from autoshard.runtime.shards import local_of, wrap


def check_changes(step: LocalStep, tensors: Sequence[Tensor]) -> None:
    """Refuse a call that changes memory which several of its tensors look at: programs know each by itself.

    Args:
        step: the program.
        tensors: what the user passed, and what the module holds, in the order of the program's inputs.

    Raises:
        InputError: such a tensor is changed in place.
    """
    changed = {border.name for border in step.outputs if border.kind == "mutation"}
    if not changed:
        return
    held = [
        (border, local_of(tensor) if isinstance(tensor, DTensor) else tensor)
        for border, tensor in zip(step.inputs, tensors, strict=False)
    ]
    given = [(border, tensor) for border, tensor in held if border.kind == "input"]
    passed = {storage_of(tensor) for _, tensor in given}
    for border, tensor in held:
        if border.name not in changed or storage_of(tensor) not in passed:
            continue
        if border.kind == "input" and any(not stride and size > 1 for stride, size in _dims(tensor)):
            raise InputError(
                f"forward changes the input {border.name} in place, and several of its elements are in one place of "
                f"memory, as those of an expanded tensor are: pass {border.name}.clone()."
            )
        for other, beside in held if border.kind == "input" else given:
            if other is not border and has_overlap(tensor, beside):
                raise InputError(
                    f"forward changes the {border.kind} {border.name} in place, and the {other.kind} {other.name} "
                    "looks at the same memory in this call: on one device both would change, and the program of a "
                    f"parallelised module knows each by itself. Pass a copy, such as "
                    f"{_input_name(border, other)}.clone()."
                )


def _input_name(one: ProgramTensor, other: ProgramTensor) -> str:
    """The name of which of two tensors the caller passes."""
    return other.name if other.kind == "input" else one.name


def _dims(tensor: Tensor) -> zip[tuple[int, int]]:
    return zip(tensor.stride(), tensor.shape, strict=True)


def has_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors look at an element in common."""
    if storage_of(one) != storage_of(other) or not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = _bounds(one), _bounds(other)
    if one.dtype != other.dtype:
        width, other_width = one.element_size(), other.element_size()
        return start * width < other_end * other_width and other_start * other_width < end * width
    if start >= other_end or other_start >= end:
        return False
    first = min(start, other_start)
    with outside_modes():
        seen = torch.zeros(max(end, other_end) - first, dtype=torch.bool, device="cpu")
        seen.as_strided(one.shape, one.stride(), start - first).fill_(True)
        return bool(seen.as_strided(other.shape, other.stride(), other_start - first).any())


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its memory, in elements."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum(stride * (size - 1) for stride, size in _dims(tensor))


def write_back(step: LocalStep, border: ProgramTensor, value: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the new value of a buffer, or of what else a program changes in place.

    Args:
        step: the program.
        border: its output.
        value: this rank's part.
        tensors: those that the user knows, in the order of the program's inputs.
    """
    for source, tensor in zip(step.inputs, tensors, strict=False):
        if source.name != border.name or source.kind == "tangent":
            continue
        with torch.no_grad():
            if not isinstance(tensor, DTensor):
                tensor.copy_(value)
            elif source.kind == "input":  # which the user placed
                mesh = tensor.device_mesh
                new = wrap(value.contiguous(), mesh, source.spec, tensor.shape, tensor.dtype)
                local_of(tensor).copy_(local_of(new.redistribute(mesh, tensor.placements)))
            else:
                local_of(tensor).copy_(value)
