"""Mesh axes, specs, and the meaning of a spec for a real tensor."""

from __future__ import annotations

from autoshard.specs.axes import MeshAxis, MeshShape
from autoshard.specs.layout import (
    Segment,
    canonical,
    is_even,
    is_placeable,
    local_shape,
    segments_of,
    spec_of,
    true_local_shape,
)
from autoshard.specs.spec import BlockShard, Spec
from autoshard.specs.tensors import shard, unshard

__all__ = [
    "BlockShard",
    "MeshAxis",
    "MeshShape",
    "Segment",
    "Spec",
    "canonical",
    "is_even",
    "is_placeable",
    "local_shape",
    "segments_of",
    "shard",
    "spec_of",
    "true_local_shape",
    "unshard",
]
