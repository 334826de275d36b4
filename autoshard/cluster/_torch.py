"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import torch

# The type of an operator such as torch.ops.aten.mm.default.
from torch._ops import OpOverload

collectives = torch.ops._c10d_functional
"""Collectives as operators on tensors: those that programs are made of, which are the ones to measure."""

__all__ = ["OpOverload", "collectives"]
