"""Double precision all through: models that ask for float32 inside get float64, so that only sharding can differ."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    """While active, tensors made without a dtype are float64; what was captured so must run so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# By identity: tensors compare element by element.
_IS_FLOAT32 = functools.partial(operator.is_, torch.float32)


class Float64Mode(TorchFunctionMode):
    """While active, every request for float32 is one for float64, and so is the dtype of what is asked for without one.

    Hugging Face models compute norms, rotary tables and losses in float32 whatever their dtype is. Summing in another
    order, as shards do, then differs by float32 rounding, which says nothing about the sharding.
    """

    def __enter__(self) -> Float64Mode:
        self._doubles = default_float64()
        self._doubles.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._doubles.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function: Callable[..., Any] = torch.Tensor.double if func is torch.Tensor.float else func
        # Every call of torch comes through here, and hardly one names the dtype.
        if any(map(_IS_FLOAT32, args)):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if not kwargs:
            return function(*args)
        if any(map(_IS_FLOAT32, kwargs.values())):
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor of its own on the CPU: float64 for floating numbers, complex128 for complex ones."""
    dtype = tensor.dtype
    if tensor.is_floating_point():
        dtype = torch.float64
    elif tensor.is_complex():
        dtype = torch.complex128
    wide = tensor.detach().to("cpu", dtype, copy=True)
    return wide.requires_grad_(tensor.requires_grad)


def widen_module(module: nn.Module) -> None:
    """Move the parameters and buffers of a module to the CPU and give them the dtypes of `widen`, in place."""
    module.cpu()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.grad = None
        tensor.data = widen(tensor.detach())


def widen_tensors(tree: Any) -> Any:
    """Return nested containers with every tensor as `widen` returns it."""
    return pytree.tree_map_only(Tensor, widen, tree)
