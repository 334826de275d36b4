"""gloo with one thread for every group.

Torch gives it two, which both write what they did last into one string, without a lock: where all-gathers in flight end
at once, the heap is corrupted (seen in torch 2.13.0; `docs/compatibility.md` tells more).
"""

from __future__ import annotations

import functools
from datetime import timedelta

import torch.distributed as dist

NAME = "gloo_one_thread"


def register() -> str:
    """Make the backend known; returns its name, for `init_process_group`."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _backend, devices=["cpu"])
    return NAME


def _backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


@functools.cache
def _device() -> object:
    """One for all groups: each has a thread that looks for messages a hundred times a second."""
    return dist.ProcessGroupGloo.create_default_device()
