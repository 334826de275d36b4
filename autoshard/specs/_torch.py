"""The private torch names that this room uses, in one place."""

from __future__ import annotations

# Placement of a factor that is not the major one of its dim: no public name yet.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
