"""Stage graphs of the shared models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoshard.capture._torch import fake_mode
from autoshard.capture.export import Exported, export_forward
from autoshard.capture.twin import fake_like, fake_twin
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.specs.axes import MeshShape


def cost_model() -> CostModel:
    """Prices of one H100."""
    return CostModel(Cluster.of("h100"), MeshShape.of({"x": 1}))


def exported(module: nn.Module, kwargs: dict[str, Any]) -> Exported:
    """The forward graph of a call, as capture exports it."""
    mode, device = fake_mode(), torch.device("cpu")
    twin = fake_twin(module, mode, device, None)
    fakes = {name: fake_like(value, mode, device) for name, value in kwargs.items()}
    return export_forward(twin, (), fakes, mode, device)
