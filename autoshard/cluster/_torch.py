"""The private torch names that this room uses, in one place."""

from __future__ import annotations

from torch._ops import OpOverload  # the type of an operator such as torch.ops.aten.mm.default

__all__ = ["OpOverload"]
