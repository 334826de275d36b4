"""Whale's Example 1, a pipeline of two task graphs: torchrun --nproc-per-node 2 examples/whale/pipeline.py

Each task graph is a stage on its own device. On four processes there are two pipelines, each for half of the batch:
nested data parallelism. In Whale:

    wh.init(wh.Config({"num_micro_batch": 8}))
    with wh.replicate(1):
        model_stage1()
    with wh.replicate(1):
        model_stage2()
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from together import compare
from torch import Tensor, nn

import autoshard


class TwoStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.second = nn.Linear(64, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with autoshard.replicate(1):
            x = self.first(x)
        with autoshard.replicate(1):
            return F.cross_entropy(self.second(x), labels)


def build(devices: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return TwoStages(), (torch.randn(16, 32), torch.randint(0, 10, (16,)))


if __name__ == "__main__":
    compare(build, stages=2, microbatches=8)
