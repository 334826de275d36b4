"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import torch

# Shards a factor that is not the outermost of its dim; torch has no public name for it yet.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard", "collectives"]

collectives = torch.ops._c10d_functional
"""Collectives as operators on tensors, which a graph can hold."""
