"""A rank that dies in the middle of a step: the others end, and training goes on from the last checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.pipeline.schedule.actions import schedule
from tests.pipeline.pipelines import (
    assert_equal,
    held_by,
    optimizer_of,
    pipeline_of,
    plan_by_hand,
    resume,
    state_of,
    train_alone,
    train_once,
)
from tests.pipeline.small_pipelines import tied
from tests.training import STEPS
from tests.workers import Workers

pytestmark = pytest.mark.slow


def test_nothing_is_lost_but_the_step(tmp_path: Path) -> None:
    plan = plan_by_hand(*tied(), {"pp": 2}, schedule("1F1B", 2, 2))
    with Workers(2, timeout=60.0) as workers:
        with pytest.raises(AssertionError) as caught:
            workers.run(dying, plan, str(tmp_path))
        told = str(caught.value)
        assert "rank 1: the process ended" in told
        assert "PipelineError: a step of the pipeline broke off on rank 0 (rank 0 of 2 along the pipeline)" in told
        assert "no answer" not in told
        assert_equal(workers.run(going_on, plan, str(tmp_path)), train_alone(*tied(), 2))


def started(plan: PipelinePlan) -> tuple[PipelineModule, torch.optim.Optimizer, dict[str, Any]]:
    module, inputs = tied()
    pipeline = pipeline_of(module, inputs, plan)
    return pipeline, optimizer_of(pipeline), inputs


def dying(plan: PipelinePlan, folder: str) -> None:
    """Two steps, each saved; in the third, the last stage dies in its first backward."""
    pipeline, optimizer, inputs = started(plan)
    told: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        if step == STEPS - 1 and dist.get_rank() == 1:
            next(pipeline.parameters()).register_hook(lambda gradient: os._exit(1))
        told |= train_once(pipeline, optimizer, inputs, step)
        dcp.save({**state_of(pipeline, optimizer), "told": told}, checkpoint_id=f"{folder}/{step}")


def going_on(plan: PipelinePlan, folder: str) -> dict[str, torch.Tensor]:
    """The last step, from the last that was saved."""
    pipeline, optimizer, inputs = started(plan)
    assert not Path(folder, str(STEPS - 1)).exists()
    resume(pipeline, optimizer, f"{folder}/{STEPS - 2}")
    zero = torch.zeros((), dtype=torch.float64)
    saved = {"told": {f"{kind} {step}": zero.clone() for kind in ("step", "norm") for step in range(STEPS - 1)}}
    dcp.load(saved, checkpoint_id=f"{folder}/{STEPS - 2}")
    return {**saved["told"], **train_once(pipeline, optimizer, inputs, STEPS - 1), **held_by(pipeline)}
