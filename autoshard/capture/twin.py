"""A fake twin: the same module and inputs with tensors that have shapes and no numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from autoshard.capture._torch import FakeTensorMode, is_lazy
from autoshard.errors import CaptureError

DEVICE = torch.device("cpu")
"""Where all tensors of a capture are, wherever the model is and will run."""


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A contiguous fake tensor with the (global) shape, dtype and `requires_grad` of `tensor`."""
    with mode:
        fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=DEVICE)
    return fake.requires_grad_(tensor.requires_grad)


def fake_twin(
    module: nn.Module,
    mode: FakeTensorMode,
    training: bool | None,
    *,
    one_device: bool = True,
    held: Iterable[torch.Tensor] = (),
    copies: dict[int, Any] | None = None,
) -> nn.Module:
    """A copy of `module` with fake parameters and buffers; nothing of the module is touched or copied.

    Tied tensors stay tied. A `forward` that autoshard set on the instance gives way to the one that the module had.

    Args:
        module: the module.
        mode: of the fake tensors.
        training: whether the copy is in training mode; as the module is when None.
        one_device: whether all parameters have to be on one device.
        held: tensors in containers and objects of the module.
        copies: filled with what the copy has in the place of objects, by their `id`.

    Raises:
        CaptureError: parameters have no shape yet, or are on different devices though `one_device` is asked for; or
            the module cannot be copied.
    """
    for fault in parameter_faults(module) if one_device else _shapeless(module):
        raise CaptureError(fault)
    memo: dict[int, Any] = {} if copies is None else copies
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(fake_like(parameter.detach(), mode), parameter.requires_grad)
    for tensor in (*_plain_tensors(module), *filter(_has_no_numbers, held)):
        memo.setdefault(id(tensor), fake_like(tensor, mode))
    for tensor in _attributes(module):
        if id(tensor) not in memo and tensor.device != DEVICE:
            memo[id(tensor)] = tensor.detach().to(DEVICE)
    for value in vars(module).values():
        if _is_ours(value):
            memo[id(value)] = value  # what runs a parallelised module: graphs, plan and groups are not for copying
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied for capture: {type(error).__name__}: {error}. "
            "Keep what copy.deepcopy refuses (locks, generators, process groups, tensors with a history) "
            "out of the module's attributes."
        ) from error
    _restore_forward(module, twin, memo)
    for hooks in (twin._forward_pre_hooks, twin._forward_hooks, twin._backward_pre_hooks, twin._backward_hooks):
        hooks.clear()  # those of the module itself run around its forward, not in it
    if training is not None and training != twin.training:
        twin.train(training)
    return twin


def _plain_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers, and plain tensor attributes without numbers that a graph could hold as constants.

    These are on the meta device, or were left by an earlier call, with its history or as shards. Other attributes are
    constants, kept as they are.
    """
    yield from module.buffers()
    yield from filter(_has_no_numbers, _attributes(module))


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or tensor.grad_fn is not None or type(tensor) not in (torch.Tensor, nn.Parameter)


def _attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that submodules hold outside their parameters and buffers."""
    for submodule in module.modules():
        for value in vars(submodule).values():
            if isinstance(value, torch.Tensor):
                yield value


def _restore_forward(module: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> None:
    """Undo an instance attribute `forward` set by autoshard; one set by the user is part of the model."""
    forward = twin.__dict__.get("forward")
    if forward is None or not _is_ours(forward):
        return
    del twin.__dict__["forward"]
    before: Any = forward
    while before is not None and _is_ours(before):  # torch.compiler.disable wraps it once more
        before = getattr(before, "__wrapped__", None)
    if before is not None and getattr(before, "__func__", None) is not type(module).forward:
        twin.__dict__["forward"] = copy.deepcopy(before, memo)  # bound to the twin, where it was bound to the module


def _is_ours(value: object) -> bool:
    owner = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(owner, str) and owner.split(".")[0] == "autoshard"


def check_parameters(module: nn.Module) -> None:
    """`CaptureError` unless all parameters have a shape and are on one device."""
    for fault in parameter_faults(module):
        raise CaptureError(fault)


def parameter_faults(module: nn.Module) -> Iterator[str]:
    """What keeps the parameters from being captured, a sentence or two for each fault."""
    yield from _shapeless(module)
    where: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        where.setdefault(parameter.device, name)
    if len(where) > 1:
        some = ", ".join(f"{name} on {device}" for device, name in where.items())
        yield (
            f"the parameters are on different devices: {some}. Move the module to one device (or to the meta device) "
            "first; autoshard decides where its shards lie."
        )


def _shapeless(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            yield (
                f"parameter {name} has no shape yet (a lazy module). Call the module once on a small batch, "
                "then parallelize it."
            )
