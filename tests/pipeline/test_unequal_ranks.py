"""Stages on unequal numbers of devices, as task graphs in `forward` ask for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture.marks import Primitive
from autoshard.errors import HintError, PlanError
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.tools.verify.float64 import Float64Mode
from tests.models.common import fixed_seed
from tests.option_groups import grouped
from tests.pipeline.pipelines import (
    assert_equal,
    held_by,
    optimizer_of,
    resume,
    state_of,
    train_alone,
    train_once,
    train_pipeline,
)
from tests.training import fast_links
from tests.workers import Workers

Primitives = tuple[Primitive, ...]
LITTLE: Primitives = (autoshard.replicate(1), autoshard.split(3))
WIDE: Primitives = (autoshard.replicate(3), autoshard.split(1))
MIDDLE: Primitives = (autoshard.replicate(1), autoshard.replicate(2), autoshard.split(1))


class Marked(nn.Module):
    """Layers one behind the other, each with a number of devices of its own."""

    def __init__(self, primitives: Primitives) -> None:
        super().__init__()
        self.primitives = primitives
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in primitives)
        self.head = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for primitive, layer in zip(self.primitives[:-1], self.layers, strict=False):
            with primitive:
                x = F.gelu(layer(x))
        with self.primitives[-1]:
            return F.cross_entropy(self.head(torch.tanh(self.layers[-1](x))) * 4, labels)


def made(primitives: Primitives) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with fixed_seed(torch.float64, 0):
        return Marked(primitives), {"x": torch.randn(12, 12) * 4, "labels": torch.randint(6, (12,))}


def planned(primitives: Primitives, mesh: dict[str, int], **said: Any) -> PipelinePlan:
    module, inputs = made(primitives)
    with Float64Mode():
        plan = autoshard.plan(module, mesh, (), inputs, cluster=fast_links(), **grouped(said))
    assert isinstance(plan, PipelinePlan)
    return plan


def pipeline_on(primitives: Primitives, plan: PipelinePlan) -> tuple[PipelineModule, dict[str, torch.Tensor]]:
    module, inputs = made(primitives)
    mesh = init_device_mesh("cpu", plan.mesh.sizes, mesh_dim_names=plan.mesh.names)
    with Float64Mode():
        plan = PipelinePlan.from_json(plan.to_json())
        pipeline = autoshard.parallelize(module, mesh, (), inputs, plan=plan, cluster=fast_links())
    assert isinstance(pipeline, PipelineModule)
    return pipeline, inputs


def on_ranks(primitives: Primitives, plan: PipelinePlan) -> dict[str, torch.Tensor]:
    """What training finds on this process."""
    return train_pipeline(*pipeline_on(primitives, plan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("primitives", "schedule"),
    [(LITTLE, "1F1B"), (WIDE, "InterleavedZeroBubble"), (MIDDLE, "1F1B")],
    ids=["little", "wide", "middle"],
)
def test_numbers_are_those_of_one_device(four: Workers, primitives: Primitives, schedule: str) -> None:
    plan = planned(primitives, {"pp": 4}, schedule=schedule, microbatches=4)
    assert plan.devices == tuple(one.devices for one in primitives)
    assert plan.schedule.ranks == len(primitives)
    assert_equal(four.run(on_ranks, primitives, plan), train_alone(*made(primitives), 1))


@pytest.mark.slow
def test_a_pipeline_on_unequal_ranks_may_be_there_twice() -> None:
    """Nested data parallelism (Whale, 3.1.2): twice as many devices as the task graphs ask for."""
    primitives = (autoshard.replicate(1), autoshard.split(2))
    plan = planned(primitives, {"dp": 2, "pp": 3}, schedule="1F1B", microbatches=2)
    assert plan.devices == (1, 2)
    with Workers(6, timeout=100.0) as six:
        assert_equal(six.run(on_ranks, primitives, plan), train_alone(*made(primitives), 1))


def saved_and_resumed(plan: PipelinePlan, folder: str) -> tuple[float, float]:
    """Loss of the step after a checkpoint: of the pipeline that goes on, and of one that resumes."""
    pipeline, inputs = pipeline_on(LITTLE, plan)
    optimizer = optimizer_of(pipeline)
    train_once(pipeline, optimizer, inputs, 0)
    dcp.save(state_of(pipeline, optimizer), checkpoint_id=folder)
    other, _ = pipeline_on(LITTLE, plan)
    others = optimizer_of(other)
    train_once(other, others, {name: tensor.flip(0) for name, tensor in inputs.items()}, 0)
    resume(other, others, folder)
    later = [train_once(*one, inputs, 1)["step 1"].item() for one in ((pipeline, optimizer), (other, others))]
    return later[0], later[1]


def resumed_alone(folder: str) -> float:
    """The same in one process."""
    module, inputs = made(LITTLE)
    state = {"model": module.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    module.load_state_dict(state["model"])
    return float(module(**inputs))


@pytest.mark.slow
def test_checkpoints_go_from_unequal_ranks_to_one_process(four: Workers, tmp_path: Path) -> None:
    plan = planned(LITTLE, {"pp": 4}, schedule="1F1B", microbatches=4)
    found = four.run(saved_and_resumed, plan, str(tmp_path))
    assert {goes_on == resumes for goes_on, resumes in found} == {True}
    assert resumed_alone(str(tmp_path)) == pytest.approx(found[0][0], rel=1e-9)


def materialized(plan: PipelinePlan) -> dict[str, torch.Tensor]:
    """What this process has of a model that was on the meta device."""
    with torch.device("meta"), fixed_seed(torch.float64, 0):
        module = Marked(LITTLE)
    mesh = init_device_mesh("cpu", plan.mesh.sizes, mesh_dim_names=plan.mesh.names)
    with Float64Mode():
        pipeline = autoshard.parallelize(module, mesh, (), made(LITTLE)[1], plan=plan, cluster=fast_links())
    torch.manual_seed(7)
    autoshard.materialize(pipeline)
    return held_by(pipeline)


@pytest.mark.slow
def test_unequal_ranks_draw_what_one_process_draws(four: Workers) -> None:
    plan = planned(LITTLE, {"pp": 4}, schedule="1F1B", microbatches=4)
    found = four.run(materialized, plan)
    with fixed_seed(torch.float64, 7):
        expected = Marked(LITTLE).state_dict()
    assert set().union(*found) == expected.keys()
    for held in found:
        for name, value in held.items():
            torch.testing.assert_close(value, expected[name], rtol=0.0, atol=0.0)


def test_the_plan_says_how_many_devices_every_rank_has() -> None:
    plan = planned(MIDDLE, {"pp": 4}, microbatches=4)
    assert "ranks of 1, 2, 1 devices" in str(plan)
    assert [stage.mesh for stage in plan.stages] == [plan.layout.stage(rank) for rank in range(3)]
    with pytest.raises(PlanError, match=r"pipeline ranks have 1 \+ 2 of the devices along axis pp"):
        dataclasses.replace(plan, devices=(1, 2))


def test_as_many_devices_as_places_on_the_axis_are_places_of_their_own() -> None:
    plan = planned((autoshard.replicate(2), autoshard.split(2)), {"pp": 2, "x": 2}, microbatches=4)
    assert plan.devices == ()
    assert plan.layout.devices == (1, 1)


def test_numbers_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(HintError, match="let the numbers add up to the 4 devices along the pipeline's axis"):
        planned((autoshard.replicate(1), autoshard.split(2)), {"pp": 4}, microbatches=4)


class Tied(Marked):
    """The last layer has the weights of the first."""

    def __init__(self, primitives: Primitives) -> None:
        super().__init__(primitives)
        self.layers[-1].weight = self.layers[0].weight


def test_tied_parameters_need_ranks_that_are_alike() -> None:
    with Float64Mode(), fixed_seed(torch.float64, 0):
        inputs = made(LITTLE)[1]
        with pytest.raises(PlanError, match="What stages share has to lie alike on all"):
            autoshard.plan(
                Tied(LITTLE), {"pp": 4}, (), inputs, cluster=fast_links(), pipeline=autoshard.Pipeline(microbatches=4)
            )
