"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import torch

# The type of an operator such as torch.ops.aten.mm.default.
from torch._ops import OpOverload

collectives = torch.ops._c10d_functional
"""Functional collectives, of which programs consist and which are measured."""

__all__ = ["OpOverload", "collectives"]
