"""Double precision all through: models that ask for float32 inside get float64, so that only sharding can differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    """While active, tensors made without a dtype are float64; what was captured so must run so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        named = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*wide, **named)
