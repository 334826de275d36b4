"""Whale's Example 3, an automatic pipeline: torchrun --nproc-per-node 2 examples/whale/auto_pipeline.py

The model has no marks. The search cuts the stages by seconds, memory, and bytes that cross to the next stage. In Whale:

    wh.init(wh.Config({"num_task_graph": 2, "num_micro_batch": 4, "auto_parallel": True}))
    model_def()
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from together import compare
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
        self.classes = nn.Linear(32, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classes(self.layers(x)), labels)


def build(devices: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Model(), (torch.randn(16, 32), torch.randint(0, 10, (16,)))


if __name__ == "__main__":
    compare(build, stages=2, microbatches=4)
