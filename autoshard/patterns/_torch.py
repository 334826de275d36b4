"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import torch
from torch._ops import OpOverload  # the type of an operator such as torch.ops.aten.mm.default

collectives = torch.ops._c10d_functional
"""Collectives as operators on tensors, which a graph can hold."""

__all__ = ["OpOverload", "collectives"]
