"""A fake twin: the same module and inputs with tensors that have shapes and no numbers."""

from __future__ import annotations

import copy
import functools
import types
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


def fake_copy(
    module: nn.Module,
    mode: FakeTensorMode,
    training: bool | None,
    *,
    one_device: bool = True,
    held: Iterable[torch.Tensor] = (),
    copies: dict[int, Any] | None = None,
) -> nn.Module:
    """A copy of `module` with fake parameters and buffers; nothing of the module is touched or copied.

    Tied tensors stay tied. The `forward` of a parallelised module gives way to the one that it had.

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
    for fault in parameter_faults(module) if one_device else _shape_faults(module):
        raise CaptureError(fault)
    memo: dict[int, Any] = {} if copies is None else copies
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(fake_like(parameter.detach(), mode), parameter.requires_grad)
    for tensor in (*_plain_tensors(module), *filter(_has_no_numbers, held)):
        memo.setdefault(id(tensor), fake_like(tensor, mode))
    for tensor in _attributes(module):
        if id(tensor) not in memo and tensor.device != DEVICE:
            memo[id(tensor)] = tensor.detach().to(DEVICE)
    for name, value in vars(module).items():
        if _is_autoshard(value) or (name == "forward" and any(map(_is_runner, vars(module).values()))):
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
    for part in twin.modules():
        tables = [value for name, value in vars(part).items() if name.endswith("_hooks") and isinstance(value, dict)]
        for table in (vars(part), *tables):
            table.update({name: _rebind(value, memo) for name, value in table.items() if callable(value)})
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
    """Give the copy of a parallelised module the `forward` that the module had before.

    What the user puts around it later runs around its programs, and is no part of them.
    """
    before = next((value.forward_before for value in vars(module).values() if _is_runner(value)), None)
    if before is None:
        return
    twin.__dict__.pop("forward", None)
    if getattr(before, "__func__", None) is not type(module).forward:
        twin.__dict__["forward"] = copy.deepcopy(before, memo)  # bound to the twin, where it was bound to the module


def _rebind(value: Any, copies: dict[int, Any]) -> Any:
    """A function, method or partial function with copies in the place of the objects that it is bound to.

    `copy.deepcopy` copies no function, nor the variables around it: what was put around the `forward` of a module, and
    calls it from there, would call that of the original.
    """
    if isinstance(value, torch.Tensor):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, types.MethodType):
        function, owner = _rebind(value.__func__, copies), _rebind(value.__self__, copies)
        unchanged = function is value.__func__ and owner is value.__self__
        return value if unchanged else types.MethodType(function, owner)
    if isinstance(value, functools.partial):
        args = [_rebind(one, copies) for one in value.args]
        named = {name: _rebind(one, copies) for name, one in value.keywords.items()}
        return functools.partial(_rebind(value.func, copies), *args, **named)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    copies[id(value)] = value  # a function may call itself
    cells = tuple(_rebind_cell(cell, copies) for cell in value.__closure__)
    if all(new is old for new, old in zip(cells, value.__closure__, strict=True)):
        return value
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__, made.__module__ = value.__kwdefaults__, value.__qualname__, value.__module__
    copies[id(value)] = made
    return made


def _rebind_cell(cell: types.CellType, copies: dict[int, Any]) -> types.CellType:
    if id(cell) not in copies:
        try:
            held = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        new = _rebind(held, copies)
        copies[id(cell)] = cell if new is held else types.CellType(new)
    return copies[id(cell)]


def _is_runner(value: object) -> bool:
    """Whether an attribute of a module is what runs it once it is parallelised."""
    return _is_autoshard(value) and hasattr(value, "forward_before")


def _is_autoshard(value: object) -> bool:
    owner = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(owner, str) and owner.split(".")[0] == "autoshard"


def check_parameters(module: nn.Module) -> None:
    """`CaptureError` unless all parameters have a shape and are on one device."""
    for fault in parameter_faults(module):
        raise CaptureError(fault)


def parameter_faults(module: nn.Module) -> Iterator[str]:
    """What keeps the parameters from being captured, a sentence or two for each fault."""
    yield from _shape_faults(module)
    where: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        where.setdefault(parameter.device, name)
    if len(where) > 1:
        some = ", ".join(f"{name} on {device}" for device, name in where.items())
        yield (
            f"the parameters are on different devices: {some}. Move the module to one device (or to the meta device) "
            "first; autoshard decides where its shards lie."
        )


def _shape_faults(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            yield (
                f"parameter {name} has no shape yet (a lazy module). Call the module once on a small batch, "
                "then parallelize it."
            )
