"""Pipelines in real processes over gloo, against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.errors import PipelineError
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.schedules import SCHEDULES, schedule
from tests.models.common import fixed_seed
from tests.pipeline.pipelines import (
    assert_equal,
    pipeline_of,
    plan_by_hand,
    train_alone,
    train_model_alone,
    train_pipeline,
)
from tests.pipeline.planned_cases import OURS, Case
from tests.pipeline.small_pipelines import Tower
from tests.workers import Workers

SMALL = {"layers": 1}
DATA = {"pp": 2, "dp": 2}
MANY = {"batch": 32}
# Every model once; the page of numerics has all of them on all meshes.
CASES = [
    Case("hf_llama", {"pp": 2, "tp": 2}, "InterleavedZeroBubble", 2, options=SMALL),
    Case("hf_t5", {"pp": 4}, "1F1B", 4),
    Case("unet", {"pp": 2, "dp": 2}, "GPipe", 2),
    Case("hf_mixtral", {"pp": 2, "tp": 2}, "GPipe", 2),
    Case("gpt", {"pp": 2, "dp": 2}, "Interleaved1F1B", 2, shards=True, options=SMALL),
]


def check(case: Case, workers: Workers) -> None:
    plan = case.plan()
    placed = [row for stage in plan.stages[:-1] for row in stage.output_placements.values()]
    assert any(not placement.is_replicate() for row in placed for placement in row) == case.shards
    assert_equal(case.run(workers, plan), train_model_alone(case.model, 1, **(case.options or {})))


def test_two_stages(two: Workers) -> None:
    check(Case("hf_gpt2", {"pp": 2}, "1F1B", 2, options=SMALL), two)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_on_four_ranks(four: Workers, case: Case) -> None:
    check(case, four)


@pytest.mark.slow
def test_three_axes() -> None:
    with Workers(8, timeout=100.0) as eight:
        check(Case("gpt", {"pp": 2, "dp": 2, "tp": 2}, "1F1B", 2, options=SMALL), eight)


@pytest.mark.parametrize("name", [*SCHEDULES, OURS])
def test_every_schedule(two: Workers, name: str) -> None:
    """With tied parameters: on two ranks, or on one where stages lie there and back."""
    check(Case("gpt", {"pp": 2}, name, 4, options={"layers": 1, "tied": True}), two)


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
    with fixed_seed(torch.float64, 0):
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
    return train_pipeline(pipeline_of(module, inputs, plan), inputs)


class Counted(Tower):
    """A tower with a factor, that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.calls = 1.0, 0

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, target) * self.factor


def _state_of_a_pipeline() -> tuple[list[float], int, str]:
    torch.manual_seed(0)
    model = Counted()
    inputs = {"x": torch.randn(4, 32), "target": torch.randn(4, 32)}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline = autoshard.parallelize(
        model, mesh, example_kwargs=inputs, pipeline=autoshard.Pipeline(axis="pp", microbatches=2)
    )
    losses = []
    for factor in (1.0, 3.0, 1.0):
        model.factor = factor
        losses.append(pipeline.train_step(**inputs).item())
    model.layers[0] = nn.Linear(32, 32)
    with pytest.raises(PipelineError) as raised:
        pipeline.train_step(**inputs)
    return losses, model.calls, str(raised.value)


def test_a_change_of_state_is_seen(two: Workers) -> None:
    for losses, calls, said in two.run(_state_of_a_pipeline):
        assert losses[1] == pytest.approx(3 * losses[0])
        assert losses[2] == pytest.approx(losses[0])
        assert calls == 3
        assert "layers.0.weight was put into Counted after the pipeline" in said
