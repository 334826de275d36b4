"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # tensors with a device, and no numbers
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator that is called while it is active

__all__ = ["FakeTensorMode", "TorchDispatchMode", "memory_of"]


def memory_of(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors that lie in the same memory, with or without numbers."""
    return int(tensor.untyped_storage()._cdata)
