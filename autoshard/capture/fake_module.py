"""Fake copies of modules, whose tensors have shapes and no numbers."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoshard.capture._torch import FakeTensorMode, is_lazy
from autoshard.capture.reachable import Reachable
from autoshard.errors import CaptureError

DEVICE = torch.device("cpu")
"""The device of all tensors in a capture, wherever the model is and will run."""


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a contiguous fake tensor with the (global) shape, dtype and `requires_grad` of `tensor`."""
    with mode:
        fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=DEVICE)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(
    module: nn.Module,
    mode: FakeTensorMode,
    reachable: Reachable | None = None,
    *,
    one_device: bool = True,
) -> nn.Module:
    """Return a copy of `module` with fake parameters and buffers; no tensor of the module is touched or copied.

    Tied tensors stay tied. A parallelised module is copied with the `forward` that it had before.

    Args:
        module: the module.
        mode: of the fake tensors.
        reachable: the objects of the module, which are bound to those of the copy.
        one_device: True if all parameters have to be on one device.

    Raises:
        CaptureError: parameters have no shape yet, or are on different devices though `one_device` is asked for; or
            the module cannot be copied.
    """
    for fault in parameter_faults(module) if one_device else _shape_faults(module):
        raise CaptureError(fault)
    # `copy.deepcopy` takes from the memo what is in it, and copies all else.
    memo: dict[int, Any] = {}
    held = () if reachable is None else reachable.tensors()
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(fake_like(parameter.detach(), mode), parameter.requires_grad)
    for tensor in (*module.buffers(), *filter(_has_no_numbers, (*_attributes(module), *held))):
        memo.setdefault(id(tensor), fake_like(tensor, mode))
    # Other attributes are constants of the graph, kept with their numbers.
    for tensor in _attributes(module):
        if id(tensor) not in memo and tensor.device != DEVICE:
            memo[id(tensor)] = tensor.detach().to(DEVICE)
    # The runtime of a parallelised module is not copied: its graphs, plan and process groups cannot be.
    for name, value in vars(module).items():
        if _is_autoshard(value) or (name == "forward" and any(map(_is_runtime, vars(module).values()))):
            memo[id(value)] = value
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied for capture: {type(error).__name__}: {error}. "
            "Keep what copy.deepcopy refuses (locks, generators, process groups, tensors with a history) "
            "out of the module's attributes."
        ) from error
    _restore_forward(module, twin, memo)
    # Functions in attributes and hooks, which `copy.deepcopy` leaves as they are, are bound to the copy.
    for part in twin.modules():
        tables = [value for name, value in vars(part).items() if name.endswith("_hooks") and isinstance(value, dict)]
        for table in (vars(part), *tables):
            table.update({name: _rebind(value, memo) for name, value in table.items() if callable(value)})
    if reachable is not None:
        reachable.bind(memo)
    # Hooks of the module itself run around the parallelised forward, not in it.
    for hooks in (twin._forward_pre_hooks, twin._forward_hooks, twin._backward_pre_hooks, twin._backward_hooks):
        hooks.clear()
    return twin


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    """Return True for a tensor whose numbers no graph can hold as a constant."""
    # On the meta device, or left by an earlier call: with its autograd history, or as a shard.
    return tensor.is_meta or tensor.grad_fn is not None or type(tensor) not in (torch.Tensor, nn.Parameter)


def _attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that submodules hold outside their parameters and buffers."""
    for submodule in module.modules():
        for value in vars(submodule).values():
            if isinstance(value, torch.Tensor):
                yield value


def _restore_forward(module: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> None:
    """Give the copy of a parallelised module the `forward` that the module had before."""
    before = next((value.forward_before for value in vars(module).values() if _is_runtime(value)), None)
    if before is None:
        return
    # A wrapper that the user puts around `forward` after parallelize runs around its programs, not in them.
    twin.__dict__.pop("forward", None)
    if getattr(before, "__func__", None) is not type(module).forward:
        # The memo binds it to the copy, if it was bound to the module.
        twin.__dict__["forward"] = copy.deepcopy(before, memo)


def _rebind(value: Any, copies: dict[int, Any]) -> Any:
    """Return a function, method or partial function that is bound to copies of the objects it was bound to."""
    # `copy.deepcopy` copies neither functions nor their closures: a wrapper of the `forward` of a submodule would go on
    # to call that of the original.
    if isinstance(value, torch.Tensor):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, types.MethodType):
        function, owner = _rebind(value.__func__, copies), _rebind(value.__self__, copies)
        unchanged = function is value.__func__ and owner is value.__self__
        return value if unchanged else types.MethodType(function, owner)
    if isinstance(value, functools.partial):
        args = [_rebind(argument, copies) for argument in value.args]
        kwargs = {name: _rebind(argument, copies) for name, argument in value.keywords.items()}
        return functools.partial(_rebind(value.func, copies), *args, **kwargs)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    copies[id(value)] = value  # ends the recursion of a function that has itself in its closure
    cells = tuple(_rebind_cell(cell, copies) for cell in value.__closure__)
    if all(new is old for new, old in zip(cells, value.__closure__, strict=True)):
        return value
    bound = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    bound.__kwdefaults__, bound.__qualname__ = value.__kwdefaults__, value.__qualname__
    bound.__module__ = value.__module__
    copies[id(value)] = bound
    return bound


def _rebind_cell(cell: types.CellType, copies: dict[int, Any]) -> types.CellType:
    if id(cell) not in copies:
        try:
            contents = cell.cell_contents
        except ValueError:  # the cell is empty
            return cell
        new = _rebind(contents, copies)
        copies[id(cell)] = cell if new is contents else types.CellType(new)
    return copies[id(cell)]


def _is_runtime(value: object) -> bool:
    """Return True if an attribute of a module is the runtime of a parallelised module."""
    return _is_autoshard(value) and hasattr(value, "forward_before")


def _is_autoshard(value: object) -> bool:
    owner = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(owner, str) and owner.split(".")[0] == "autoshard"


def check_parameters(module: nn.Module) -> None:
    """Raise a `CaptureError` unless all parameters have a shape and are on one device."""
    for fault in parameter_faults(module):
        raise CaptureError(fault)


def parameter_faults(module: nn.Module) -> Iterator[str]:
    """Yield the reasons why the parameters cannot be captured, in a sentence or two each."""
    yield from _shape_faults(module)
    examples: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        examples.setdefault(parameter.device, name)
    if len(examples) > 1:
        text = ", ".join(f"{name} on {device}" for device, name in examples.items())
        yield (
            f"the parameters are on different devices: {text}. Move the module to one device (or to the meta device) "
            "first; autoshard decides where its shards lie."
        )


def _shape_faults(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            yield (
                f"parameter {name} has no shape yet (a lazy module). Call the module once on a small batch, "
                "then parallelize it."
            )
