"""Functions run on whole tensors in the place of parameters of which only a part is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoshard.runtime import _torch
from autoshard.runtime.shards import cut, gather_full_tensor, local_of
from autoshard.specs.spec import Spec


class TensorParts(Protocol):
    """The tensors of which this rank has a part, or none."""

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of them."""

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        """The whole tensor that stands in for one: with its numbers, if it has any yet."""

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        """Keep this rank's part of what was written to the whole tensor, which is let go."""

    def device_sample(self, tensor: Tensor) -> Tensor:
        """A tensor on the device of the whole tensor."""


class DTensorParts:
    """`DTensor`s, of which every rank has its shard."""

    def __contains__(self, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor)

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        assert isinstance(tensor, DTensor)
        if Spec(tuple(tensor.placements)).is_replicated:
            return local_of(tensor)
        if written:
            return gather_full_tensor(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=local_of(tensor).device)

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        assert isinstance(tensor, DTensor)
        if whole is not local_of(tensor):
            fill(tensor, whole)

    def device_sample(self, tensor: Tensor) -> Tensor:
        return tensor


def fill(tensor: Tensor, value: Tensor) -> None:
    """Fill a tensor with a whole one; a `DTensor`, with this rank's part of it."""
    if isinstance(tensor, DTensor):
        local_of(tensor).copy_(cut(value, tensor.device_mesh, Spec(tuple(tensor.placements))))
    else:
        tensor.copy_(value)


class WholeTensors(TorchFunctionMode):
    """While active, functions of parts get whole plain tensors, and of what they write there the parts are kept.

    The whole tensor of a parameter is there as long as a function or a view needs it. All ranks call the same functions
    in the same order, as they do when initialising.
    """

    def __init__(self, parts: TensorParts) -> None:
        super().__init__()
        self._parts = parts
        self._stand_ins: dict[Tensor, Tensor] = {}
        self._touched: set[Tensor] = set()

    @property
    def touched(self) -> frozenset[Tensor]:
        """The tensors that were given to a function that may have written to them."""
        return frozenset(self._touched)

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_metadata(function):
            if _attribute_name(function) in _DEVICE_ATTRIBUTES and args[0] in self._parts:
                args = (self._parts.device_sample(args[0]), *args[1:])
            return function(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._release(keep=tensors)
        opened = {tensor: self._stand_in_for(tensor) for tensor in tensors if tensor in self._parts}
        leaves = [opened.get(leaf, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._touched.update(tensors)
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        result = function(*args, **kwargs)
        return next((tensor for tensor, stand_in in opened.items() if stand_in is result), result)

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        if failure[0] is None:
            self._release(keep=(), views=False)

    def _stand_in_for(self, tensor: Tensor) -> Tensor:
        if tensor not in self._stand_ins:
            self._stand_ins[tensor] = self._parts.whole(tensor, tensor in self._touched)
        return self._stand_ins[tensor]

    def _release(self, keep: Sequence[Tensor], views: bool = True) -> None:
        """Keep the parts of all whole tensors that nobody needs any more."""
        kept = {id(tensor) for tensor in keep}
        for tensor, stand_in in list(self._stand_ins.items()):
            if id(tensor) in kept or (views and _torch.has_views(stand_in)):
                continue
            self._parts.keep(tensor, stand_in)
            del self._stand_ins[tensor]


# What only tells of a tensor, so that no whole tensor need be made for it.
_METADATA_METHODS = frozenset(
    {
        *("dim", "ndimension", "size", "numel", "nelement", "stride", "element_size"),
        *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "__len__", "__hash__", "__repr__"),
    }
)
_DEVICE_ATTRIBUTES = frozenset({"device", "is_meta", "is_cpu", "is_cuda"})
_DATA_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def _is_metadata(function: Any) -> bool:
    """Whether a function tells or sets what a tensor is, rather than what is in it."""
    if getattr(function, "__name__", "") in ("__get__", "__set__"):
        return _attribute_name(function) not in _DATA_ATTRIBUTES
    return getattr(function, "__name__", "") in _METADATA_METHODS


def _attribute_name(function: Any) -> str:
    """Name of the attribute that a function gets or sets; empty for any other function."""
    return getattr(getattr(function, "__self__", None), "__name__", "")
