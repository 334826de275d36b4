"""The tensors of a call by name: what ranks tell each other of them, and what a signature says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.call_layout import call_layout
from autoshard.capture.dynamic import Dynamic


def describe_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], grad: bool) -> dict[str, str]:
    """Words for what all ranks have in common in a call of the module."""
    tensors = tensors_of_call(module, args, kwargs)
    return {
        "whether gradients are wanted": "yes" if grad else "no",
        "whether the module is in training mode": "yes" if module.training else "no",
        "the names of the tensors that are passed": ", ".join(tensors),
        **{f"the input {name}": f"{one.dtype} {tuple(one.shape)}" for name, one in tensors.items()},
    }


def tensors_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by name, or by number where they have none."""
    call = (args, dict(kwargs))
    return {
        name or f"number {place}": leaf
        for place, (name, leaf) in enumerate(zip(names_of_leaves(module, call), pytree.tree_leaves(call), strict=True))
        if isinstance(leaf, torch.Tensor)
    }


def shapes_of_call(
    module: nn.Module, call: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a call."""
    for name, leaf in zip(names_of_leaves(module, call), pytree.tree_leaves(call), strict=True):
        if isinstance(leaf, torch.Tensor):
            yield name, tuple(leaf.shape)


@dataclass(frozen=True, slots=True)
class _TensorSignature:
    """What a signature says of a tensor some of whose sizes calls may change."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    requires_grad: bool


def without_dynamic_sizes(
    module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], dynamic: Dynamic
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with its tensors replaced by what of them does not change."""
    names = iter(names_of_leaves(module, call))

    def mask_sizes(leaf: Any) -> Any:
        dims = dynamic.get(next(names), {})
        if not isinstance(leaf, torch.Tensor):
            return leaf
        free = {dim % leaf.ndim for dim in dims}
        shape = tuple(None if dim in free else size for dim, size in enumerate(leaf.shape))
        return _TensorSignature(shape, leaf.dtype, leaf.requires_grad)

    args, kwargs = pytree.tree_map(mask_sizes, call)
    return args, kwargs


def names_of_leaves(module: nn.Module, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[str]:
    """The input path of every leaf of a call, empty where it has none."""
    leaves, structure = pytree.tree_flatten(call)
    return [leaf if isinstance(leaf, str) else "" for leaf in call_layout(module, structure, leaves).leaves]
