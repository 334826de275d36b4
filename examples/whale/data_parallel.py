"""Data parallelism, one task graph on all devices: torchrun --nproc-per-node 2 examples/whale/data_parallel.py

Whale 3.1.1: "in data parallelism, the whole model is a TaskGraph, which can be replicated to multiple devices". In
Whale:

    wh.init()
    with wh.replicate(total_gpu):
        model_def()
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from together import compare
from torch import Tensor, nn

import autoshard


class Classifier(nn.Module):
    def __init__(self, devices: int) -> None:
        super().__init__()
        self.devices = devices
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with autoshard.replicate(self.devices):
            return F.cross_entropy(self.layers(x), labels)


def build(devices: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Classifier(devices), (torch.randn(16, 32), torch.randint(0, 10, (16,)))


if __name__ == "__main__":
    compare(build)
