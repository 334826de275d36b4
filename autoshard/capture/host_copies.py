"""Operators that copy tensors between a device and its host.

In the graph of a step, `to_host` and `to_device` stand for a whole copy. A program that copies beside its compute has
`start_to_host` and `start_to_device` in their place, which only begin one, and `await_copy` where the copy has to be
there. On accelerators, copies to the host run on one stream and copies back on another, in memory of the host that is
locked in place. On a CPU every one of these operators copies at once, and waiting does nothing.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from autoshard.operator_library import define

Direction = Literal["to host", "from host"]

_HOST = torch.device("cpu")
_COPIED = "_autoshard_copied"  # the attribute of a tensor that is being copied: the event at which it is there


def host_memory(x: Tensor) -> Tensor:
    """Return contiguous memory of the host of the shape of a tensor."""
    return torch.empty_like(x, device=_HOST, pin_memory=x.device.type != "cpu", memory_format=torch.contiguous_format)


def _host_like(x: Tensor) -> Tensor:
    """Return memory of the host for a tensor, in the same order."""
    if x.device.type == "cpu":
        return torch.empty_like(x)
    return torch.empty_like(x, device=_HOST, pin_memory=True)


def _to_host(x: Tensor) -> Tensor:
    # What follows on the same stream runs after the copy; the host does not wait.
    return _host_like(x).copy_(x, non_blocking=True)


def _to_device(x: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x, device=device, pin_memory=False).copy_(x, non_blocking=True)


def _start_to_host(x: Tensor) -> Tensor:
    return copy_aside(_host_like(x), x, x.device, "to host")


def _start_to_device(x: Tensor, device: torch.device | None = None) -> Tensor:
    # Memory of the stream that computes: it is freed there, after its last reader.
    copy = torch.empty_like(x, device=device, pin_memory=False)
    return copy_aside(copy, x, copy.device, "from host")


def copy_aside(copy: Tensor, source: Tensor, device: torch.device, direction: Direction) -> Tensor:
    """Copy on the stream of a direction, after all that was issued before; `await_copy` waits for it."""
    if device.type == "cpu":
        return copy.copy_(source)
    backend = torch.get_device_module(device)
    stream = _stream(device, direction)
    stream.wait_stream(backend.current_stream(device))
    with backend.stream(stream):
        copy.copy_(source, non_blocking=True)
    # It lives as long as the tensor that a program has in its hands.
    setattr(copy, _COPIED, stream.record_event())
    return copy


@functools.cache
def _stream(device: torch.device, direction: Direction) -> Any:
    """Return the stream of a device for one direction: the link carries both at a time."""
    return torch.get_device_module(device).Stream(device)


def await_copy(copy: Tensor, source: Tensor | None = None) -> Tensor:
    """Let what is issued next wait for a copy that `copy_aside` began."""
    event = getattr(copy, _COPIED, None)
    if event is not None:
        # Copies to the host lie there, and their source on the device.
        device = copy.device if source is None else source.device
        torch.get_device_module(device).current_stream(device).wait_event(event)
        delattr(copy, _COPIED)
    return copy


def synchronize(copy: Tensor) -> None:
    """Let the host itself wait for a copy that `copy_aside` began."""
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
"""Copies a tensor from the host to a device; by default the host itself, where that computes."""

START_TO_HOST = define("start_to_host(Tensor x) -> Tensor", _start_to_host, _on_host)
START_TO_DEVICE = define("start_to_device(Tensor x, Device? device=None) -> Tensor", _start_to_device, _on_device)

AWAIT_COPY = define(
    "await_copy(Tensor(a) copy, Tensor? source=None) -> Tensor(a)", await_copy, lambda copy, source=None: copy
)
"""Returns a copy once it is there, for what is issued behind it. `source`, if it is given, is held until then."""

HOST_TENSORS = frozenset((TO_HOST, START_TO_HOST))
"""Operators whose results lie on the host."""

HOST_COPIES = frozenset((TO_HOST, TO_DEVICE, START_TO_HOST, START_TO_DEVICE))
"""Operators that copy over the link to the host."""
