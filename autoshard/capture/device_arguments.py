"""Devices that a model's code names, which say nothing while it is captured: all tensors are on the CPU then."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoshard.capture.capture_errors import is_users_file, running_line
from autoshard.capture.fake_module import DEVICE

_attributes: Any = torch.Tensor  # whose attributes are descriptors
_IS_CUDA = _attributes.is_cuda.__get__
_TO_DEVICE = frozenset({torch.Tensor.cuda, torch.Tensor.xpu, torch.Tensor.cpu})


def without_devices(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A call of a torch function that puts its result on the device of a capture, whatever device it names.

    What is put on the meta device has no numbers on any device, and stays there.
    """
    if func == _IS_CUDA:
        _warn_of_cuda_query()
    if func in _TO_DEVICE:
        return torch.Tensor.to, (args[0], DEVICE), {}
    args = tuple(_replace_device(func, value) for value in args)
    return func, args, {name: _capture_device(value) if name == "device" else value for name, value in kwargs.items()}


def _warn_of_cuda_query() -> None:
    """Warn of code that asks whether a tensor is on a GPU, unless that is a library's own."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # modes hand it on
        frame = frame.f_back
    if not is_users_file(frame.f_code.co_filename):
        return
    warnings.warn(
        f"{running_line()} asks whether a tensor is on a GPU: the captured graph takes the answer no, on every device.",
        stacklevel=1,
    )


def _replace_device(func: Callable[..., Any], value: Any) -> Any:
    is_name = isinstance(value, str) and func is torch.Tensor.to
    return _capture_device(value) if is_name or isinstance(value, torch.device) else value


def _capture_device(device: Any) -> Any:
    return device if device is None or torch.device(device).type == "meta" else DEVICE
