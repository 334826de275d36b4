"""Checkpoints of pipelines: saved on one mesh, resumed on another, on one device, and on the first, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.pipeline.schedule.actions import schedule
from autoshard.runtime.shards import gather_full_tensor
from tests.pipeline.pipelines import FLAT, pipeline_of, plan_by_hand, resume, state_of
from tests.pipeline.small_pipelines import tied
from tests.training import fast_links
from tests.workers import Workers

pytestmark = pytest.mark.slow
RATE = 1e-2
DECAY = 0.1

Tensors = dict[str, torch.Tensor]


def optimizer_of(module: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    """AdamW whose groups, of matrices and of the rest, are also on every rank of a pipeline."""
    parameters = list(module.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate)


def resumed(module: nn.Module, folder: str, options: StateDictOptions | None = FLAT) -> torch.optim.Optimizer:
    """An optimizer of the module, both as saved."""
    optimizer = optimizer_of(module, 1.0, 0.5)
    resume(module, optimizer, folder, options)
    assert [group["lr"] for group in optimizer.param_groups] == [RATE, RATE]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0]
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
        loss = module(**inputs)
        loss.backward()
    optimizer.step()
    return loss.detach()


def saved_by_a_pipeline(plan: PipelinePlan, folder: str, in_groups: str) -> tuple[Tensors, torch.Tensor]:
    module, inputs = tied()
    pipeline = pipeline_of(module, inputs, plan)
    optimizer = optimizer_of(pipeline, RATE, DECAY)
    for _ in range(2):
        train(pipeline, optimizer, inputs)
    dcp.save(state_of(pipeline, optimizer), checkpoint_id=folder)
    dcp.save(state_of(pipeline, optimizer, None), checkpoint_id=in_groups)
    return held(pipeline, optimizer), train(pipeline, optimizer, inputs)


def resumed_by_replicas(folder: str, again: str) -> tuple[Tensors, torch.Tensor]:
    module, inputs = tied(seed=1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast"))
    optimizer = resumed(module, folder)
    dcp.save(state_of(module, optimizer), checkpoint_id=again)
    return held(module, optimizer), train(module, optimizer, inputs)


def resumed_by_a_pipeline(plan: PipelinePlan, flat: str, in_groups: str) -> list[tuple[Tensors, torch.Tensor]]:
    module, inputs = tied(seed=1)
    pipeline = pipeline_of(module, inputs, plan)
    found = []
    for folder, options in ((flat, FLAT), (in_groups, None)):
        # Where there are gradients, torch gives a new optimizer no state to load into.
        pipeline.zero_grad()
        optimizer = resumed(pipeline, folder, options)
        found.append((held(pipeline, optimizer), train(pipeline, optimizer, inputs)))
    return found


def resumed_alone(
    folder: str, again: str | None = None, options: StateDictOptions | None = FLAT
) -> tuple[Tensors, torch.Tensor]:
    module, inputs = tied(seed=1)
    optimizer = resumed(module, folder, options)
    if again is not None:
        dcp.save(state_of(module, optimizer), checkpoint_id=again)
    return held(module, optimizer), train(module, optimizer, inputs)


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def test_a_pipeline_is_resumed_anywhere(four: Workers, tmp_path: Path) -> None:
    plan = plan_by_hand(*tied(), {"pp": 2, "tp": 2}, schedule("1F1B", 2, 2))
    assert any(not one.is_replicate() for stage in plan.stages for row in stage.placements.values() for one in row)
    names = ("pipeline", "groups", "replicas", "alone")
    pipeline, groups, replicas, alone = (str(tmp_path / name) for name in names)
    first = four.run(saved_by_a_pipeline, plan, pipeline, groups)
    second = four.run(resumed_by_replicas, pipeline, replicas)
    tensors, loss = resumed_alone(pipeline)
    third = resumed_alone(replicas, alone)
    # The options of every group stand in the file, with the names of all ranks.
    in_groups = resumed_alone(groups, options=None)
    last = [found for rank in four.run(resumed_by_a_pipeline, plan, alone, groups) for found in rank]
    assert set().union(*(held for held, _ in first)) == tensors.keys()
    for found, next_loss in (*first, *second, third, in_groups, *last):
        assert_same(found, tensors)
        torch.testing.assert_close(next_loss, loss, rtol=1e-9, atol=0.0)
    assert second[0][0].keys() == third[0].keys() == in_groups[0].keys() == tensors.keys()


class _PartlyRead(nn.Module):
    """Holds a layer and a buffer that `forward` does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("version", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def _state_of_partly_read() -> list[str]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x = torch.randn(8, 4)
    pipeline = autoshard.parallelize(
        _PartlyRead(), mesh, (), {"x": x}, cluster=fast_links(), pipeline=autoshard.Pipeline(microbatches=2)
    )
    optimizer = torch.optim.AdamW(pipeline.parameters())
    pipeline.train_step(x=x)
    optimizer.step()
    pipeline.eval()
    pipeline.eval_step(x=x)
    return list(pipeline.state_dict())


def test_what_forward_does_not_read_is_in_the_state(two: Workers) -> None:
    torch.manual_seed(0)
    model = _PartlyRead()
    held = [name for names in two.run(_state_of_partly_read) for name in names]
    assert sorted(held) == sorted(model.state_dict())
