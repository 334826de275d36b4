"""The tensors of a call by name: their texts for comparison by ranks, their shapes, and their part of a signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.call_layout import call_layout, call_tensors
from autoshard.capture.dynamic import Dynamic


def describe_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], grad: bool) -> dict[str, str]:
    """Return texts of all that ranks must have in common in a call of the module."""
    tensors = call_tensors(module, args, kwargs)
    return {
        "whether gradients are wanted": "yes" if grad else "no",
        "whether the module is in training mode": "yes" if module.training else "no",
        "the names of the tensors that are passed": ", ".join(tensors),
        **{f"the input {name}": f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()},
    }


# No tuple: pytree would take that apart.
@dataclass(frozen=True, slots=True)
class _TensorSignature:
    """A tensor in a signature."""

    # None for sizes that calls may change.
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    requires_grad: bool


def without_dynamic_sizes(
    module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], dynamic: Dynamic
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with its tensors replaced by a description without the sizes that calls may change."""
    names = iter(names_of_leaves(module, call))

    def mask_sizes(leaf: Any) -> Any:
        dims = dynamic.get(next(names), {})
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Users may count dims from the end.
        free = {dim % leaf.ndim for dim in dims}
        shape = tuple(None if dim in free else size for dim, size in enumerate(leaf.shape))
        return _TensorSignature(shape, leaf.dtype, leaf.requires_grad)

    args, kwargs = pytree.tree_map(mask_sizes, call)
    return args, kwargs


def names_of_leaves(module: nn.Module, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[str]:
    """Return the input path of every leaf of a call, empty where it has none."""
    # A layout has the leaves of a call, and paths in the place of tensors.
    leaves, structure = pytree.tree_flatten(call)
    return [leaf if isinstance(leaf, str) else "" for leaf in call_layout(module, structure, leaves).leaves]
