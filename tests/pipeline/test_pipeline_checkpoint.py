"""Checkpoints of pipelines: saved on one mesh, resumed on another, on one device, and on the first, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.pipeline.schedule.actions import schedule
from autoshard.runtime.shards import gather_full_tensor
from tests import models
from tests.pipeline.pipelines import model, pipeline_of, plan_by_hand, resume, state_of
from tests.training import fast_links
from tests.workers import Workers

pytestmark = pytest.mark.slow
RATE = 1e-2
OPTIONS: dict[str, Any] = {"layers": 1, "tied": True}

Tensors = dict[str, torch.Tensor]


def resumed(module: nn.Module, folder: str) -> torch.optim.Optimizer:
    """An optimizer of the module, both as saved."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    resume(module, optimizer, folder)
    assert optimizer.param_groups[0]["lr"] == RATE
    return optimizer


def held(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Everything that is saved, whole."""
    state = state_of(module, optimizer)
    tensors = {key: value for part in state.values() for key, value in part.items() if isinstance(value, torch.Tensor)}
    return {
        key: gather_full_tensor(value) if isinstance(value, DTensor) else value.clone()
        for key, value in tensors.items()
    }


def train(module: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> torch.Tensor:
    """One step; its loss."""
    optimizer.zero_grad()
    if isinstance(module, PipelineModule):
        loss = module.train_step(**inputs)
    else:
        loss = module(**inputs)[1]
        loss.backward()
    optimizer.step()
    return loss.detach()


def other() -> models.Model:
    """The model with other numbers, and the same batch."""
    return model("gpt", seed=1, **OPTIONS)[0], model("gpt", **OPTIONS)[1]


def saved_by_a_pipeline(plan: PipelinePlan, folder: str) -> tuple[Tensors, torch.Tensor]:
    module, inputs = model("gpt", **OPTIONS)
    pipeline = pipeline_of(module, inputs, plan)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
    for _ in range(2):
        train(pipeline, optimizer, inputs)
    dcp.save(state_of(pipeline, optimizer), checkpoint_id=folder)
    return held(pipeline, optimizer), train(pipeline, optimizer, inputs)


def resumed_by_replicas(folder: str, again: str) -> tuple[Tensors, torch.Tensor]:
    module, inputs = other()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast"))
    optimizer = resumed(module, folder)
    dcp.save(state_of(module, optimizer), checkpoint_id=again)
    return held(module, optimizer), train(module, optimizer, inputs)


def resumed_by_a_pipeline(plan: PipelinePlan, folder: str) -> tuple[Tensors, torch.Tensor]:
    module, inputs = other()
    pipeline = pipeline_of(module, inputs, plan)
    optimizer = resumed(pipeline, folder)
    return held(pipeline, optimizer), train(pipeline, optimizer, inputs)


def resumed_alone(folder: str, again: str | None = None) -> tuple[Tensors, torch.Tensor]:
    module, inputs = other()
    optimizer = resumed(module, folder)
    if again is not None:
        dcp.save(state_of(module, optimizer), checkpoint_id=again)
    return held(module, optimizer), train(module, optimizer, inputs)


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def test_a_pipeline_is_resumed_anywhere(four: Workers, tmp_path: Path) -> None:
    plan = plan_by_hand(*model("gpt", **OPTIONS), {"pp": 2, "tp": 2}, schedule("1F1B", 2, 2))
    pipeline, replicas, alone = (str(tmp_path / name) for name in ("pipeline", "replicas", "alone"))
    first = four.run(saved_by_a_pipeline, plan, pipeline)
    second = four.run(resumed_by_replicas, pipeline, replicas)
    tensors, loss = resumed_alone(pipeline)
    third = resumed_alone(replicas, alone)
    last = four.run(resumed_by_a_pipeline, plan, alone)
    assert set().union(*(held for held, _ in first)) == tensors.keys()
    for found, next_loss in (*first, *second, third, *last):
        assert_same(found, tensors)
        torch.testing.assert_close(next_loss, loss, rtol=1e-9, atol=0.0)
    assert second[0][0].keys() == third[0].keys() == tensors.keys()
