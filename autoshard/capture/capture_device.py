"""The device of all tensors in a capture, used instead of devices that a model's code names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autoshard.capture.capture_errors import is_users_file, running_line

DEVICE = torch.device("cpu")
"""The device of all tensors in a capture, wherever the model is and will run."""

_attributes: Any = Tensor  # class attributes are descriptors, unknown to the type
_IS_CUDA = _attributes.is_cuda.__get__
_TO_DEVICE = frozenset({Tensor.cuda, Tensor.xpu, Tensor.cpu})


def without_devices(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call of a torch function whose result is on the capture's device, whatever device it names."""
    if func == _IS_CUDA:
        _warn_of_cuda_query()
    if func in _TO_DEVICE:
        return Tensor.to, (args[0], DEVICE), {}
    args = tuple(
        _capture_device(value)
        if isinstance(value, torch.device) or (isinstance(value, str) and func is Tensor.to)
        else value
        for value in args
    )
    return func, args, {name: _capture_device(value) if name == "device" else value for name, value in kwargs.items()}


def _capture_device(device: Any) -> Any:
    # A meta tensor has no numbers on any device, and stays on the meta device.
    return device if device is None or torch.device(device).type == "meta" else DEVICE


def _warn_of_cuda_query() -> None:
    """Warn if the user's code, not a library's, asks whether a tensor is on a GPU."""
    # Modes from the one that replaces devices on pass the call to each other; the user's frame is below theirs.
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    if is_users_file(frame.f_code.co_filename):
        warnings.warn(
            f"{running_line()} asks whether a tensor is on a GPU: the captured graph takes the answer no, on every "
            "device.",
            stacklevel=1,
        )
