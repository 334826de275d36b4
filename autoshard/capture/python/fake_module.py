"""Fake copies of modules, whose tensors have shapes but no data, and the attributes that cannot be copied."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture._torch import FakeTensorMode, is_lazy
from autoshard.capture.capture_device import DEVICE
from autoshard.capture.capture_errors import user_line
from autoshard.capture.dense import dense_fault, is_dense
from autoshard.capture.python.reachable import Reachable, is_autoshard
from autoshard.errors import CaptureError, reason_of


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a contiguous fake tensor with the (global) shape, dtype and `requires_grad` of `tensor`."""
    with mode:
        fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=DEVICE)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(
    module: nn.Module, mode: FakeTensorMode, reachable: Reachable | None = None, *, one_device: bool = True
) -> nn.Module:
    """Return a copy of `module` with fake parameters and buffers; no tensor of the module is touched or copied.

    Tied tensors stay tied. Parallelised modules, including parts of `module`, are copied with their original methods,
    including `forward`.

    Args:
        module: the module.
        mode: of the fake tensors.
        reachable: the objects of the module, which are bound to those of the copy.
        one_device: True if all parameters have to be on one device.

    Raises:
        CaptureError: parameters have no shape yet, or are on different devices despite `one_device`; or the module
            cannot be copied.
    """
    check_parameters(module, one_device=one_device)
    # `copy.deepcopy` uses objects in the memo, and copies all others. Parameters first, by identity, so that those with
    # several names stay one.
    memo: dict[int, Any] = {}
    held = () if reachable is None else reachable.tensors()
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(fake_like(parameter.detach(), mode), parameter.requires_grad)
    # Tensors of submodules that are neither parameters nor buffers.
    attributes = [
        value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)
    ]
    for tensor in (*module.buffers(), *filter(_has_no_numbers, (*attributes, *held))):
        memo.setdefault(id(tensor), fake_like(tensor, mode))
    # Other attributes are constants of the graph, kept with their data.
    for tensor in attributes:
        if id(tensor) not in memo and tensor.device != DEVICE:
            memo[id(tensor)] = tensor.detach().to(DEVICE)
    # The runtime of a parallelised module is not copied: its graphs, plan and process groups cannot be.
    runtimes = [value for part in module.modules() for value in vars(part).values() if _is_runtime(value)]
    for part in (module, *(runtime.module for runtime in runtimes)):
        memo.update({id(value): value for value in vars(part).values() if is_autoshard(value)})
    replaced = [method for runtime in runtimes for method in runtime.methods_before]
    for owner, name, _ in replaced:
        if name in vars(owner):
            memo[id(vars(owner)[name])] = vars(owner)[name]
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied for capture: {copy_fault(module, error)}. Keep what "
            "copy.deepcopy refuses (locks, generators, process groups, tensors with a history) out of the module's "
            "attributes."
        ) from error
    _restore_methods(replaced, memo)
    # Bind functions in attributes and hooks, which `copy.deepcopy` does not copy, to the copy.
    for part in twin.modules():
        _remove_checks(part)
        tables = [value for name, value in vars(part).items() if name.endswith("_hooks") and isinstance(value, dict)]
        for table in (vars(part), *tables):
            table.update({name: _rebind(value, memo) for name, value in table.items() if callable(value)})
    if reachable is not None:
        reachable.bind(memo)
    # Hooks of the module itself run around the parallelised forward, not in it.
    for hooks in (twin._forward_pre_hooks, twin._forward_hooks, twin._backward_pre_hooks, twin._backward_hooks):
        hooks.clear()
    return twin


def uncopyable_attributes(module: nn.Module) -> Iterator[tuple[str, str, object]]:
    """Yield the attributes that `copy.deepcopy` cannot copy: the path of their module, their name and their value."""
    parts = dict(module.named_modules())
    for path, part in parts.items():
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules") or (isinstance(value, Tensor) and value.is_leaf):
                continue
            try:
                # As in capture, references to modules of the model stay references.
                copy.deepcopy(value, {id(submodule): submodule for submodule in parts.values()})
            except Exception:  # whatever an attribute raises
                yield path, name, value


def copy_fault(module: nn.Module, error: Exception) -> str:
    """Describe the attributes that `copy.deepcopy` cannot copy, with an error; reraise the error if it is our fault."""
    found = [
        f"{'.'.join(filter(None, (path, name)))} ({type(value).__name__})"
        for path, name, value in uncopyable_attributes(module)
    ]
    if found:
        return f"copy.deepcopy refuses its attribute{'s' if len(found) > 1 else ''} {', '.join(found)}"
    line = user_line(error.__traceback__)
    return f"a method of its own that copies it fails{line}" if line else reason_of(error)


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that a graph cannot hold as a constant."""
    # On the meta device, or stored by an earlier call: with autograd history, or as a shard.
    return tensor.is_meta or tensor.grad_fn is not None or type(tensor) not in (torch.Tensor, nn.Parameter)


def _remove_checks(part: nn.Module) -> None:
    """Remove the checks of a parallelised module, which are not part of programs."""
    for name in [name for name, value in vars(part).items() if is_checked_method(value)]:
        del part.__dict__[name]
    for key in [key for key, hook in part._forward_pre_hooks.items() if is_autoshard(hook)]:
        del part._forward_pre_hooks[key]
        part._forward_pre_hooks_with_kwargs.pop(key, None)


def is_checked_method(value: object) -> bool:
    """Return True for a method that `parallelize` wraps around one of a module's class."""
    return isinstance(value, types.MethodType) and is_autoshard(value)


def _restore_methods(replaced: Iterable[tuple[nn.Module, str, Callable[..., Any]]], memo: dict[int, Any]) -> None:
    """Restore the original methods in copies of parallelised modules.

    Args:
        replaced: modules, names and original methods.
        memo: `id` of an original -> its copy.
    """
    for owner, name, before in replaced:
        twin = memo.get(id(owner))
        if twin is None:  # replaced by another submodule since
            continue
        # A wrapper that the user adds to a method after `parallelize` runs around programs, not in them.
        twin.__dict__.pop(name, None)
        if getattr(before, "__func__", None) is not getattr(type(owner), name, None):
            # The memo binds it to the copy, if it was bound to the module.
            twin.__dict__[name] = copy.deepcopy(before, memo)


def _rebind(value: Any, copies: dict[int, Any]) -> Any:
    """Return a function, method or partial function bound to copies of its objects."""
    # `copy.deepcopy` copies neither functions nor their closures: a wrapper of a submodule's `forward` would still call
    # that of the original.
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
    copies[id(value)] = value  # ends the recursion of a function with itself in its closure
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
    return is_autoshard(value) and hasattr(value, "methods_before")


def check_parameters(module: nn.Module, *, one_device: bool = True) -> None:
    """Raise a `CaptureError` unless all parameters have a shape and, with `one_device`, are on one device."""
    for fault in parameter_faults(module, one_device=one_device):
        raise CaptureError(fault)


def parameter_faults(module: nn.Module, *, one_device: bool = True) -> Iterator[str]:
    """Yield the reasons, of a sentence or two, why parameters and buffers cannot be captured."""
    examples: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        examples.setdefault(parameter.device, name)
        if is_lazy(parameter):
            yield (
                f"parameter {name} has no shape yet (a lazy module). Call the module once on a small batch, "
                "then parallelize it."
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_dense(tensor):
            yield dense_fault(f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name}", tensor)
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            # COO tensors can be copied, but may not be read.
            if isinstance(value, Tensor) and not is_dense(value) and value.layout is not torch.sparse_coo:
                yield dense_fault(f"the attribute {'.'.join(filter(None, (path, name)))}", value)
    if one_device and len(examples) > 1:
        text = ", ".join(f"{name} on {device}" for device, name in examples.items())
        yield (
            f"the parameters are on different devices: {text}. Move the module to one device (or to the meta device) "
            "first; autoshard decides where its shards lie."
        )
