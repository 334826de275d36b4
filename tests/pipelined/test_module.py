"""Pipelines in real processes over gloo, against one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.pipeline.actions import Schedule
from autoshard.pipeline.costs import StageCosts
from autoshard.pipeline.list_schedule import list_schedules
from autoshard.pipeline.schedules import SCHEDULES, schedule
from autoshard.pipelined.plan import PipelinePlan
from tests.models.common import seeded
from tests.pipelined.pipelines import (
    assert_equal,
    model,
    on_pipeline,
    pipeline_of,
    plan_by_hand,
    train_alone,
    trained,
    trained_alone,
)
from tests.workers import Workers

pytestmark = pytest.mark.xdist_group("gloo")

REAL = ["hf_gpt2", "hf_llama", "hf_t5", "unet"]
MESHES: list[Mapping[str, int]] = [{"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}]


def check(workers: Workers, name: str, mesh: Mapping[str, int], order: Schedule, **options: Any) -> None:
    plan = plan_by_hand(*model(name, **options), mesh, order)
    assert_equal(workers.run(on_pipeline, name, plan, options), trained_alone(name, 1, **options))


@pytest.mark.parametrize(
    "name", [name if name == "hf_gpt2" else pytest.param(name, marks=pytest.mark.slow) for name in REAL]
)
def test_two_stages(two: Workers, name: str) -> None:
    check(two, name, {"pp": 2}, schedule("1F1B", 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", REAL)
def test_stages_that_are_sharded(four: Workers, name: str, mesh: Mapping[str, int]) -> None:
    check(four, name, mesh, schedule("GPipe", 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["gpt", "hf_t5"])
def test_shards_that_cross(four: Workers, name: str, mesh: Mapping[str, int]) -> None:
    order = schedule("Interleaved1F1B" if name == "gpt" else "1F1B", 2, 2, 2 if name == "gpt" else 1)
    plan = plan_by_hand(*model(name), mesh, order, shards=True)
    placed = [row for stage in plan.stages[:-1] for row in stage.output_placements.values()]
    assert any(not placement.is_replicate() for row in placed for placement in row)
    assert_equal(four.run(on_pipeline, name, plan, {}), trained_alone(name, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(two: Workers, name: str) -> None:
    """With tied parameters: on two ranks, or on one where stages lie there and back."""
    virtual = SCHEDULES[name].virtual[0]
    check(two, "gpt", {"pp": 2}, schedule(name, 2, 4, virtual), layers=1, tied=True)


def test_an_order_of_our_own(two: Workers) -> None:
    costs = StageCosts(forward_seconds=1.0, input_backward_seconds=1.0, weight_backward_seconds=1.0, saved_bytes=1)
    order = next(list_schedules([costs] * 4, (0, 1, 0, 1), 4, [100, 100]))
    check(two, "gpt", {"pp": 2}, order, layers=1, tied=True)


class Counting(nn.Module):
    """Begins and ends without parameters: whole numbers and truth values go from stage to stage first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.up = nn.Linear(6, 6)

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        counts = numbers.cumsum(1) % 9
        even = counts % 2 == 0
        x = self.up(self.table(counts))
        scale = x.square().mean()  # a scalar that crosses
        y = torch.where(even[..., None], x, x.tanh() * scale)
        return {"counts": counts, "y": y, "loss": (y * y).mean()}


def counting() -> tuple[nn.Module, dict[str, Any]]:
    with seeded(torch.float64, 0):
        return Counting(), {"numbers": torch.randint(0, 9, (4, 3))}


STAGES = {"cumsum": 0, "remainder": 0, "remainder_1": 0, "eq": 0, "embedding": 1, "linear": 1, "square": 1, "mean": 1}
"""The rest runs on stages without parameters."""


@pytest.mark.parametrize("name", ["Interleaved1F1B", "DualPipeV"])
def test_stages_without_parameters(two: Workers, name: str) -> None:
    module, inputs = counting()
    order = schedule(name, 2, 4, 2)
    plan = plan_by_hand(module, inputs, {"pp": 2}, order, lambda node: STAGES.get(node, 3 if node == "mean_1" else 2))
    held = [len(stage.placements) for stage in plan.stages]
    assert held == [0, 3, 0, 0]
    assert_equal(two.run(counted, plan), train_alone(module, inputs, 4))


def counted(plan: PipelinePlan) -> dict[str, torch.Tensor]:
    module, inputs = counting()
    return trained(pipeline_of(module, inputs, plan), inputs)
