"""Plans of pipelines for the tests: options as `autoshard.plan` checks them, and a small model planned once."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autoshard import Pipeline
from autoshard.capture.marks import Primitive
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.pipeline.plan.stage_reuse import PipelineCaptures
from tests import models
from tests.models.common import fixed_seed
from tests.targets import target as target_of


def quick_target(**changes: Any) -> Target:
    """The target of a quick search."""
    return target_of(**({"effort": "fast", "recompute": "auto"} | changes))


class Tower(nn.Module):
    """Linear layers one after the other, and the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


class Regions(nn.Module):
    """Three equal layers, the first two in one task graph, the third in another, and a loss."""

    def __init__(self, *marks: Primitive | None) -> None:
        super().__init__()
        self.marks = marks
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16, bias=False), nn.GELU()) for _ in range(3)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        first, second = (mark or contextlib.nullcontext() for mark in self.marks)
        with first:
            x = self.layers[:2](x)
        with second:
            x = self.layers[2](x)
        return nn.functional.mse_loss(x, target)


def tower(batch: int = 16) -> tuple[nn.Module, dict[str, Any]]:
    """A tower of six layers."""
    return Tower(), {"x": torch.randn(batch, 32), "target": torch.randn(batch, 32)}


def gpt(batch: int = 32) -> tuple[nn.Module, dict[str, Any]]:
    """A GPT of two layers whose output layer is its embedding."""
    return models.ZOO["gpt"](dtype=torch.float64, batch=batch, layers=2, tied=True)


@functools.cache
def gpt_plan(**changes: Any) -> PipelinePlan:
    """Its plan for two pipeline ranks of two devices each, four microbatches and one stage per rank."""
    module, inputs = gpt()
    wanted = quick_target(**changes)
    captures = PipelineCaptures(BatchCall(module, (), inputs), wanted)
    return plan_pipeline(captures, {"pp": 2, "x": 2}, Pipeline(axis="pp", microbatches=4, virtual=1), wanted)


class Tied(nn.Module):
    """Scores of the next word by the table that words are looked up in: its first and its last stage hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        x = self.norm(x + self.down(functional.gelu(self.up(x))))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tied(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, and a batch that is the same for all seeds."""
    with fixed_seed(torch.float64, seed):
        module = Tied()
    words, labels = torch.randint(24, (2, 4, 6), generator=torch.Generator().manual_seed(0))
    return module, {"words": words, "labels": labels}
