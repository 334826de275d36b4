from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture


class Placed(nn.Module):
    """Tensors put on a device by name, in all spellings."""

    def __init__(self, device: Any, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.product, self.device = nn.Linear(4, 4), device
        self.__dict__.update(tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.product(x.to(self.device)) + torch.arange(4, device=self.device)
        x = x + torch.ones(4).to(device=self.device, dtype=x.dtype) + torch.zeros_like(x, device=self.device)
        x = x + torch.ones(4).cuda() + x.new_ones(4, device=self.device) + torch.full((4,), 2.0, device=self.device)
        return x.cpu().sum()


def test_devices_that_code_names_mean_nothing() -> None:
    """A plan may be made where there is no such device."""
    prints = set()
    for device in ("cpu", "cuda", "cuda:3", torch.device("cuda", 1)):
        graph = capture(Placed(device), (torch.ones(3, 4),), {})
        prints.add(graph.fingerprint)
        for node in graph.graph_module.graph.nodes:
            assert "device" not in node.kwargs
            assert "cuda" not in str((node.args, node.kwargs))
    assert len(prints) == 1


class Asking(nn.Module):
    """Goes another way on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (3.0 if x.is_cuda else 2.0)


def test_code_that_asks_for_a_gpu_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"test_devices.py:\d+ .*asks whether a tensor is on a GPU"):
        capture(Asking(), (torch.ones(3, 4),), {})


def test_the_default_device_means_nothing() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(3, 4)
    expected = capture(module, (x,), {}).fingerprint
    torch.set_default_device("meta")
    try:
        assert capture(module, (x,), {}).fingerprint == expected
    finally:
        torch.set_default_device(None)


def test_where_the_module_is_means_nothing() -> None:
    with torch.device("meta"):
        module, x = nn.Linear(4, 4), torch.ones(3, 4)
    assert capture(module, (x,), {}).fingerprint == capture(nn.Linear(4, 4), (torch.ones(3, 4),), {}).fingerprint
