"""Operators that copy tensors between a device and its host.

In the graph of a step, `to_host` and `to_device` are whole copies. A program that overlaps copies with compute has
`start_to_host` and `start_to_device` instead, which only begin a copy, and `await_copy` where it must be complete. On
accelerators, copies to the host run on one stream and copies back on another, in pinned host memory. On a CPU, each of
these operators copies at once, and waiting does nothing.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from autoshard.operator_library import define

Direction = Literal["to host", "from host"]

_HOST = torch.device("cpu")
_COPIED = "_autoshard_copied"  # the attribute of a pending copy: the event of its completion


def host_memory(x: Tensor) -> Tensor:
    """Return contiguous host memory with the shape of a tensor."""
    return torch.empty_like(x, device=_HOST, pin_memory=x.device.type != "cpu", memory_format=torch.contiguous_format)


def _host_like(x: Tensor) -> Tensor:
    """Return host memory for a tensor, with the same order of strides."""
    if x.device.type == "cpu":
        return torch.empty_like(x)
    return torch.empty_like(x, device=_HOST, pin_memory=True)


def _to_host(x: Tensor) -> Tensor:
    # Later work on the same stream runs after the copy; the host does not wait.
    return _host_like(x).copy_(x, non_blocking=True)


def _to_device(x: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x, device=device, pin_memory=False).copy_(x, non_blocking=True)


def _start_to_host(x: Tensor) -> Tensor:
    return copy_aside(_host_like(x), x, x.device, "to host")


def _start_to_device(x: Tensor, device: torch.device | None = None) -> Tensor:
    # Allocated on the compute stream, where it is freed after its last reader.
    copy = torch.empty_like(x, device=device, pin_memory=False)
    return copy_aside(copy, x, copy.device, "from host")


def copy_aside(copy: Tensor, source: Tensor, device: torch.device, direction: Direction) -> Tensor:
    """Copy on the stream of a direction, after all work issued before; `await_copy` waits for it."""
    if device.type == "cpu":
        return copy.copy_(source)
    backend = torch.get_device_module(device)
    stream = _stream(device, direction)
    stream.wait_stream(backend.current_stream(device))
    with backend.stream(stream):
        copy.copy_(source, non_blocking=True)
    # The event lives as long as the tensor that a program holds.
    setattr(copy, _COPIED, stream.record_event())
    return copy


@functools.cache
def _stream(device: torch.device, direction: Direction) -> Any:
    """Return a device's stream for one direction: the link can copy in both directions at once."""
    return torch.get_device_module(device).Stream(device)


def await_copy(copy: Tensor, source: Tensor | None = None) -> Tensor:
    """Let work issued later wait for a copy that `copy_aside` began."""
    event = getattr(copy, _COPIED, None)
    if event is not None:
        # A copy to the host is on the host, and its source on the device.
        device = copy.device if source is None else source.device
        torch.get_device_module(device).current_stream(device).wait_event(event)
        delattr(copy, _COPIED)
    return copy


def synchronize(copy: Tensor) -> None:
    """Block the host until a copy that `copy_aside` began is complete."""
    event = getattr(copy, _COPIED, None)
    if event is not None:
        event.synchronize()
        delattr(copy, _COPIED)


def _on_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device=_HOST)


def _on_device(x: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x, device=device)


TO_HOST = define("to_host(Tensor x) -> Tensor", _to_host, _on_host)
"""Copies a tensor to the host."""

TO_DEVICE = define("to_device(Tensor x, Device? device=None) -> Tensor", _to_device, _on_device)
"""Copies a tensor from the host to a device; the default device is the host itself, for programs on the CPU."""

START_TO_HOST = define("start_to_host(Tensor x) -> Tensor", _start_to_host, _on_host)
START_TO_DEVICE = define("start_to_device(Tensor x, Device? device=None) -> Tensor", _start_to_device, _on_device)

AWAIT_COPY = define(
    "await_copy(Tensor(a) copy, Tensor? source=None) -> Tensor(a)", await_copy, lambda copy, source=None: copy
)
"""Returns a copy once it is complete, for work issued later. `source`, if given, is held until then."""

HOST_TENSORS = frozenset((TO_HOST, START_TO_HOST))
"""Operators with results on the host."""

HOST_COPIES = frozenset((TO_HOST, TO_DEVICE, START_TO_HOST, START_TO_DEVICE))
"""Operators that copy over the link to the host."""
