"""Modules that `forward` converts to the dtype or device that they have: left as they are while it is exported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from autoshard.capture._torch import attribute_patch
from autoshard.capture.capture_errors import running_line
from autoshard.errors import CaptureError


@contextlib.contextmanager
def unconverted_modules() -> Iterator[None]:
    """Context in which `module.to(...)` and its like are refused, unless there is nothing to convert.

    torch would swap every fake parameter for another object, of which the graph knows nothing.
    """

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
        for name, tensor in held:
            with torch.no_grad():
                converted = convert(tensor)
            if converted is not tensor:
                raise CaptureError(
                    f"{running_line()} converts {type(module).__name__}.{name} from {_dtype_and_device(tensor)} to "
                    f"{_dtype_and_device(converted)}: a parallelised module keeps its parameters and buffers. "
                    "Convert the module before autoshard.parallelize, or what is computed with them in forward."
                )
        return module

    with attribute_patch(nn.Module, "_apply", apply):
        yield


def _dtype_and_device(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"
