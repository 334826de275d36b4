"""The private torch names that the self-check uses, in one place."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

# Public names that torch's stubs leave out.
from torch.distributed import HashStore, PrefixStore, Store, rendezvous

__all__ = ["HashStore", "PrefixStore", "Store", "one_thread_gloo", "rendezvous"]

_NAME = "gloo_one_thread"


def one_thread_gloo() -> str:
    """Register gloo with one thread a group and return its name; two may crash the process (docs/compatibility.md)."""
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _create, devices=["cpu"])
    return _NAME


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    # The number of threads has no public option.
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 1
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)
