"""Stage graphs of the shared models."""

from __future__ import annotations

from typing import Any

from torch import nn

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep, capture_microbatch
from autoshard.specs.axes import MeshShape


def cost_model() -> CostModel:
    """Prices of one H100."""
    return CostModel(Cluster.of("h100"), MeshShape.of({"x": 1}))


def export_call(module: nn.Module, kwargs: dict[str, Any]) -> MicrobatchStep:
    """The forward graph of a call."""
    return capture_microbatch(module, (), kwargs)
