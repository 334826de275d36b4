"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import torch
from torch._ops import OpOverload  # the type of an operator such as torch.ops.aten.mm.default
from torch._subclasses import FakeTensor  # a tensor with a device, without data
from torch.utils import _pytree as pytree  # nested containers of tensors, as torch.export sees them

__all__ = ["FakeTensor", "OpOverload", "pytree"]


def symbolic_hint(value: torch.SymInt) -> int:
    """Return the value of a symbolic size in the example."""
    return int(value.node.hint)
