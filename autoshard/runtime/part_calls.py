"""Direct calls of submodules, or of other methods, of a parallelised module: an error that says what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.errors import InputError
from autoshard.runtime._torch import is_mixed_tensors_error, replicates_implicitly


class PartCallCheck:
    """A forward pre-hook of a submodule; it does not run in programs.

    Args:
        path: the path of the submodule in the parallelised module.

    Attributes:
        path: as given.
        allowed: True once the submodule has its own programs.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.allowed = False

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.allowed or replicates_implicitly():
            return
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Torch can run operators on DTensors only, and accepts plain 0-d tensors.
        if any(isinstance(tensor, DTensor) for tensor in tensors) or not any(tensor.ndim for tensor in tensors):
            return
        if any(isinstance(parameter, DTensor) for parameter in part.parameters()):
            raise InputError(
                f"{self.path} ({type(part).__name__}) is called by itself with plain tensors, and its parameters lie "
                f"on a mesh: autoshard.register_forward_method(model, {self.path + '.forward'!r}), called once on all "
                "ranks, gives such calls programs of their own. If a method of the model calls it, register the "
                "method instead."
            )


def check_calls(module: nn.Module) -> Callable[[], None]:
    """From now on, check calls of all submodules with parameters, and of methods.

    The methods are the public ones defined by the classes of the module and its submodules, except torch's and replaced
    ones. They run as before, but torch's error in them says what to do.

    Returns:
        A function that removes the checks.
    """
    handles = [
        part.register_forward_pre_hook(PartCallCheck(path), with_kwargs=True)
        for path, part in module.named_modules()
        if part is not module and next(part.parameters(), None) is not None
    ]
    checked: list[tuple[nn.Module, str]] = []
    wrappers: dict[type, dict[str, Callable[..., Any]]] = {}
    for part in module.modules():
        kind = type(part)
        if kind not in wrappers:
            wrappers[kind] = {name: _check_method(name, method) for name, method in _own_methods(kind)}
        for name, wrapper in wrappers[kind].items():
            if name not in part.__dict__:
                # A bound method, so that `copy.deepcopy` binds it to the copy.
                part.__dict__[name] = MethodType(wrapper, part)
                checked.append((part, name))

    def remove() -> None:
        for handle in handles:
            handle.remove()
        for part, name in checked:
            uncheck_method(part, name)

    return remove


def checks_of(part: nn.Module) -> Iterator[PartCallCheck]:
    """Yield the checks of a submodule."""
    yield from (hook for hook in part._forward_pre_hooks.values() if isinstance(hook, PartCallCheck))


def uncheck_method(part: nn.Module, name: str) -> None:
    """Remove the check of a method, if any."""
    method = vars(part).get(name)
    if isinstance(method, MethodType) and method.__module__ == __name__:
        del part.__dict__[name]


def _own_methods(kind: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the public methods of a class, except torch's and those of every module."""
    inherited = set(dir(nn.Module))
    for name in dict.fromkeys(name for base in kind.__mro__ for name in vars(base)):
        if name.startswith("_") or name in inherited:
            continue
        owner = next(base for base in kind.__mro__ if name in vars(base))
        method = vars(owner)[name]
        if isinstance(method, FunctionType) and owner.__module__.partition(".")[0] != "torch":
            yield name, method


def _check_method(name: str, method: FunctionType) -> Callable[..., Any]:
    """Return a method that calls the class's method, and adds to the error about mixed tensors what to register."""

    # Keeps this file's name, by which `uncheck_method` and captures recognise a check.
    @functools.wraps(method, assigned=("__qualname__", "__doc__"))
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(type(self), name)(self, *args, **kwargs)
        except (RuntimeError, InputError) as error:
            # A caller that passes DTensors handles placements itself.
            leaves = pytree.tree_leaves((args, kwargs))
            if not is_mixed_tensors_error(error) or any(isinstance(leaf, DTensor) for leaf in leaves):
                raise
            path = ".".join([*(check.path for check in checks_of(self)), name])
            raise InputError(
                f"{path} of {type(self).__name__} computes with plain tensors and with parameters that lie on a mesh: "
                f"autoshard.register_forward_method(model, {path!r}), called once on all ranks, gives calls of the "
                "method programs of their own. If another method calls it, register that one instead."
            ) from error

    # Pickling finds a method by its name.
    call.__name__ = name
    return call
