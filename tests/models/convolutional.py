"""Convolutional networks, written out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.models.common import BATCH, Model, fixed_seed


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet of basic blocks, two to a stage: logits, or a dict of loss and logits when there are labels."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, 3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages = []
        for index, width in enumerate(widths):
            inputs, stride = (widths[index - 1], 2) if index else (width, 1)
            stages.append(nn.Sequential(Residual(inputs, width, stride), Residual(width, width, 1)))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        features = functional.adaptive_avg_pool2d(self.stages(self.stem(pixel_values)), 1).flatten(1)
        logits = self.classifier(features)
        if labels is None:
            return logits
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def resnet18(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, size: int = 32) -> Model:
    """ResNet-18 (eight basic blocks in four stages), narrow, for small images and 12 classes."""
    with fixed_seed(dtype, seed):
        module = ResNet((12, 12, 24, 24), 12)
        inputs = {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 12, (batch,))}
        return module, inputs


class Vgg(nn.Module):
    """A VGG: stages of convolutions with batch norm, each halved by pooling, and three linear layers."""

    def __init__(self, widths: tuple[int, ...], size: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in widths:
            for _ in range(2):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        flat = widths[-1] * (size >> len(widths)) ** 2
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(flat, 48), nn.ReLU(True), nn.Linear(48, 48), nn.ReLU(True), nn.Linear(48, classes)
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.classifier(self.features(pixel_values))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def vgg(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, size: int = 12) -> Model:
    """A VGG of two stages for small images and 12 classes."""
    with fixed_seed(dtype, seed):
        return Vgg((12, 24), size, 12), _images(batch, size)


def wide_resnet(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH, size: int = 16) -> Model:
    """A Wide-ResNet: two blocks to a stage, twice as wide as the ResNet, one stage less deep."""
    with fixed_seed(dtype, seed):
        return ResNet((24, 48), 12), _images(batch, size)


def _images(batch: int, size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 12, (batch,))}


class Turn(nn.Module):
    """Two convolutions with group norm that take in the time of a step of diffusion, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(y)))


class PixelAttention(nn.Module):
    """Self-attention over the pixels of an image."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, height, breadth = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, self.heads, width // self.heads, -1).transpose(-1, -2).unbind(1)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(-1, -2)
        return x + self.out(y.reshape(batch, width, height, breadth))


class UNet(nn.Module):
    """A U-Net that predicts the noise of a diffused image: down, attention at the bottom, up with what went down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = Turn(width, width, 2 * width)
        self.shrink = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = Turn(2 * width, 2 * width, 2 * width)
        self.attention = PixelAttention(2 * width, 4)
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")
        self.up = Turn(3 * width, width, 2 * width)
        self.norm = nn.GroupNorm(4, width)
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, image: torch.Tensor, noise: torch.Tensor, step: torch.Tensor) -> dict[str, torch.Tensor]:
        rates = torch.exp(torch.arange(self.width // 2, device=step.device, dtype=image.dtype) * -0.5)
        angles = step[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        high = self.down(self.enter(image + noise), time)
        low = self.attention(self.middle(self.shrink(high), time))
        joined = torch.cat([self.grow(low), high], 1)
        predicted = self.leave(functional.silu(self.norm(self.up(joined, time))))
        return {"loss": functional.mse_loss(predicted, noise), "sample": predicted}


def unet(*, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> Model:
    """A U-Net with attention for images of 8 by 8."""
    with fixed_seed(dtype, seed):
        inputs = {"image": torch.randn(batch, 3, 8, 8), "noise": torch.randn(batch, 3, 8, 8), "step": torch.rand(batch)}
        return UNet(12), inputs
