"""Calls of a part of a parallelised module by itself: an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autoshard.errors import InputError
from autoshard.runtime._torch import replicates_implicitly


class PartCallCheck:
    """A forward pre-hook of a submodule, which programs do not run.

    Args:
        path: of the submodule in the parallelised module.

    Attributes:
        allowed: True once the submodule has programs of its own.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.allowed = False

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.allowed or replicates_implicitly():
            return
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Torch runs operators on DTensors alone, and takes numbers in tensors without dims.
        if any(isinstance(tensor, DTensor) for tensor in tensors) or not any(tensor.ndim for tensor in tensors):
            return
        if any(isinstance(parameter, DTensor) for parameter in part.parameters()):
            raise InputError(
                f"{self._path} ({type(part).__name__}) is called by itself with plain tensors, and its parameters lie "
                f"on a mesh: autoshard.register_forward_method(model, {self._path + '.forward'!r}), called once on all "
                "ranks, gives such calls programs of their own. If a method of the model calls it, register the "
                "method instead."
            )


def check_part_calls(module: nn.Module) -> list[RemovableHandle]:
    """Check calls of all submodules with parameters from now on; returns the handles of the hooks."""
    return [
        part.register_forward_pre_hook(PartCallCheck(path), with_kwargs=True)
        for path, part in module.named_modules()
        if part is not module and next(part.parameters(), None) is not None
    ]


def checks_of(part: nn.Module) -> Iterator[PartCallCheck]:
    """Yield the checks of a submodule."""
    yield from (hook for hook in part._forward_pre_hooks.values() if isinstance(hook, PartCallCheck))
