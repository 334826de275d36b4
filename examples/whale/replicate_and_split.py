"""Whale's Example 2, hybrid parallelism: torchrun --nproc-per-node 2 examples/whale/replicate_and_split.py

Every device computes the features of its part of the batch. The classifier, whose weight is most of the model, is
split. In Whale:

    wh.init()
    with wh.replicate(total_gpu):
        features = ResNet50(inputs)
    with wh.split(total_gpu):
        logits = FC(features)
        predictions = Softmax(logits)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from together import compare
from torch import Tensor, nn

import autoshard

CLASSES = 2048


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class Classifier(nn.Module):
    def __init__(self, devices: int) -> None:
        super().__init__()
        self.devices = devices
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), Residual(8), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.classes = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with autoshard.replicate(self.devices):
            features = self.features(images)
        with autoshard.split(self.devices):
            return F.cross_entropy(self.classes(features), labels)


def build(devices: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Classifier(devices), (torch.randn(8, 3, 16, 16), torch.randint(0, CLASSES, (8,)))


if __name__ == "__main__":
    compare(build)
