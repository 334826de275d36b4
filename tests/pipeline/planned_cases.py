"""What is trained as a pipeline and compared with one device: models on meshes, each in one schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.actions import SCHEDULES, Schedule, schedule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_search import list_schedules
from tests.pipeline.pipelines import model, plan_by_hand, train_on_pipeline
from tests.workers import Workers

OURS = "custom"
"""Stands for an order of our own."""


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline.

    Attributes:
        model: one of the shared models.
        mesh: sizes of its axes.
        schedule: one of torch's, or `OURS`.
        microbatches: of a step.
        shards: whether tensors cross from stage to stage in shards.
        options: of the model.
    """

    model: str
    mesh: Mapping[str, int]
    schedule: str
    microbatches: int
    shards: bool = False
    options: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        return f"{self.model}-{sizes}-{self.schedule}{'-shards' if self.shards else ''}"

    @property
    def order(self) -> Schedule:
        """Its schedule, of as few stages per rank as there may be; of our own ones, two."""
        ranks = self.mesh["pp"]
        if self.schedule != OURS:
            return schedule(self.schedule, ranks, self.microbatches, SCHEDULES[self.schedule].virtual[0])
        costs = StageCosts(forward_seconds=1.0, input_backward_seconds=1.0, weight_backward_seconds=1.0, saved_bytes=1)
        places = (*range(ranks), *range(ranks))
        return next(list_schedules([costs] * len(places), places, self.microbatches, [100] * ranks))

    def plan(self) -> PipelinePlan:
        """Its plan."""
        module, inputs = model(self.model, **(self.options or {}))
        return plan_by_hand(module, inputs, self.mesh, self.order, shards=self.shards)

    def run(self, workers: Workers, plan: PipelinePlan) -> list[dict[str, torch.Tensor]]:
        """What every rank finds when it trains by the plan."""
        return workers.run(train_on_pipeline, self.model, plan, dict(self.options or {}))
