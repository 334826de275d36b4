"""`microbatches`: the arguments of a call with a batch as those of calls with parts of it; `samples` counts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import call_layout
from autoshard.errors import InputError

BATCH = "batch"
"""Name of the number of samples in a microbatch, where it is a dynamic size."""


def microbatches(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    number: int,
    batch_dims: Mapping[str, int | None] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Split the tensors of a call into equal parts along the batch.

    Args:
        module: what is called; its forward names positional arguments.
        args, kwargs: the call; tensors may be on the meta device.
        number: how many microbatches there are.
        batch_dims: for inputs by name (such as `input_ids` or `batch['x']`), the dim that counts samples, or None
            where there is none and every microbatch gets the whole tensor. Of other tensors it is dim 0; tensors
            without dims are whole.

    Returns:
        Arguments and keyword arguments of every microbatch, the tensors being views.

    Raises:
        InputError: the batch does not divide, tensors differ in their number of samples, or `batch_dims` names no
            tensor or no dim of one.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"{number!r} is no number of microbatches: it is one or more.")
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    names = call_layout(module, structure, leaves).leaves
    tensors = _tensors(names, leaves)
    dims = _batch_dims(tensors, batch_dims or {})
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
    """The number of samples in the tensors of a call; arguments and errors are those of `microbatches`."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    names = call_layout(module, structure, leaves).leaves
    tensors = _tensors(names, leaves)
    return _samples(tensors, _batch_dims(tensors, batch_dims or {}), 1)


def batch_sizes(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_dims: Mapping[str, int | None] | None = None,
) -> dict[str, dict[int, str]]:
    """For every tensor with samples, the dim that counts them, under one name, as `capture` takes dynamic sizes.

    Arguments and errors are those of `microbatches`.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    tensors = _tensors(call_layout(module, structure, leaves).leaves, leaves)
    return {name: {dim: BATCH} for name, dim in _batch_dims(tensors, batch_dims or {}).items()}


def _tensors(names: Sequence[Any], leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by their names."""
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(name, str)}


def _batch_dims(tensors: Mapping[str, torch.Tensor], said: Mapping[str, int | None]) -> dict[str, int]:
    """The dim that counts samples, of every tensor that has one."""
    for name, dim in said.items():
        if name not in tensors:
            raise InputError(f"batch_dims names {name!r}, which is no tensor of the call: {', '.join(tensors)}.")
        if dim is not None and not -tensors[name].ndim <= dim < tensors[name].ndim:
            raise InputError(f"batch_dims[{name!r}] is {dim}, and the tensor has {tensors[name].ndim} dims.")
    chosen = {name: said.get(name, 0 if tensor.ndim else None) for name, tensor in tensors.items()}
    return {name: dim % tensors[name].ndim for name, dim in chosen.items() if dim is not None}


def _samples(tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], number: int) -> int:
    """The number of samples in a microbatch."""
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
            f"{_join_with_or(fitting)}, or another batch size."
        )
    return batch // number


def _join_with_or(options: Sequence[str]) -> str:
    return " or ".join([", ".join(options[:-1]), options[-1]] if len(options) > 1 else options)
