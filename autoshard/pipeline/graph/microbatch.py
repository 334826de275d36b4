"""Microbatches: the call with a batch as calls with parts of it, and the number of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import call_layout
from autoshard.errors import InputError

BATCH = "batch"
"""Name of the dynamic size of the samples in a microbatch."""


def microbatches(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    number: int,
    batch_dims: Mapping[str, int | None] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Split the tensors of a call into equal parts along the batch.

    Args:
        module: the called module; its forward names positional arguments.
        args, kwargs: the call; tensors may be on the meta device.
        number: of microbatches.
        batch_dims: for inputs by name (such as `input_ids` or `batch['x']`), the dim that counts samples, or None for a
            tensor that every microbatch gets whole. The default is dim 0; tensors without dims are whole.

    Returns:
        Arguments and keyword arguments of every microbatch; the tensors are views.

    Raises:
        InputError: the number of microbatches does not divide the batch, tensors differ in their number of samples, or
            `batch_dims` names no tensor or no dim of one.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"{number!r} is no number of microbatches: it is one or more.")
    names, leaves, structure = _named_leaves(module, args, kwargs)
    tensors, dims = _batch_dims(names, leaves, batch_dims)
    size = _samples(tensors, dims, number)
    parts = []
    for place in range(number):
        cut = {name: tensors[name].narrow(dim, place * size, size) for name, dim in dims.items()}
        chosen = [
            cut.get(name, leaf) if isinstance(name, str) else leaf for name, leaf in zip(names, leaves, strict=True)
        ]
        parts.append(structure.unflatten(chosen))
    return parts


def samples(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_dims: Mapping[str, int | None] | None = None,
) -> int:
    """Return the number of samples in the tensors of a call; arguments and errors are those of `microbatches`."""
    names, leaves, _ = _named_leaves(module, args, kwargs)
    return _samples(*_batch_dims(names, leaves, batch_dims), 1)


def batch_sizes(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_dims: Mapping[str, int | None] | None = None,
) -> dict[str, dict[int, str]]:
    """Return the dim that counts samples of every tensor that has one, as a dynamic size for `capture`.

    Arguments and errors are those of `microbatches`.
    """
    names, leaves, _ = _named_leaves(module, args, kwargs)
    _, dims = _batch_dims(names, leaves, batch_dims)
    return {name: {dim: BATCH} for name, dim in dims.items()}


def _named_leaves(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], list[Any], pytree.TreeSpec]:
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    return call_layout(module, structure, leaves).leaves, leaves, structure


def _batch_dims(
    names: Sequence[Any], leaves: Sequence[Any], batch_dims: Mapping[str, int | None] | None
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return the tensors of a call by their names, and the dim that counts samples of those that have one."""
    tensors = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(name, str)}
    requested = batch_dims or {}
    for name, dim in requested.items():
        if name not in tensors:
            raise InputError(f"batch_dims names {name!r}, which is no tensor of the call: {', '.join(tensors)}.")
        if dim is not None and not -tensors[name].ndim <= dim < tensors[name].ndim:
            raise InputError(f"batch_dims[{name!r}] is {dim}, and the tensor has {tensors[name].ndim} dims.")
    chosen = {name: requested.get(name, 0 if tensor.ndim else None) for name, tensor in tensors.items()}
    return tensors, {name: dim % tensors[name].ndim for name, dim in chosen.items() if dim is not None}


def _samples(tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], number: int) -> int:
    """Return the number of samples in a microbatch."""
    sizes = {name: tensors[name].shape[dim] for name, dim in dims.items()}
    if not sizes:
        raise InputError(f"the call has no tensor with a batch to split in {number} microbatches.")
    first, batch = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != batch:
            raise InputError(
                f"{first} has {batch} samples (dim {dims[first]}), {name} has {size} (dim {dims[name]}). Say in "
                f"batch_dims which dim counts samples, or {{{name!r}: None}} for a tensor that all microbatches need."
            )
    if batch % number:
        fitting = [str(count) for count in range(1, batch + 1) if batch % count == 0]
        raise InputError(
            f"a batch of {batch} samples cannot be split into {number} equal microbatches: use "
            f"{', '.join(fitting[:-1])}{' or ' if len(fitting) > 1 else ''}{fitting[-1]}, or another batch size."
        )
    return batch // number
