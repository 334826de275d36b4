"""Parameters and buffers that code finds elsewhere than in the module: in a global variable, a list, a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autoshard.capture._torch import storage_of
from autoshard.errors import CaptureError


class TracedParameters(TorchFunctionMode):
    """While active, functions of torch take the traced parameter or buffer in the place of the user's.

    The capture runs a copy of the module, in which tensors are fake: what code reads from elsewhere is real, and would
    be a constant of the graph, without a gradient.

    Args:
        module: the user's.
        twin: the copy that is captured.
    """

    def __init__(self, module: nn.Module, twin: nn.Module) -> None:
        super().__init__()
        self._tensors: dict[int, tuple[nn.Module, str]] = {}
        self._whole: dict[int, str] = {}  # names by storage, of tensors that can have views
        parts = dict(twin.named_modules())
        for path, part in module.named_modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and path in parts:
                    self._tensors[id(tensor)] = parts[path], name
                    if not isinstance(tensor, DTensor):
                        self._whole[storage_of(tensor)] = f"{path}.{name}" if path else name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(
            *map(self._traced_value, args),
            **{name: self._traced_value(value) for name, value in (kwargs or {}).items()},
        )

    def _traced_value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            place = self._tensors.get(id(value))
            return value if place is None else getattr(*place)
        return type(value)(map(self._traced_value, value)) if type(value) in (list, tuple) else value

    def check_constant(self, constant: Tensor, line: str) -> None:
        """`CaptureError` if a constant of the graph looks at the memory of a parameter or buffer."""
        name = self._whole.get(storage_of(constant))
        if name is not None:
            raise CaptureError(
                f"{line} reads a view of {name} that was made outside of forward: a parallelised module has another "
                f"{name} in its place. Make the view in forward."
            )
