"""Calls with a batch: their number of samples, and the calls of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import call_layout
from autoshard.errors import InputError

BATCH = "batch"
"""Name of the dynamic size of the samples in a microbatch."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchCall:
    """A call of a module with a batch.

    Attributes:
        module: the called module; its forward names positional arguments.
        args, kwargs: the call; tensors may be on the meta device.
        batch_dims: for inputs by name (such as `input_ids` or `batch['x']`), the dim that counts samples, or None for a
            tensor that every microbatch gets whole. The default is dim 0; tensors without dims are whole.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_dims: Mapping[str, int | None] | None = None

    def split(self, number: int) -> list[BatchCall]:
        """Return the calls of so many microbatches, with equal parts of the tensors along the batch, which are views.

        Raises:
            InputError: the number of microbatches does not divide the batch, tensors differ in their number of samples,
                or `batch_dims` names no tensor or no dim of one.
        """
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{number!r} is no number of microbatches: it is one or more.")
        names, leaves, structure = self._named_leaves()
        tensors, dims = self._tensors_and_dims(names, leaves)
        size = _samples(tensors, dims, number)
        parts = []
        for place in range(number):
            cut = {name: tensors[name].narrow(dim, place * size, size) for name, dim in dims.items()}
            chosen = [
                cut.get(name, leaf) if isinstance(name, str) else leaf for name, leaf in zip(names, leaves, strict=True)
            ]
            args, kwargs = structure.unflatten(chosen)
            parts.append(replace(self, args=args, kwargs=kwargs))
        return parts

    @property
    def samples(self) -> int:
        """The number of samples of the batch; raises as `split` does."""
        names, leaves, _ = self._named_leaves()
        return _samples(*self._tensors_and_dims(names, leaves), 1)

    @property
    def dynamic_sizes(self) -> dict[str, dict[int, str]]:
        """The dim that counts samples of every tensor that has one, as a dynamic size for `capture`."""
        names, leaves, _ = self._named_leaves()
        _, dims = self._tensors_and_dims(names, leaves)
        return {name: {dim: BATCH} for name, dim in dims.items()}

    def _named_leaves(self) -> tuple[Sequence[Any], list[Any], pytree.TreeSpec]:
        leaves, structure = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return call_layout(self.module, structure, leaves).leaves, leaves, structure

    def _tensors_and_dims(
        self, names: Sequence[Any], leaves: Sequence[Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return the tensors of the call by their names, and the dim that counts samples of those that have one."""
        tensors = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(name, str)}
        requested = self.batch_dims or {}
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
