"""A mode in which functions get whole tensors in the place of parameters of which this rank has a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoshard.runtime import _torch
from autoshard.runtime.shards import fill, gather_full_tensor, local_of
from autoshard.specs.spec import Spec


class TensorParts(Protocol):
    """The tensors of which this rank has a part, or none."""

    def __contains__(self, tensor: Tensor) -> bool:
        """Return True if a tensor is one of them."""

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        """Return the whole tensor that replaces one, with its numbers if any were written."""

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        """Keep this rank's part of the whole tensor, which is no longer used."""

    def device_sample(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device of the whole tensor."""


class DTensorParts:
    """`DTensor`s, of which every rank has its shard."""

    def __contains__(self, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor)

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        assert isinstance(tensor, DTensor)
        # Functions write to it directly.
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


class WholeTensors(TorchFunctionMode):
    """While active, functions of parts get whole plain tensors; their parts are kept after that.

    A whole tensor exists as long as a function or a view needs it. All ranks call the same functions in the same order,
    as they do when initialising.
    """

    def __init__(self, parts: TensorParts) -> None:
        super().__init__()
        self._parts = parts
        # Part -> whole tensor.
        self._stand_ins: dict[Tensor, Tensor] = {}
        # Arguments of functions that may have written to them.
        self.touched: set[Tensor] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_metadata(function):
            if _attribute_name(function) in _DEVICE_ATTRIBUTES and args[0] in self._parts:
                # A meta tensor of the model stands for one on the device of the stages.
                args = (self._parts.device_sample(args[0]), *args[1:])
            return function(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Whole tensors of earlier functions go first, so that hardly more than one is there at a time.
        self._release(keep=tensors)
        opened = {tensor: self._stand_in_for(tensor) for tensor in tensors if tensor in self._parts}
        leaves = [opened.get(leaf, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.touched.update(tensors)
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        result = function(*args, **kwargs)
        # An in-place function returns its argument.
        return next((tensor for tensor, stand_in in opened.items() if stand_in is result), result)

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        # After a failure, whole tensors may hold anything.
        if failure[0] is None:
            self._release(keep=(), views=False)

    def _stand_in_for(self, tensor: Tensor) -> Tensor:
        if tensor not in self._stand_ins:
            self._stand_ins[tensor] = self._parts.whole(tensor, tensor in self.touched)
        return self._stand_ins[tensor]

    def _release(self, keep: Sequence[Tensor], views: bool = True) -> None:
        """Keep the parts of all whole tensors but those of `keep` and, with `views`, those that have views."""
        kept = {id(tensor) for tensor in keep}
        for tensor, stand_in in list(self._stand_ins.items()):
            if id(tensor) in kept or (views and _torch.has_views(stand_in)):
                continue
            self._parts.keep(tensor, stand_in)
            del self._stand_ins[tensor]


# Functions that read or set properties that are known without the whole tensor.
_METADATA_METHODS = frozenset(
    {
        *("dim", "ndimension", "size", "numel", "nelement", "stride", "element_size"),
        *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "__len__", "__hash__", "__repr__"),
    }
)
_DEVICE_ATTRIBUTES = frozenset({"device", "is_meta", "is_cpu", "is_cuda"})
_DATA_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def _is_metadata(function: Any) -> bool:
    """Return True if a function reads or sets something else than the numbers of a tensor."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return _attribute_name(function) not in _DATA_ATTRIBUTES
    return name in _METADATA_METHODS


def _attribute_name(function: Any) -> str:
    """Return the name of the attribute that a function gets or sets; empty for any other function."""
    return getattr(getattr(function, "__self__", None), "__name__", "")
