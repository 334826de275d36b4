"""`BoundCall`: a call of a module, flattened once; it provides the names, the tensors and the signature."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import CallLayout, leaf_names, value_key
from autoshard.capture.dense import dense_fault, is_dense
from autoshard.errors import InputError


# Not slotted: properties computed from the leaves are cached in the instance.
@dataclass(frozen=True, eq=False)
class BoundCall:
    """A call of a module, flattened.

    Attributes:
        module: the called module, whose `forward` names the arguments.
        args: positional arguments: tensors (global shapes) or plain values, nested as `torch.utils._pytree` supports.
        kwargs: keyword arguments.
        leaves: the leaves of `(args, kwargs)`, in flattening order.
        structure: the structure of `(args, kwargs)`.
        grad: True if gradients are requested.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Any]
    structure: pytree.TreeSpec
    grad: bool

    @classmethod
    def of(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], grad: bool | None = None
    ) -> BoundCall:
        """Flatten a call.

        Args:
            module, args, kwargs: as for the class.
            grad: True if gradients are requested; None: True if they are enabled, and a parameter of the module or a
                tensor of the call requires one.
        """
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        if grad is None:
            grad = torch.is_grad_enabled() and _requires_gradient(module, leaves)
        return cls(module, args, kwargs, leaves, structure, grad)

    @property
    def has_arguments(self) -> bool:
        """True unless nothing is passed."""
        return bool(self.args or self.kwargs)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, such as `input_ids` or `batch['x'][0]`."""
        return {name: leaf for name, leaf in self._named_leaves if isinstance(leaf, torch.Tensor)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def _named_leaves(self) -> Iterable[tuple[str, Any]]:
        return zip(leaf_names(self.module, self.structure), self.leaves, strict=True)

    @cached_property
    def signature(self) -> Hashable:
        """A key of everything in the call that the captured graph depends on.

        It covers structure, shape, dtype and `requires_grad` of tensors, plain values, training flags and frozen
        parameters of the module, whether gradients are requested, autocast and the default dtype. The order of keyword
        arguments does not matter.

        Raises:
            InputError: a plain value cannot be hashed, or a tensor is sparse, nested or quantized.
        """
        return self._key([_leaf_key(leaf) for leaf in self.leaves])

    @property
    def kind(self) -> Hashable:
        """A key of the call without sizes (except those of `DTensor`s) and plain values."""
        sizes = tuple(tuple(tensor.shape) for tensor in self.tensors.values() if isinstance(tensor, DTensor))
        kinds = tuple((name, tensor.dtype, tensor.ndim) for name, tensor in self.tensors.items())
        return self.grad, self.module.training, kinds, sizes

    def signature_of_dynamic(self, dynamic: Mapping[str, Collection[int]]) -> Hashable:
        """Return a signature without the sizes of some dims, given by tensor name; raises the same errors."""
        return "dynamic", self._key([_leaf_key(leaf, dynamic.get(name, ())) for name, leaf in self._named_leaves])

    def _key(self, leaves: Sequence[Hashable]) -> Hashable:
        structure, places = _by_keyword(self.structure)
        ordered = tuple(leaves[place] for place in places)
        return structure, ordered, self.grad, _module_state(self.module), _surrounding_dtypes()

    def tensors_of(self, layout: CallLayout) -> list[torch.Tensor]:
        """Return the tensors in the order of the captured call.

        Raises:
            InputError: the captured call has another structure, or other values that are not tensors.
        """
        if tuple(self.kwargs) != layout.keywords:
            return layout.flatten(self.args, self.kwargs)
        return layout.tensors(self.leaves, self.structure)

    def with_leaves(self, leaves: Sequence[Any]) -> BoundCall:
        """Return the call with other leaves in the same structure."""
        args, kwargs = self.structure.unflatten(leaves)
        return replace(self, args=args, kwargs=kwargs, leaves=leaves)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> BoundCall:
        """Return the call with other tensors of these names."""
        return self.with_leaves([tensors.get(name, leaf) for name, leaf in self._named_leaves])

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> BoundCall:
        """Return the call with a function applied to every tensor."""
        return self.with_leaves([function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves])


# Most modules have few kinds of calls.
@lru_cache(maxsize=1 << 10)
def _by_keyword(structure: pytree.TreeSpec) -> tuple[pytree.TreeSpec, Sequence[int]]:
    """Return the structure of a call with sorted keyword arguments, and the index of each of its leaves in the call."""
    args, kwargs = structure.unflatten(range(structure.num_leaves))
    places, ordered = pytree.tree_flatten((args, {name: kwargs[name] for name in sorted(kwargs)}))
    return ordered, places


def _requires_gradient(module: nn.Module, leaves: Sequence[Any]) -> bool:
    """Return True if a parameter of a module or a tensor of a call requires a gradient."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _leaf_key(leaf: Any, dynamic: Collection[int] = ()) -> Hashable:
    """Return the key of a leaf in a signature; that of a tensor omits the sizes of dynamic dims."""
    if not isinstance(leaf, torch.Tensor):
        return value_key(leaf)
    if not is_dense(leaf):
        raise InputError(dense_fault(f"an argument of {leaf.dtype}", leaf))
    shape: Sequence[int | None] = leaf.shape
    if dynamic:
        # Users may count dims from the end.
        free = {dim % leaf.ndim for dim in dynamic}
        shape = tuple(None if dim in free else size for dim, size in enumerate(shape))
    # The placements of a `DTensor` are fixed in its program.
    return shape, leaf.dtype, leaf.requires_grad, isinstance(leaf, DTensor)


def _module_state(module: nn.Module) -> tuple[bool, ...]:
    """Return the training flag of every submodule and `requires_grad` of every parameter."""
    # Runs at every call of a parallelised module: `modules()` and `parameters()`, which build names and sets of visited
    # objects, would take several times as long.
    flags: list[bool] = []
    waiting = [module]
    for current in waiting:  # the list grows in the loop
        flags.append(current.training)
        if current._parameters:
            flags += [parameter.requires_grad for parameter in current._parameters.values() if parameter is not None]
        if current._modules:
            waiting += [child for child in current._modules.values() if child is not None]
    return tuple(flags)


def _surrounding_dtypes() -> Hashable:
    """Return the default dtype, which applies to new tensors and integer division, and the dtypes of autocast."""
    casts = (
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
    return (torch.get_default_dtype(), *casts)
